/** One bar a sampled step, above graph and timeline: click, drag, arrow keys, [ and ] choose the step that they show. */
import { signal, untracked, useSignalEffect } from "@preact/signals";
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { useRef } from "preact/hooks";
import { ApiError } from "../api";
import { integer, nanos, percent, plural } from "../format";
import { ErrorCard } from "../parts/basics";
import { setQuery, url } from "../router";
import { currentJob } from "../store/current";
import {
  type Bar,
  isInFull,
  neighbour,
  newestInFull,
  oneStep,
  rangeOf,
  rangeText,
  type Sampled,
  type StepRange,
} from "../store/history";
import { isTerminal, type JobStore } from "../store/job";
import { endOfTrace } from "../timeline/model";
import { cut } from "./graphaddress";

const MOST_BARS = 240;
/** Pages of the recording that a finished job's strip begins with, and that a click fetches. */
const PAGES = 2;
const HEIGHT = 100;

const failure = signal<ApiError | null>(null);

const barsOf = (store: JobStore): Bar[] => store.history.bars((hash) => store.trainingDocument(hash));

function choose(steps: StepRange | null): void {
  setQuery({ step: steps === null ? null : rangeText(steps), span: null, held: null });
  // The effect that follows the address waits for an animation frame; a second key may come before.
  if (currentJob.value !== null) currentJob.value.history.wanted.value = steps;
}

const chooseOne = (step: number | null | undefined): void => choose(step == null ? null : oneStep(step));

/** [ and ]: the step before, the step after. */
export function moveStep(by: -1 | 1): void {
  const store = currentJob.value;
  if (store !== null) chooseOne(neighbour(barsOf(store), store.history.wanted.value, by));
}

async function load(store: JobStore): Promise<void> {
  failure.value = null;
  try {
    await store.loadHistory(PAGES);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    failure.value = error;
  }
}

export function StepStrip({ store }: { store: JobStore }) {
  useSignalEffect(() => {
    const wanted = rangeOf(url.value.searchParams.get("step"));
    const before = store.history.wanted.peek();
    // An equal range is no change: what is drawn of it stays.
    if (wanted?.first !== before?.first || wanted?.last !== before?.last) store.history.wanted.value = wanted;
  });
  useSignalEffect(() => {
    // A job that is over has few steps in its stream; one that runs brings its own.
    const job = store.job.value;
    const wants = store.history.wanted.value !== null && store.history.chosen.value === null;
    if (job !== null && (isTerminal(job) || wants)) untracked(() => void (store.history.loads === 0 && load(store)));
  });
  store.stepVersion.value;
  store.graphVersion.value;
  store.history.version.value;
  const bars = barsOf(store);
  if (bars.length === 0) return null;
  const chosen = store.history.chosen.value;
  const index = chosen === null ? bars.length - 1 : bars.findLastIndex((bar) => bar.step === chosen.step);
  const first = Math.max(0, Math.min(index - MOST_BARS / 2, bars.length - MOST_BARS));
  const shown = bars.slice(first, first + MOST_BARS);
  return (
    <section class="strip" aria-label="Sampled steps">
      <Bars shown={shown} at={index - first} width={widthOf(shown, chosen)} live={chosen === null} move={moveStep} />
      <NotHere store={store} />
      <span class="strip-text" data-testid="strip-text">
        {chosen?.range === undefined
          ? `${wordsOf(bars[index], chosen !== null)} · ${integer(index + 1)} of ${plural(bars.length, "sampled step")}`
          : wordsOfRange(chosen, chosen.range, store.history.wanted.value)}
      </span>
      <InFull store={store} chosen={chosen} />
      {store.history.more.value && (
        <button
          type="button"
          class="btn small"
          disabled={store.history.busy.value}
          onClick={() => void load(store)}
          data-testid="more-steps"
        >
          {store.history.busy.value ? "Loading…" : "Load recorded steps"}
        </button>
      )}
      {chosen !== null && (
        <button type="button" class="btn small" onClick={() => choose(null)} data-testid="newest-step">
          Newest
        </button>
      )}
      {failure.value !== null && <ErrorCard error={failure.value} retry={() => void load(store)} />}
    </section>
  );
}

/** A link may name a step that was not sampled, or that the dashboard has not fetched. */
function NotHere({ store }: { store: JobStore }) {
  const text = url.value.searchParams.get("step");
  const { wanted, chosen, busy } = store.history;
  if (text === null || chosen.value !== null || busy.value) return null;
  const what = wanted.value === null ? `“${cut(text)}” is no step` : `step ${rangeText(wanted.value)} is not here`;
  return (
    <span class="strip-text muted" role="status" data-testid="strip-note">
      {what}; the newest is shown:
    </span>
  );
}

/** How many bars of those that are drawn belong to what was chosen. */
const widthOf = (shown: readonly Bar[], chosen: Sampled | null): number =>
  chosen?.range === undefined ? 1 : shown.filter((bar) => isWithin(bar, chosen)).length;

