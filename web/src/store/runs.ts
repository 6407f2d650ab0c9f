/** Other jobs whose curves the charts of a job show as well; which ones stands in the address. */
import { signal } from "@preact/signals";
import { ApiError } from "../api";
import type { SeriesSet } from "../types";
import type { OtherRun } from "./curves";
import { SeriesStore } from "./series";

export const MOST_RUNS = 8;

export class OtherRuns {
  readonly version = signal(0);
  readonly error = signal<ApiError | null>(null);
  #wanted: readonly string[] = [];
  #names: ReadonlyMap<string, string> = new Map();
  #fetched = new Map<string, SeriesStore>();

  constructor(private readonly fetchSeries: (jobId: string) => Promise<{ readonly series: SeriesSet }>) {}

  /** Those that are wanted and have come. */
  shown(): OtherRun[] {
    this.version.value;
    return this.#wanted.flatMap((id) => {
      const series = this.#fetched.get(id);
      return series === undefined ? [] : [{ name: this.#names.get(id) ?? id.slice(0, 8), series }];
    });
  }

  /** Show these jobs, at most `MOST_RUNS`; each is fetched once. `names`: by job, of those that are known. */
  async want(jobIds: readonly string[], names: ReadonlyMap<string, string>): Promise<void> {
    this.#names = names;
    this.#wanted = [...new Set(jobIds)].slice(0, MOST_RUNS);
    this.error.value = null;
    this.version.value += 1;
    for (const id of this.#wanted.filter((one) => !this.#fetched.has(one))) {
      const series = new SeriesStore();
      this.#fetched.set(id, series);
      try {
        series.restart((await this.fetchSeries(id)).series);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        this.#fetched.delete(id);
        this.error.value = error;
      }
      this.version.value += 1;
    }
  }
}
