/** Every series that the job reported, the usual ones first. */

import { untracked, useSignalEffect } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { bytes, clock, integer, metric, plural } from "../format";
import { palette } from "../palette";
import { Empty, ErrorCard } from "../parts/basics";
import { Chart, type Colour, coloursOf, crosshair, type Look, position, zoomOut } from "../parts/chart";
import { setQuery, url } from "../router";
import { zoomOf } from "../store/brush";
import { jobsStore } from "../store/current";
import { type Axis, bestOf, type Curve, curvesOf, valueAt } from "../store/curves";
import { isTerminal, type JobStore } from "../store/job";
import { isCommand } from "../store/mode";
import { MOST_RUNS, shortId, wantedOf } from "../store/runs";
import { theme } from "../store/session";
import { Compared, runName } from "./compared";
import { MediaCards } from "./media";

const MOST_OFFERED = 40;
const FIRST = [
  "loss",
  "penstock/eval_loss",
  "eval_loss",
  "samples_per_s",
  "step_ms",
  "sync_ms",
  "test_auc",
  "sync_bytes",
];
const TITLE: Readonly<Record<string, string>> = {
  loss: "Loss",
  "penstock/eval_loss": "Loss of evaluation",
  samples_per_s: "Samples/s",
  step_ms: "Step, ms",
  sync_ms: "Gradient sync, ms",
  sync_bytes: "Gradient bytes per step",
  test_auc: "Test AUC",
  checkpoint_s: "Checkpoint, s",
};

const SMOOTHING = [0, 0.6, 0.9, 0.98] as const;

/** Smoothing, axes and other runs stand in the address. */
function lookOf(): Look {
  const at = url.value.searchParams;
  const smoothing = Number(at.get("smooth") ?? 0);
  return {
    smoothing: smoothing > 0 && smoothing < 1 ? smoothing : 0,
    log: at.get("log") === "1",
    axis: at.get("x") === "time" ? "time" : "step",
  };
}

const wantedRuns = (): string[] => wantedOf(url.value.searchParams.get("with"));

/** How often the curves of other jobs that are not over are fetched again. */
const REFRESH_MS = 10_000;

function goesOn(jobId: string): boolean {
  const job = jobsStore.value?.find(jobId);
  return job !== undefined && !isTerminal(job);
}

function Looks({ look }: { look: Look }) {
  return (
    <>
      <select
        aria-label="Smoothing"
        value={String(look.smoothing)}
        onChange={(event) => setQuery({ smooth: event.currentTarget.value === "0" ? null : event.currentTarget.value })}
        data-testid="smoothing"
      >
        {SMOOTHING.map((weight) => (
          <option key={weight} value={String(weight)}>
            {weight === 0 ? "not smoothed" : `smoothed ${weight}`}
          </option>
        ))}
      </select>
      <button
        type="button"
        class="btn small"
        aria-pressed={look.axis === "time"}
        title="Seconds since each job's first point instead of steps"
        onClick={() => setQuery({ x: look.axis === "time" ? null : "time" })}
        data-testid="time-axis"
      >
        By time
      </button>
      <button
        type="button"
        class="btn small"
        aria-pressed={look.log}
        onClick={() => setQuery({ log: look.log ? null : "1" })}
        data-testid="log-axis"
      >
        Log axis
      </button>
    </>
  );
}

/** Adds another job's curves to all charts: jobs of the same name first. */
function Compare({ store }: { store: JobStore }) {
  const wanted = wantedRuns();
  const name = store.job.value?.name ?? "";
  const jobs = (jobsStore.value?.jobs.value ?? []).filter((job) => job.id !== store.jobId);
  const offered = jobs
    .filter((job) => !wanted.includes(job.id) && job.latest.step !== undefined)
    .sort((a, b) => Number(b.name === name) - Number(a.name === name));
  const want = (ids: readonly string[]) => setQuery({ with: ids.length === 0 ? null : ids.join(",") });
  return (
    <>
      {wanted.map((id) => (
        <button
          key={id}
          type="button"
          class="btn small"
          aria-label={`Without ${jobsStore.value?.find(id)?.name ?? id}`}
          onClick={() => want(wanted.filter((one) => one !== id))}
        >
          {jobsStore.value?.find(id)?.name ?? shortId(id)} ✕
        </button>
      ))}
      {offered.length > 0 && wanted.length < MOST_RUNS && (
        <select
          aria-label="Compare with another job"
          value=""
          onChange={(event) => want([...wanted, event.currentTarget.value])}
          data-testid="compare"
        >
          <option value="">compare with…</option>
          {offered.slice(0, MOST_OFFERED).map((job) => (
            <option key={job.id} value={job.id}>
              {job.name} · {clock(job.created_at)} · {job.state.toLowerCase()}
            </option>
          ))}
        </select>
      )}
    </>
  );
}

