/** Other jobs whose curves the charts of a job show as well; which ones stands in the address. */
import { signal } from "@preact/signals";
import { ApiError } from "../api";
import type { SeriesSet } from "../types";
import type { OtherRun } from "./curves";
import { SeriesStore } from "./series";

/** Beside the job itself. */
export const MOST_RUNS = 19;

/** Each once, and no more than are shown. */
const limited = (jobIds: readonly string[]): string[] => [...new Set(jobIds)].slice(0, MOST_RUNS);

/** The jobs that `with` names in the address. */
export const wantedOf = (parameter: string | null): string[] =>
  limited((parameter ?? "").split(",").filter((id) => id !== ""));

/** A name for a job that is not known. */
export const shortId = (jobId: string): string => jobId.slice(0, 8);

export class OtherRuns {
  readonly version = signal(0);
  readonly error = signal<ApiError | null>(null);
  #wanted: readonly string[] = [];
  #names: ReadonlyMap<string, string> = new Map();
  #fetched = new Map<string, SeriesStore>();
  /** Not asked for again until other jobs are wanted. */
  #failed = new Set<string>();
  #fetching = new Set<string>();

  constructor(private readonly fetchSeries: (jobId: string) => Promise<{ readonly series: SeriesSet }>) {}

  /** Those that are wanted and have come. */
  shown(): OtherRun[] {
    this.version.value;
    return this.#wanted.flatMap((id) => {
      const series = this.#fetched.get(id);
      return series === undefined ? [] : [{ id, name: this.#names.get(id) ?? shortId(id), series }];
    });
  }

  /** Names by job, of those that are known. */
  name(names: ReadonlyMap<string, string>): void {
    const isSame = this.#wanted.every((id) => names.get(id) === this.#names.get(id));
    this.#names = names;
    if (!isSame) this.version.value += 1;
  }

  /** Show these jobs, at most `MOST_RUNS`. Each is fetched once; that the same are wanted again changes nothing. */
  async want(jobIds: readonly string[]): Promise<void> {
    const wanted = limited(jobIds);
    if (wanted.join() === this.#wanted.join()) return;
    this.#wanted = wanted;
    this.#failed.clear();
    this.error.value = null;
    this.version.value += 1;
    for (const id of wanted) if (!this.#fetched.has(id)) await this.#fetch(id);
  }

  /** Fetch those again that are wanted and go on; one that failed is left alone. */
  async refresh(goesOn: (jobId: string) => boolean): Promise<void> {
    for (const id of this.#wanted) if (goesOn(id) && !this.#failed.has(id)) await this.#fetch(id);
  }

  async #fetch(id: string): Promise<void> {
    if (this.#fetching.has(id)) return;
    this.#fetching.add(id);
    const series = new SeriesStore();
    try {
      series.restart((await this.fetchSeries(id)).series);
      this.#fetched.set(id, series);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (this.#wanted.includes(id)) {
        this.#failed.add(id);
        this.error.value = error;
      }
    } finally {
      this.#fetching.delete(id);
    }
    this.version.value += 1;
  }
}
