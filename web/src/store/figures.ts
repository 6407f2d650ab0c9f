/** Jobs whose story is told by figures and logs: any command, and ranks of a script that builds no graph. */
import type { Job } from "../types";

type Kind = Pick<Job, "kind"> & { readonly spec: Pick<Job["spec"], "mode"> };

/** A command that an agent runs: nobody expects a graph of it. An attached job says nothing of what it runs. */
export const isCommand = (job: Kind): boolean => job.kind === "managed" && job.spec.mode === "command";

/** Whether charts stand where the graph would. A script for torchrun shows itself by figures without a graph. */
export function standsOnFigures(job: Kind | null, hash: string | null, numSeries: number): boolean {
  if (job === null || hash !== null) return false;
  return isCommand(job) || (job.spec.mode === "collective" && numSeries > 0);
}
