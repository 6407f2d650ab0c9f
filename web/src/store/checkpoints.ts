/**
 * Checkpoints by what `CheckpointManager` reported of each. Pure.
 *
 * Both series are thinned where they are long, each by itself: rows are not all checkpoints, and a row may lack its time.
 */
import { seconds } from "../format";
import type { Series } from "./series";

export interface Checkpoint {
  readonly step: number;
  readonly atNs: number;
  /** Null where the point is not among those of its series that the page has. */
  readonly tookS: number | null;
}

/** In the order in which they were written. */
export function checkpointsOf(steps: Series, took: Series): Checkpoint[] {
  const tookAt = new Map(took.timeNs.map((atNs, index) => [atNs, took.value[index] ?? null]));
  return steps.value.map((step, index) => {
    const atNs = steps.timeNs[index] ?? 0;
    return { step, atNs, tookS: tookAt.get(atNs) ?? null };
  });
}

/** Short ones with hundredths. */
export function duration(s: number | null): string {
  if (s === null || !Number.isFinite(s)) return "–";
  return s < 10 ? `${s.toFixed(2)}\u00a0s` : seconds(s);
}
