/** What happened to the job (events) and what it was asked to do (config). */

import { clock, firm } from "../format";
import { Empty, Head } from "../parts/basics";
import type { JobStore } from "../store/job";
import { subjectOf } from "../subject";
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
      {events.length === 0 ? (
        <Empty title="No events yet" />
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="List of events">
          <table data-testid="events">
            <Head columns={["Time", "Subject", "Change", "Reason", "Detail"]} />
            <tbody>
              {events.map((event) => (
                <tr key={event.id}>
                  <td class="mono" title={event.at}>
                    {clock(event.at)}
                  </td>
                  <td title={event.subject}>{subjectOf(event, job, nodes)}</td>
                  <td>{event.to === null ? event.kind : `${event.from ?? "new"} → ${event.to}`}</td>
                  <td>{firm(event.reason ?? "")}</td>
                  <td class="muted">{firm(event.detail ?? "")}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

export function ConfigView({ store }: { store: JobStore }) {
  const job = store.job.value;
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
