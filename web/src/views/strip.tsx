/** One bar a sampled step, above graph and timeline: click, drag, arrow keys, [ and ] choose the step that they show. */
import { signal, untracked, useSignalEffect } from "@preact/signals";
import type { TargetedKeyboardEvent, TargetedPointerEvent } from "preact";
import { ApiError } from "../api";
import { integer, nanos, percent, plural } from "../format";
import { ErrorCard } from "../parts/basics";
import { setQuery, url } from "../router";
import { currentJob } from "../store/current";
import { type Bar, isInFull, neighbour } from "../store/history";
import { isTerminal, type JobStore } from "../store/job";

const MOST_BARS = 240;
/** Pages of the recording that a finished job's strip begins with, and that a click fetches. */
const PAGES = 2;
const HEIGHT = 100;

const failure = signal<ApiError | null>(null);

const barsOf = (store: JobStore): Bar[] => store.history.bars((hash) => store.trainingDocument(hash));

function choose(step: number | null): void {
  setQuery({ step: step === null ? null : String(step) });
  // The effect that follows the address waits for an animation frame; a second key may come before.
  if (currentJob.value !== null) currentJob.value.history.wanted.value = step;
}

/** [ and ]: the step before, the step after. */
export function moveStep(by: -1 | 1): void {
  const store = currentJob.value;
  if (store !== null) choose(neighbour(barsOf(store), store.history.wanted.value, by));
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
    const step = url.value.searchParams.get("step");
    store.history.wanted.value = step !== null && /^\d+$/.test(step) ? Number(step) : null;
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
  const index = chosen === null ? bars.length - 1 : bars.findIndex((bar) => bar.key === chosen.key);
  const first = Math.max(0, Math.min(index - MOST_BARS / 2, bars.length - MOST_BARS));
  const shown = bars.slice(first, first + MOST_BARS);
  return (
    <section class="strip" aria-label="Sampled steps">
      <Bars shown={shown} at={index - first} live={chosen === null} move={moveStep} />
      <span class="strip-text" data-testid="strip-text">
        {wordsOf(bars[index], chosen !== null)} · {integer(index + 1)} of {plural(bars.length, "sampled step")}
      </span>
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

function wordsOf(bar: Bar | undefined, replayed: boolean): string {
  if (bar === undefined) return "";
  return `${replayed ? "replay of step" : "step"} ${integer(bar.step)} · ${nanos(bar.spanNs)}${isInFull(bar) ? " · recorded in full" : ""} · sync ${percent(bar.sync)} of operator time`;
}

interface BarsProps {
  readonly shown: readonly Bar[];
  readonly at: number;
  readonly live: boolean;
  readonly move: (by: -1 | 1) => void;
}

function Bars({ shown, at, live, move }: BarsProps) {
  const longest = shown.reduce((most, bar) => Math.max(most, bar.spanNs), 1);
  const pick = (event: TargetedPointerEvent<HTMLElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    const index = Math.floor(((event.clientX - box.left) / box.width) * shown.length);
    choose(shown[Math.max(0, Math.min(shown.length - 1, index))]?.step ?? null);
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
        pick(event);
      }}
      onPointerMove={(event) => event.buttons === 1 && pick(event)}
    >
      <svg viewBox={`0 0 ${Math.max(24, shown.length)} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        <rect class={live ? "strip-at" : "strip-at chosen"} x={at} y={0} width={1} height={HEIGHT} />
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
  else if (event.key === "Home") choose(shown[0]?.step ?? null);
  else if (event.key === "End") choose(null);
  else return;
  event.preventDefault();
}
