/** Jobs shown by metrics and logs alone: any command, and ranks of a script that builds no graph. */
import type { Job } from "../types";

type Kind = Pick<Job, "kind"> & { readonly spec: Pick<Job["spec"], "mode"> };

/** A command that an agent runs: it has no graph. Of an attached job it is unknown what it runs. */
export const isCommand = (job: Kind): boolean => job.kind === "managed" && job.spec.mode === "command";

/** Whether charts stand where the graph would. A script for torchrun has metrics without a graph. */
export function isWithoutGraph(job: Kind | null, hash: string | null, numSeries: number): boolean {
  if (job === null || hash !== null) return false;
  return isCommand(job) || (job.spec.mode === "collective" && numSeries > 0);
}
