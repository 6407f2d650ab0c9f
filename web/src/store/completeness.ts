/**
 * What became of the telemetry that the job produced, as the server adds it up (core/penstock/protocol/completeness.py).
 *
 * Asked for every `ASK_MS` while the job runs; after its end until two answers are the same, as an agent may bring what
 * it holds of a process that was killed; of a job that had ended before, once, if its counts add up.
 */
import { computed, signal } from "@preact/signals";
import { ApiError } from "../api";
import type { CountedRows, TelemetryCompleteness } from "../types";

export const ASK_MS = 5000;

export class CompletenessStore {
  readonly found = signal<TelemetryCompleteness | null>(null);
  /** Rows of every kind that were produced and are not shown, for whatever reason but sampling and retention. */
  readonly dropped = computed(() => total((this.found.value?.rows ?? []).flatMap((one) => one.dropped)));
  /** Since when the counts of a process are unknown: of the newest such time; null if all are known. */
  readonly unknownSince = computed(() => {
    const times = (this.found.value?.processes ?? []).map((one) => one.unknown_since);
    return times.reduce((newest, one) => (one !== null && (newest === null || one > newest) ? one : newest), null);
  });
  #askedAt = Number.NEGATIVE_INFINITY;
  /** Nothing more comes: the job has ended, and its last counts are here. */
  #settled = false;
  #asking = false;

  constructor(private readonly fetchCompleteness: () => Promise<TelemetryCompleteness>) {}

  /** Note the time and whether the job runs; asks if the answer may have changed. */
  async tick(nowMs: number, isRunning: boolean): Promise<void> {
    const waits = nowMs - this.#askedAt < ASK_MS;
    if (this.#asking || waits || (!isRunning && this.#settled)) return;
    this.#asking = true;
    this.#askedAt = nowMs;
    try {
      const [before, now] = [this.found.peek(), await this.fetchCompleteness()];
      this.found.value = now;
      const isLast = before === null ? now.holds : JSON.stringify(before) === JSON.stringify(now);
      this.#settled = !isRunning && isLast;
    } catch (error) {
      // What was counted last stays; an older server has no counts.
      if (!(error instanceof ApiError)) throw error;
    } finally {
      this.#asking = false;
    }
  }
}

export const total = (gone: readonly { readonly rows: number }[]): number =>
  gone.reduce((sum, one) => sum + one.rows, 0);

/** What was produced and where it is: the terms of the equation that are there, each with its reasons. */
export function terms(rows: CountedRows): { readonly name: string; readonly rows: number; readonly why: string }[] {
  const why = (gone: CountedRows["dropped"]) =>
    gone.map((one) => `${one.rows.toLocaleString()} ${one.text}`).join(", ");
  const all = [
    { name: "shown", rows: rows.shown, why: "" },
    { name: "sampled out", rows: rows.sampled_out, why: "" },
    { name: "dropped", rows: total(rows.dropped), why: why(rows.dropped) },
    { name: "removed by retention", rows: total(rows.expired), why: why(rows.expired) },
    { name: "not sent yet", rows: rows.pending, why: "" },
  ];
  return all.filter((term, index) => index < 3 || term.rows > 0);
}

/** What the equation lacks, in words; empty if it holds. */
export function unexplained(rows: CountedRows): string {
  const missing = rows.unexplained.toLocaleString();
  if (rows.unexplained > 0) return `${missing} unaccounted for`;
  return rows.unexplained < 0 ? `${missing.replace("-", "")} shown and never counted` : "";
}
