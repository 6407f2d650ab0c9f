/** Every series that the job reported, the usual ones first. */

import { bytes, integer, metric, plural } from "../format";
import { palette } from "../palette";
import { Empty } from "../parts/basics";
import { Chart, type Colour, coloursOf, crosshair, zoomed } from "../parts/chart";
import { bestOf, type Curve, curvesOf, valueAt } from "../store/curves";
import { isTerminal, type JobStore } from "../store/job";
import { isCommand } from "../store/mode";
import { theme } from "../store/session";

const FIRST = ["loss", "samples_per_s", "step_ms", "sync_ms", "test_auc", "sync_bytes"];
const TITLE: Readonly<Record<string, string>> = {
  loss: "Loss",
  samples_per_s: "Samples/s",
  step_ms: "Step, ms",
  sync_ms: "Gradient sync, ms",
  sync_bytes: "Gradient bytes per step",
  test_auc: "Test AUC",
};

export function MetricsView({ store }: { store: JobStore }) {
  store.metricsVersion.value;
  const all = curvesOf(store.series);
  const bases = [...all.keys()].filter((base) => isWorthAChart(base, all.get(base) ?? []));
  bases.sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  const zoom = zoomed.value;
  return (
    <section class="panel" aria-labelledby="metrics-title">
      <div class="panel-title">
        <h2 id="metrics-title">Metrics</h2>
        {bases.length > 0 && <em class="clip">{plural(bases.length, "metric")} by step · drag to zoom all</em>}
        {zoom !== null && (
          <div class="tools">
            <button
              type="button"
              class="btn small"
              data-testid="zoom-out"
              onClick={() => {
                zoomed.value = null;
              }}
            >
              Steps {integer(zoom[0])} – {integer(zoom[1])} · show all
            </button>
          </div>
        )}
      </div>
      {bases.length === 0 ? (
        <Empty title={store.job.value !== null && isTerminal(store.job.value) ? "No metrics" : "No metrics yet"}>
          <span>{whence(store)}</span>
          <code>penstock.telemetry.log(name=value, step=…)</code>
        </Empty>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Charts">
          <div class="charts">
            {bases.map((base) => (
              <MetricCard key={base} store={store} base={base} curves={all.get(base) ?? []} />
            ))}
          </div>
        </div>
      )}
    </section>
  );
}

/** A graph of one replica exchanges nothing in itself: two charts of zeros would only take room. */
function isWorthAChart(base: string, curves: readonly Curve[]): boolean {
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

function MetricCard({ store, base, curves }: { store: JobStore; base: string; curves: readonly Curve[] }) {
  const title = TITLE[base] ?? base;
  const colour = base in COLOUR ? COLOUR[base as keyof typeof COLOUR] : "accent";
  return (
    <section class="chart" aria-label={title}>
      <header>
        <span>{title}</span>
        <Values base={base} curves={curves} colour={colour} />
      </header>
      <Chart store={store} base={base} height={190} colour={colour} />
    </section>
  );
}

/** What each trainer's curve has at the crosshair, or last; of a score the best as well. */
function Values({ base, curves, colour }: { base: string; curves: readonly Curve[]; colour: Colour }) {
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
      {at !== null && <small class="muted">step {integer(at)}</small>}
      {curves.map((curve, index) => (
        <b key={curve.name}>
          {curves.length > 1 && <i class="swatch" style={{ background: strokes[index % strokes.length] }} />}
          {curve.who !== "" && <small class="muted">{curve.who}</small>}
          {text(at === null ? curve.series.latest : valueAt(curve.series, at))}
        </b>
      ))}
    </span>
  );
}
