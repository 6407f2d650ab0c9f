/** Name, state, progress, the sentence that says why, the metrics that decide, and Stop. */
import { useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { age, clock, compact, integer, metric, millis, percent, plural, seconds } from "../format";
import { Dialog, ErrorCard, Progress, StateChip } from "../parts/basics";
import { attemptWords } from "../store/attempts";
import { bestOf, newestStep } from "../store/curves";
import { isTerminal, type JobStore } from "../store/job";
import { isCommand } from "../store/mode";
import type { Job } from "../types";
import { exchangeOf, hasPservers, longestWaitNs } from "./exchange";
import { Why } from "./why";

const MOST_KPIS = 4;

export function JobHeader({ job, store }: { job: Job; store: JobStore }) {
  return (
    <section class="jobhead" aria-label="Job">
      <div>
        <h1>
          <span class="clip">{job.name}</span>
          <StateChip state={job.state} />
        </h1>
        <div class="sub" data-testid="attempt">
          {subtitle(job, store)}
        </div>
        <HeaderProgress job={job} />
      </div>
      <Why job={job} store={store} />
      <div>
        <Kpis job={job} store={store} />
        <div class="row" style={{ justifyContent: "flex-end", marginTop: "4px" }}>
          {!isTerminal(job) &&
            (job.kind === "attached" ? (
              <span class="muted" data-testid="attached-note">
                attached: stop the process itself
              </span>
            ) : (
              <StopButton job={job} store={store} />
            ))}
        </div>
      </div>
    </section>
  );
}

function subtitle(job: Job, store: JobStore): string {
  // One that was lost and came back is one trainer, not two.
  const count = (role: string) =>
    new Set(job.replicas.filter((one) => one.role === role && one.attempt === job.attempt).map((one) => one.index))
      .size;
  const trainers = count("trainer");
  const pservers = count("pserver");
  const parts = [...attemptWords(job), plural(trainers, "trainer")];
  if (pservers > 0) parts.push(plural(pservers, "pserver"));
  if (job.kind === "attached") parts.push("attached");
  store.graphVersion.value;
  // What the header and the charts have is of training, unless nothing has trained yet.
  if (store.ops.busiest()?.trains === false) parts.push("evaluation");
  if (job.started_at !== null) parts.push(`started ${clock(job.started_at)}`);
  if (job.finished_at !== null && job.started_at !== null) {
    parts.push(`took ${age(job.started_at, Date.parse(job.finished_at))}`);
  }
  return parts.join(" · ");
}

function HeaderProgress({ job }: { job: Job }) {
  const progress = job.progress;
  if (progress === null || progress.total <= 0) return null;
  const tone = job.state === "SUCCEEDED" ? "done" : job.state === "FAILED" ? "bad" : undefined;
  return (
    <div class="row" data-testid="progress">
      <div style={{ width: "340px", maxWidth: "60vw" }}>
        <Progress share={progress.done / progress.total} label="Progress" {...(tone === undefined ? {} : { tone })} />
      </div>
      <small class="muted" style={{ marginTop: "5px", whiteSpace: "nowrap" }}>
        {percent(Math.min(1, progress.done / progress.total))}
        {job.eta_s !== null && !isTerminal(job) ? ` · ${seconds(job.eta_s)} left` : ""}
      </small>
    </div>
  );
}

/**
 * Time of a step in operators that exchange gradients, added up over threads, in the mean over the last reports; NaN
 * before any. A time, since a share of the step's time would stand beside the timeline's share of its threads' time.
 */
function SyncTime({ store }: { store: JobStore }) {
  const newest = store.series.byName.get("sync_ms")?.value.slice(-100) ?? [];
  const meanMs = newest.reduce((total, one) => total + one, 0) / newest.length;
  const [value, unit] = newest.length === 0 ? [] : millis(meanMs * 1e6).split(" ");
  return <Kpi name="sync time" value={value ?? "–"} unit={unit === undefined ? "" : `${unit} / step`} />;
}

/** In place of the sync time: what trainers exchange with servers is no exchange between replicas of one process. */
function ServerWait({ store }: { store: JobStore }) {
  const waitNs = longestWaitNs(exchangeOf(store));
  if (waitNs === null) return null;
  const [value, unit] = millis(waitNs).split(" ");
  return <Kpi name="server wait" value={value ?? "–"} unit={`${unit ?? ""} / step`} />;
}

function Kpis({ job, store }: { job: Job; store: JobStore }) {
  store.metricsVersion.value;
  const { progress } = job;
  const steps = store.series.byName.get("loss")?.step ?? store.series.byName.get("step_ms")?.step;
  const counted = progress?.unit.startsWith("step") ? progress : null;
  const step = newestStep(counted?.done ?? null, steps?.[steps.length - 1] ?? job.latest.step ?? 0);
  const total = counted?.total ?? null;
  const rate = store.series.latest("samples_per_s") ?? job.latest.samples_per_s ?? Number.NaN;
  const aucs = store.series.byName.get("test_auc");
  const best = aucs === undefined ? null : bestOf("test_auc", aucs);
  if (isCommand(job)) return <CommandKpis job={job} store={store} />;
  return (
    <dl class="kpis" data-testid="kpis">
      <Kpi name="step" value={step === 0 ? "–" : integer(step)} unit={total === null ? "" : `/ ${integer(total)}`} />
      <Kpi name="samples/s" value={compact(rate)} />
      <Kpi name="loss" value={metric(store.series.latest("loss") ?? job.latest.loss)} />
      {best !== null && <Kpi name="best test AUC" value={best.value.toFixed(4)} unit={`at ${integer(best.step)}`} />}
      {hasPservers(store) ? <ServerWait store={store} /> : <SyncTime store={store} />}
    </dl>
  );
}

/** A command has what it reports; one that reports nothing has no gaps. */
function CommandKpis({ job, store }: { job: Job; store: JobStore }) {
  const names = [...store.series.byName.keys()].slice(0, MOST_KPIS);
  const step = Math.max(
    0,
    ...names.map((name) => store.series.byName.get(name)?.step.at(-1) ?? 0),
    job.latest.step ?? 0,
  );
  return (
    <dl class="kpis" data-testid="kpis">
      {step > 0 && <Kpi name="step" value={integer(step)} />}
      {names.map((name) => (
        <Kpi key={name} name={name} value={metric(store.series.latest(name))} />
      ))}
    </dl>
  );
}

function Kpi({ name, value, unit }: { name: string; value: string; unit?: string }) {
  return (
    <div class="kpi">
      <dt>{name}</dt>
      <dd data-testid={`kpi-${name}`}>
        {value}
        {unit !== undefined && unit !== "" && <small>{unit}</small>}
      </dd>
    </div>
  );
}

function StopButton({ job, store }: { job: Job; store: JobStore }) {
  const [asking, setAsking] = useState(false);
  const [error, setError] = useState<ApiError | null>(null);
  const stopping = job.state === "STOPPING";
  const stop = async () => {
    try {
      store.job.value = await api.cancel(job.id);
      setAsking(false);
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure);
    }
  };
  return (
    <>
      <button type="button" class="btn danger" disabled={stopping} onClick={() => setAsking(true)} data-testid="stop">
        {stopping ? "Stopping…" : "Stop"}
      </button>
      {asking && (
        <Dialog label="Stop the job" onClose={() => setAsking(false)}>
          <h2>Stop {job.name}?</h2>
          <p class="muted">All of its processes will end, and the job will be CANCELLED. This cannot be undone.</p>
          {error !== null && <ErrorCard error={error} />}
          <div class="dialog-actions">
            <button type="button" class="btn" onClick={() => setAsking(false)}>
              Keep running
            </button>
            <button type="button" class="btn danger" onClick={() => void stop()} data-testid="stop-confirm">
              Stop the job
            </button>
          </div>
        </Dialog>
      )}
    </>
  );
}
