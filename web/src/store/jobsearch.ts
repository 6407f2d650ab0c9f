/**
 * The whole list of jobs, page by page from the server, which filters, searches and orders it. The live list has the
 * newest alone; where there are more, what is asked for is found here, and what is live replaces what was found.
 */
import { signal } from "@preact/signals";
import { ApiError, api } from "../api";
import type { Job, JobCounts, Page } from "../types";
import { arrange, STATES_OF, type StateTab, tabOfState, type Wish } from "./joblist";

const TYPING_MS = 200;

export interface SearchCalls {
  readonly find: (wish: Wish, states: readonly string[], pageToken: string | null) => Promise<Page<Job>>;
  readonly count: (words: string) => Promise<JobCounts>;
}
const CALLS: SearchCalls = { find: api.findJobs, count: api.jobCounts };

export class JobSearch {
  /** In the order of the server; null before the first answer. */
  readonly found = signal<readonly Job[] | null>(null);
  readonly more = signal(false);
  readonly loading = signal(false);
  readonly error = signal<ApiError | null>(null);
  /** How many jobs of all have the words, by tab; null before the first answer. */
  readonly counts = signal<Readonly<Record<StateTab, number>> | null>(null);
  #wish: Wish | null = null;
  #token: string | null = null;
  /** An answer to an older wish is dropped. */
  #asked = 0;
  #later: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly calls: SearchCalls = CALLS) {}

  dispose(): void {
    clearTimeout(this.#later);
    this.#asked += 1;
  }

  /** Ask for the jobs of a wish, once it has not changed for a moment; the same again does nothing. */
  want(wish: Wish): void {
    const before = this.#wish;
    if (before !== null && keyOf(before) === keyOf(wish)) return;
    this.#wish = wish;
    clearTimeout(this.#later);
    const isTyped = before !== null && before.text !== wish.text;
    this.#later = setTimeout(() => void this.refresh(), isTyped ? TYPING_MS : 0);
  }

  /** Ask for the first page and the counts. */
  async refresh(): Promise<void> {
    const wish = this.#wish;
    if (wish === null) return;
    this.#token = null;
    await Promise.all([this.#read(wish, []), this.recount()]);
  }

  async loadMore(): Promise<void> {
    if (this.#wish !== null && this.more.value && !this.loading.value) {
      await this.#read(this.#wish, this.found.value ?? []);
    }
  }

  async recount(): Promise<void> {
    const wish = this.#wish;
    if (wish === null) return;
    const counts = await this.#answered(this.calls.count(wish.text));
    if (counts !== null && wish.text === this.#wish?.text) this.counts.value = byTab(counts);
  }

  async #read(wish: Wish, before: readonly Job[]): Promise<void> {
    this.#asked += 1;
    const asked = this.#asked;
    this.loading.value = true;
    const page = await this.#answered(this.calls.find(wish, STATES_OF[wish.state], this.#token));
    if (asked !== this.#asked) return;
    this.loading.value = false;
    if (page === null) return;
    this.error.value = null;
    const known = new Set(before.map((job) => job.id));
    this.found.value = [...before, ...page.items.filter((job) => !known.has(job.id))];
    this.#token = page.next_page_token;
    this.more.value = page.next_page_token !== null;
  }

  async #answered<T>(call: Promise<T>): Promise<T | null> {
    try {
      return await call;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.error.value = error;
      return null;
    }
  }
}

const keyOf = (wish: Wish): string => [wish.state, wish.sort, wish.text].join("\n");

function byTab({ states, total }: JobCounts): Record<StateTab, number> {
  const found = { all: total, running: 0, failed: 0, waiting: 0, done: 0 };
  for (const [state, count] of Object.entries(states)) found[tabOfState(state)] += count;
  return found;
}

/**
 * What the page lists of a wish: the jobs that were found, as they are by now, and live ones between them. What would
 * stand behind the last one found is of a page that was not fetched, while there are `more`.
 */
export function listed(live: readonly Job[], found: readonly Job[], wish: Wish, more: boolean): Job[] {
  const known = new Map([...found, ...live].map((job) => [job.id, job]));
  const all = arrange([...known.values()], wish);
  if (!more) return all;
  const ids = new Set(found.map((job) => job.id));
  return all.slice(0, all.findLastIndex((job) => ids.has(job.id)) + 1);
}
