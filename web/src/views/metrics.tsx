/** Every series that the job reported, the usual ones first. */

import { bytes, metric } from "../format";
import { Empty } from "../parts/basics";
import { Chart } from "../parts/chart";
import { isTerminal, type JobStore } from "../store/job";
import { isCommand } from "../store/mode";

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
  const names = [...store.series.byName.keys()].filter((name) => isWorthAChart(store, name));
  names.sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
  return (
    <section class="panel" aria-labelledby="metrics-title">
      <div class="panel-title">
        <h2 id="metrics-title">Metrics</h2>
        {names.length > 0 && <em>{names.length} series by step · drag to zoom, double-click to zoom out</em>}
      </div>
      {names.length === 0 ? (
        <Empty title={store.job.value !== null && isTerminal(store.job.value) ? "No metrics" : "No metrics yet"}>
          <span>{whence(store)}</span>
          <code>penstock.telemetry.log(name=value, step=…)</code>
        </Empty>
      ) : (
        <div class="scroll">
          <div class="charts">
            {names.map((name) => (
              <MetricCard key={name} store={store} name={name} />
            ))}
          </div>
        </div>
      )}
    </section>
  );
}

/** A graph of one replica exchanges nothing in itself: two charts of zeros would only take room. */
function isWorthAChart(store: JobStore, name: string): boolean {
  const values = store.series.byName.get(name)?.value ?? [];
  return /^sync_(ms|bytes)(\.|$)/.test(name) ? values.some((one) => one > 0) : values.length > 0;
}

function whence(store: JobStore): string {
  const job = store.job.value;
  if (job !== null && isCommand(job)) return "A command reports what it wants to have drawn with";
  return "Steps report loss and speed by themselves; add your own with";
}

/** "loss.trainer1" is the loss of trainer 1; that of the first trainer has the name alone. */
function parts(name: string): readonly [string, string] {
  const found = /^(.+)\.trainer(\d+)$/.exec(name);
  return [found?.[1] ?? name, found?.[2] ?? ""];
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

function MetricCard({ store, name }: { store: JobStore; name: string }) {
  const latest = store.series.latest(name);
  const [base, trainer] = parts(name);
  const title = [TITLE[base] ?? base, ...(trainer === "" ? [] : [`trainer ${trainer}`])].join(" · ");
  const colour = base in COLOUR ? COLOUR[base as keyof typeof COLOUR] : "accent";
  return (
    <section class="chart" aria-label={title}>
      <header>
        <span>{title}</span>
        <b>{base === "sync_bytes" && latest !== undefined ? bytes(latest) : metric(latest)}</b>
      </header>
      <Chart store={store} name={name} height={190} colour={colour} />
    </section>
  );
}
