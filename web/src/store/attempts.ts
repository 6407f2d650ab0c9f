/** A job's attempts in words: which one, what may still be started again, and until when the next one waits. */
import { clock, integer, plural } from "../format";
import type { Job } from "../types";

export function attemptWords(job: Job): string[] {
  const parts = [`attempt ${job.attempt}`, `epoch ${job.epoch}`];
  const ofClasses = Object.values(job.restarts_left_by_class).reduce((sum, left) => sum + left, 0);
  const allowed = job.restarts + job.restarts_left + ofClasses;
  if (allowed > 0) parts.push(`${integer(job.restarts)} of ${plural(allowed, "restart")} used`);
  if (job.next_attempt_at !== null) parts.push(`next attempt not before ${clock(job.next_attempt_at)}`);
  return parts;
}
