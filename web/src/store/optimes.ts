/** Times of operators of several jobs beside each other, by name: operators of all replicas of a name are one. Pure. */
import type { OperatorTimes } from "../types";

export interface OperatorRow {
  readonly name: string;
  readonly role: string;
  /** Nanoseconds of a step by job, in their order; null where a job has no such operator. */
  readonly stepNs: readonly (number | null)[];
}

/** Those first that differ most between the jobs; of those that only some have, what they take is the difference. */
export function compared(jobs: readonly OperatorTimes[]): OperatorRow[] {
  const each = jobs.map(byName);
  const roles = new Map(jobs.flatMap((job) => job.operators.map((one) => [one.name, one.role] as const)));
  const rows = [...roles].map(([name, role]) => ({ name, role, stepNs: each.map((of) => of.get(name) ?? null) }));
  return rows.sort((a, b) => spread(b) - spread(a) || (a.name < b.name ? -1 : 1));
}

/** An operator runs once a step on each replica. */
function byName(job: OperatorTimes): Map<string, number> {
  const found = new Map<string, number>();
  for (const one of job.operators) {
    if (one.count > 0) found.set(one.name, (found.get(one.name) ?? 0) + one.total_ns / one.count);
  }
  return found;
}

function spread({ stepNs }: OperatorRow): number {
  const values = stepNs.map((ns) => ns ?? 0);
  return Math.max(...values) - Math.min(...values);
}