const isWithin = (bar: Bar, { step, range }: Sampled): boolean =>
  bar.step <= step && bar.step >= (range?.first ?? step);

/** All steps of the newest while that was recorded in full, at once. */
function InFull({ store, chosen }: { store: JobStore; chosen: Sampled | null }) {
  const range = newestInFull(store.history.all());
  if (range === null || (chosen?.range !== undefined && chosen.step === range.last)) return null;
  return (
    <button
      type="button"
      class="btn small"
      title="Draw the steps that were recorded in full on one axis. Drag with Shift over bars for others."
      onClick={() => choose(range)}
      data-testid="show-in-full"
    >
      Show steps {integer(range.first)} to {integer(range.last)} at once
    </button>
  );
}

function wordsOfRange(
  chosen: Sampled,
  { first, count }: { first: number; count: number },
  wanted: StepRange | null,
): string {
  const spans = chosen.traces.map((trace) => Number(trace.t0Ns - chosen.t0Ns) + endOfTrace(trace));
  const cut = wanted !== null && wanted.first < first ? `, the newest of those since ${integer(wanted.first)}` : "";
  return `replay of steps ${integer(first)} to ${integer(chosen.step)} · ${plural(count, "sampled step")} in ${nanos(Math.max(...spans))}${cut}`;
}

function wordsOf(bar: Bar | undefined, replayed: boolean): string {
  if (bar === undefined) return "";
  return `${replayed ? "replay of step" : "step"} ${integer(bar.step)} · ${nanos(bar.spanNs)}${isInFull(bar) ? " · recorded in full" : ""} · sync ${percent(bar.sync)} of operator time`;
}

interface BarsProps {
  readonly shown: readonly Bar[];
  /** The last of those that were chosen, and how many. */
  readonly at: number;
  readonly width: number;
  readonly live: boolean;
  readonly move: (by: -1 | 1) => void;
}

function Bars({ shown, at, width, live, move }: BarsProps) {
  const from = useRef<number | null>(null);
  const longest = shown.reduce((most, bar) => Math.max(most, bar.spanNs), 1);
  const pick = (event: TargetedPointerEvent<HTMLElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    const index = Math.floor(((event.clientX - box.left) / box.width) * shown.length);
    const step = shown[Math.max(0, Math.min(shown.length - 1, index))]?.step;
    if (step === undefined) return;
    const begin = from.current ?? step;
    choose({ first: Math.min(begin, step), last: Math.max(begin, step) });
  };
  return (
    <div
      class="strip-bars"
      role="slider"
      tabIndex={0}
      aria-label="Step"
      aria-valuemin={1}
      aria-valuemax={shown.length}
      aria-valuenow={at + 1}
      aria-valuetext={wordsOf(shown[at], !live)}
      data-testid="strip"
      onKeyDown={(event) => onKey(event, shown, move)}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        from.current = null;
        pick(event);
        from.current = event.shiftKey ? (currentJob.value?.history.wanted.value?.last ?? null) : null;
      }}
      onPointerMove={(event) => event.buttons === 1 && pick(event)}
    >
      <svg viewBox={`0 0 ${Math.max(24, shown.length)} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        <rect class={live ? "strip-at" : "strip-at chosen"} x={at - width + 1} y={0} width={width} height={HEIGHT} />
        {(["compute", "sync", "input"] as const).map((part) => (
          <path key={part} class={`strip-${part}`} d={pathOf(shown, part, longest)} />
        ))}
        <path class="strip-full" d={fullOf(shown)} data-testid="strip-full" />
      </svg>
    </div>
  );
}

/** A line over the steps that were recorded in full. */
const fullOf = (shown: readonly Bar[]): string =>
  shown.map((bar, index) => (isInFull(bar) ? `M${index} 0h1v6h-1z` : "")).join("");

function pathOf(shown: readonly Bar[], part: "compute" | "sync" | "input", longest: number): string {
  return shown
    .map((bar, index) => {
      const height = (bar.spanNs / longest) * HEIGHT;
      const below = part === "compute" ? 0 : part === "sync" ? bar.compute : bar.compute + bar.sync;
      const bottom = HEIGHT - height * below;
      return `M${index + 0.12} ${bottom.toFixed(1)}h0.76v${(-height * bar[part]).toFixed(1)}h-0.76z`;
    })
    .join("");
}

function onKey(event: TargetedKeyboardEvent<HTMLElement>, shown: readonly Bar[], move: (by: -1 | 1) => void): void {
  if (event.key === "ArrowLeft") move(-1);
  else if (event.key === "ArrowRight") move(1);
  else if (event.key === "Home") chooseOne(shown[0]?.step);
  else if (event.key === "End") choose(null);
  else return;
  event.preventDefault();
}
