/** The subject of an event, as the dashboard names it. */
import type { EventRow, Job, NodeRow } from "./types";

/** The subject of an event in words: job, trainer 0 or a node's name; its id where nothing is known of it. A job has its newest processes. */
export function subjectOf(event: EventRow, job: Job | null, nodes: readonly NodeRow[]): string {
  switch (event.kind) {
    case "job":
      return "job";
    case "node":
      return nodes.find((node) => node.id === event.subject)?.name ?? event.subject;
    case "replica": {
      const replica = job?.replicas.find((one) => one.id === event.subject);
      if (job === null) return event.subject;
      if (replica === undefined) return "a process of an earlier attempt";
      const earlier = replica.attempt === job.attempt ? "" : ` · attempt ${replica.attempt}`;
      return `${replica.role} ${replica.index}${earlier}`;
    }
  }
}