export function MetricsView({ store }: { store: JobStore }) {
  store.metricsVersion.value;
  useSignalEffect(() => {
    const names = new Map(
      wantedRuns().flatMap((id) => {
        const job = jobsStore.value?.find(id);
        return job === undefined ? [] : [[id, runName(job)] as const];
      }),
    );
    untracked(() => store.others.name(names));
  });
  const wanted = wantedRuns().join();
  useEffect(() => void store.others.want(wantedRuns()), [store, wanted]);
  useEffect(() => {
    const timer = setInterval(() => void store.others.refresh(goesOn), REFRESH_MS);
    return () => clearInterval(timer);
  }, [store]);
  useEffect(() => store.media.open(), [store]);
  const hasMedia = store.media.series.value.length > 0;
  const look = lookOf();
  const failure = store.others.error.value;
  const all = curvesOf(store.series, store.others.shown());
  const bases = [...all.keys()].filter((base) => isWorthAChart(base, all.get(base) ?? []));
  bases.sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  const zoom = zoomOf(url.value.searchParams, look.axis);
  const by = look.axis === "time" ? "time" : "step";
  return (
    <section class="panel" aria-labelledby="metrics-title">
      <div class="panel-title">
        <h2 id="metrics-title">Metrics</h2>
        {bases.length > 0 && (
          <em class="clip">
            {plural(bases.length, "metric")} by {by} · drag to zoom all
          </em>
        )}
        <div class="tools">
          {zoom !== null && (
            <button type="button" class="btn small" data-testid="zoom-out" onClick={() => zoomOut(look.axis)}>
              {look.axis === "step" && "Steps "}
              {position(look.axis, zoom[0])} – {position(look.axis, zoom[1])} · show all
            </button>
          )}
          <Compare store={store} />
          <Looks look={look} />
        </div>
      </div>
      {failure !== null && <ErrorCard error={failure} />}
      {bases.length === 0 && !hasMedia ? (
        <Empty title={store.job.value !== null && isTerminal(store.job.value) ? "No metrics" : "No metrics yet"}>
          <span>{whence(store)}</span>
          <code>penstock.log(name=value, step=…)</code>
        </Empty>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Charts">
          {wanted !== "" && <Compared store={store} ids={wantedRuns()} />}
          <div class="charts">
            {bases.map((base) => (
              <MetricCard key={base} store={store} base={base} curves={all.get(base) ?? []} look={look} />
            ))}
          </div>
          <MediaCards store={store} />
        </div>
      )}
    </section>
  );
}

/** A graph of one replica exchanges nothing in itself: two charts of zeros would only take room. */
function isWorthAChart(base: string, curves: readonly Curve[]): boolean {
  if (base === "checkpoint_step") return false; // Config has them as a table
  const some = (test: (value: number) => boolean) => curves.some((curve) => curve.series.value.some(test));
  return /^sync_(ms|bytes)$/.test(base) ? some((value) => value > 0) : some(() => true);
}

function whence(store: JobStore): string {
  const job = store.job.value;
  if (job !== null && isCommand(job)) return "A command reports what it wants to have drawn with";
  return "Steps report loss and speed by themselves; add your own with";
}

function place(name: string): number {
  const at = FIRST.indexOf(name);
  return at < 0 ? FIRST.length : at;
}

const COLOUR = {
  samples_per_s: "forward",
  step_ms: "backward",
  sync_ms: "communication",
  sync_bytes: "communication",
  test_auc: "optimize",
} as const;

interface CardProps {
  readonly store: JobStore;
  readonly base: string;
  readonly curves: readonly Curve[];
  readonly look: Look;
}

function MetricCard({ store, base, curves, look }: CardProps) {
  const title = TITLE[base] ?? base;
  const colour = base in COLOUR ? COLOUR[base as keyof typeof COLOUR] : "accent";
  return (
    <section class="chart" aria-label={title}>
      <header>
        <span>{title}</span>
        <Values base={base} curves={curves} colour={colour} axis={look.axis} />
      </header>
      <Chart store={store} base={base} height={190} colour={colour} look={look} />
    </section>
  );
}

/** What each trainer's curve has at the crosshair, or last; of a score the best as well. */
function Values(props: { base: string; curves: readonly Curve[]; colour: Colour; axis: Axis }) {
  const { base, curves, colour, axis } = props;
  const at = crosshair.value;
  theme.value;
  const strokes = coloursOf(palette(), colour, curves.length);
  const text = (value: number | undefined) =>
    base === "sync_bytes" && value !== undefined && Number.isFinite(value) ? bytes(value) : metric(value);
  const first = curves[0];
  const best = first === undefined || at !== null ? null : bestOf(base, first.series);
  return (
    <span class="chart-values" data-testid={`values-${base}`}>
      {best !== null && (
        <small class="muted">
          best {text(best.value)} at {integer(best.step)}
        </small>
      )}
      {at !== null && (
        <small class="muted">
          {axis === "step" ? "step" : "after"} {position(axis, at)}
        </small>
      )}
      {curves.map((curve, index) => (
        <b key={curve.key}>
          {curves.length > 1 && <i class="swatch" style={{ background: strokes[index % strokes.length] }} />}
          {curve.who !== "" && <small class="muted">{curve.who}</small>}
          {text(at === null ? curve.series.latest : valueAt(curve, at, axis))}
        </b>
      ))}
    </span>
  );
}
