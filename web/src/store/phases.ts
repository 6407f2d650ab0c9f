/** A job's states over time, attempt by attempt, from its events. Pure. */
import type { EventRow, Job } from "../types";

export interface Phase {
  readonly state: string;
  /** Number of the attempt that it belongs to; 0 before the first. */
  readonly attempt: number;
  readonly fromMs: number;
  readonly toMs: number;
  readonly reason: string;
}

const BEGINS_ATTEMPT = "STARTING";

/** Oldest first. `events`: in any order; those that are missing at the beginning shorten what is shown. */
export function phasesOf(job: Job, events: readonly EventRow[], nowMs: number): Phase[] {
  const changes = events.filter((one) => one.kind === "job").sort(inOrder);
  let later = changes.filter((one) => one.to === BEGINS_ATTEMPT).length;
  return changes.flatMap((change, index) => {
    if (change.to === BEGINS_ATTEMPT) later -= 1;
    const next = changes[index + 1];
    if (next === undefined && job.finished_at != null) return []; // an end takes no time
    const fromMs = Date.parse(change.at);
    const toMs = Math.max(fromMs, next === undefined ? nowMs : Date.parse(next.at));
    const attempt = Math.max(0, job.attempt - later);
    return [{ state: change.to ?? "", attempt, fromMs, toMs, reason: change.reason ?? "" }];
  });
}

/** Identifiers ascend, also where several changes are of one moment. */
const inOrder = (a: EventRow, b: EventRow): number =>
  Date.parse(a.at) - Date.parse(b.at) || (a.id < b.id ? -1 : Number(a.id > b.id));

/** Time from the first phase to the end of the last. */
export const spanOf = (phases: readonly Phase[]): number =>
  phases.length === 0 ? 0 : (phases[phases.length - 1]?.toMs ?? 0) - (phases[0]?.fromMs ?? 0);
