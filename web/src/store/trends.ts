/**
 * The course of the loss of jobs in the list: few points of each, fetched once a row is in view, one job at a time, and
 * carried on from what the list's stream reports. A job whose points could not be fetched has none until it is in view
 * again: its numbers are on the page all the same.
 */
import { signal } from "@preact/signals";
import { ApiError } from "../api";
import type { SeriesSet } from "../types";

/** Of each job, as fetched. */
export const MOST_POINTS = 60;

export interface Trend {
  readonly step: readonly number[];
  readonly loss: readonly number[];
}

export class Trends {
  readonly version = signal(0);
  #found = new Map<string, Trend>();
  #waiting = new Set<string>();
  /** The one that is being fetched. */
  #asked: string | null = null;

  constructor(private readonly fetchLoss: (jobId: string) => Promise<{ readonly series: SeriesSet }>) {}

  of(jobId: string): Trend | null {
    this.version.value;
    return this.#found.get(jobId) ?? null;
  }

  /** A job's row is in view. */
  want(jobId: string): void {
    if (this.#found.has(jobId) || this.#asked === jobId) return;
    this.#waiting.add(jobId);
    void this.#fetchAll();
  }

  /** What the list's stream reports; nothing for a job whose points have not come. */
  carryOn(jobId: string, step: number | undefined, loss: number | undefined): void {
    const before = this.#found.get(jobId);
    const last = before?.step[before.step.length - 1] ?? Number.NEGATIVE_INFINITY;
    if (before === undefined || step === undefined || loss === undefined || step <= last) return;
    this.#found.set(jobId, thinned({ step: [...before.step, step], loss: [...before.loss, loss] }));
    this.version.value += 1;
  }

  async #fetchAll(): Promise<void> {
    if (this.#asked !== null) return;
    try {
      for (const jobId of this.#waiting) {
        this.#waiting.delete(jobId);
        this.#asked = jobId;
        await this.#fetch(jobId);
      }
    } finally {
      this.#asked = null;
    }
  }

  async #fetch(jobId: string): Promise<void> {
    try {
      const { loss } = (await this.fetchLoss(jobId)).series;
      this.#found.set(jobId, { step: loss?.step ?? [], loss: loss?.value ?? [] });
      this.version.value += 1;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
  }
}

/** Twice as many as are drawn, and every second one goes; the newest stays. */
function thinned({ step, loss }: Trend): Trend {
  if (step.length <= 2 * MOST_POINTS) return { step, loss };
  const keep = (_: number, index: number) => (step.length - 1 - index) % 2 === 0;
  return { step: step.filter(keep), loss: loss.filter(keep) };
}
