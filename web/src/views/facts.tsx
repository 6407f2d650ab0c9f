/** What happened to the job (events) and what it was asked to do (config). */

import { clock, firm, integer, seconds } from "../format";
import { Empty, Head, toneOf } from "../parts/basics";
import { checkpointsOf, duration } from "../store/checkpoints";
import type { JobStore } from "../store/job";
import { type Phase, phasesOf, spanOf } from "../store/phases";
import type { Series } from "../store/series";
import { nowMs } from "../store/session";
import { subjectOf } from "../subject";
import { CompletenessCard } from "./completeness";
import { ReplicaTable } from "./replicas";
import { Stacks } from "./stacks";

export function EventsView({ store }: { store: JobStore }) {
  const events = store.events.value;
  const job = store.job.value;
  const nodes = store.nodes.value;
  return (
    <section class="panel" aria-labelledby="events-title">
      <div class="panel-title">
        <h2 id="events-title">Events</h2>
        <em>{events.length > 0 ? `${events.length}, newest first` : ""}</em>
      </div>
      {job !== null && <Ribbon phases={phasesOf(job, events, nowMs.value)} />}
      {events.length === 0 ? (
        <Empty title="No events yet" />
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="List of events">
          <table data-testid="events">
            <Head columns={["Time", "Subject", "Change", ["Reason", "tiny-hide"], ["Detail", "narrow-hide"]]} />
            <tbody>
              {events.map((event) => (
                <tr key={event.id}>
                  <td class="mono" title={event.at}>
                    {clock(event.at)}
                  </td>
                  <td title={event.subject}>{subjectOf(event, job, nodes)}</td>
                  <td>
                    {event.to === null ? event.kind : `${event.from ?? "new"} → ${event.to}`}
                    <div class="why-small">{firm(event.detail ?? "")}</div>
                  </td>
                  <td class="tiny-hide">{firm(event.reason ?? "")}</td>
                  <td class="muted narrow-hide">{firm(event.detail ?? "")}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

/** Below this share of the whole a phase is a line without words; its tooltip and the table have them. */
const WORDS_FROM = 0.12;

/** The job's states as parts of the time since it was made, attempt by attempt. */
function Ribbon({ phases }: { phases: readonly Phase[] }) {
  const span = spanOf(phases);
  if (span <= 0) return null;
  return (
    <ol class="ribbon" aria-label="States of the job over time" data-testid="ribbon">
      {phases.map((phase, index) => {
        const ms = phase.toMs - phase.fromMs;
        const words = `${phase.attempt > 0 ? `attempt ${phase.attempt} · ` : ""}${seconds(ms / 1000)}`;
        const title = `${phase.state} · ${words}${phase.reason === "" ? "" : ` · ${phase.reason}`}`;
        return (
          <li
            key={index}
            class={`tone-${toneOf(phase.state)}`}
            style={{ flexGrow: ms / span }}
            title={title}
            data-state={phase.state}
            data-attempt={phase.attempt}
          >
            {ms / span < WORDS_FROM ? (
              <span class="sr">{title}</span>
            ) : (
              <>
                <b>{phase.state}</b> {words}
              </>
            )}
          </li>
        );
      })}
    </ol>
  );
}

const MOST_CHECKPOINTS = 10;

const ofPoints = (shown: number, points: number): string =>
  `${integer(shown)} of ${integer(points)} points (a long series is thinned)`;

/** Checkpoints that the job has written, newest first; how many in all, the points of a thinned series do not say. */
function Checkpoints({ step: steps, took }: { step: Series | undefined; took: Series | undefined }) {
  if (steps === undefined || took === undefined || steps.value.length === 0) return null;
  const rows = checkpointsOf(steps, took);
  return (
    <>
      <h3 style={{ margin: "8px 0" }}>
        Checkpoints{" "}
        <small class="muted">
          newest first
          {rows.length > MOST_CHECKPOINTS && `, ${ofPoints(MOST_CHECKPOINTS, rows.length)}`}
        </small>
      </h3>
      <div class="card checkpoints">
        <table data-testid="checkpoints">
          <Head
            columns={[
              ["After step", "num"],
              ["Written at", "num"],
              ["Took", "num"],
            ]}
          />
          <tbody>
            {rows
              .slice(-MOST_CHECKPOINTS)
              .reverse()
              .map(({ step, atNs, tookS }) => (
                <tr key={`${step} ${atNs}`}>
                  <td class="num">{integer(step)}</td>
                  <td class="num" title={new Date(atNs / 1e6).toISOString()}>
                    {clock(new Date(atNs / 1e6).toISOString())}
                  </td>
                  <td class="num">{duration(tookS)}</td>
                </tr>
              ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

export function ConfigView({ store }: { store: JobStore }) {
  const job = store.job.value;
  store.metricsVersion.value;
  if (job === null) return null;
  return (
    <section class="panel" aria-labelledby="config-title">
      <div class="panel-title">
        <h2 id="config-title">Config</h2>
        <em class="mono">{job.id}</em>
      </div>
      <div
        class="scroll"
        tabIndex={0}
        role="region"
        aria-label="Replicas and specification"
        style={{ padding: "0 14px 14px" }}
      >
        <h3 style={{ margin: "8px 0" }}>Replicas</h3>
        <div class="card" style={{ marginBottom: "16px" }}>
          <ReplicaTable replicas={job.replicas} nodes={store.nodes.value} />
        </div>
        <Checkpoints step={store.series.byName.get("checkpoint_step")} took={store.series.byName.get("checkpoint_s")} />
        <CompletenessCard store={store} />
        <Stacks job={job} />
        <h3 style={{ margin: "8px 0" }}>Job specification</h3>
        <pre class="code" data-testid="spec">
          {job.kind === "attached"
            ? "An attached job has none: its processes were started by hand."
            : JSON.stringify(job.spec, null, 2)}
        </pre>
      </div>
    </section>
  );
}
