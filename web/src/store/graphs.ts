/**
 * Fetches graph documents until they are there: a failure is tried again, ever more rarely, and shown meanwhile.
 *
 * The first 404 is not shown: the document may be a moment behind the message that names it. What the server
 * refuses (401, 403) waits for the person, since asking again by itself cannot help.
 */
import { signal } from "@preact/signals";
import { ApiError } from "../api";
import type { GraphDocument } from "../types";

const BACKOFF_MS = [1000, 2000, 4000, 8000, 16_000, 30_000] as const;

export class GraphLoader {
  /** Why documents are missing, by hash. */
  readonly failures = signal<ReadonlyMap<string, ApiError>>(new Map());
  #timers = new Map<string, ReturnType<typeof setTimeout>>();
  /** The newest series of attempts for each document: a retry by hand ends the one before it. */
  #series = new Map<string, number>();
  #done = new Set<string>();
  #disposed = false;

  constructor(
    private readonly fetchDocument: (hash: string) => Promise<GraphDocument>,
    private readonly onDocument: (hash: string, document: GraphDocument) => void,
  ) {}

  /** Ask for a document, at once where it failed before: that failure is shown until there is an answer. */
  load(hash: string): void {
    clearTimeout(this.#timers.get(hash));
    this.#timers.delete(hash);
    const series = (this.#series.get(hash) ?? 0) + 1;
    this.#series.set(hash, series);
    void this.#try(hash, series, 0);
  }

  dispose(): void {
    this.#disposed = true;
    for (const timer of this.#timers.values()) clearTimeout(timer);
  }

  async #try(hash: string, series: number, attempt: number): Promise<void> {
    let document: GraphDocument;
    try {
      document = await this.fetchDocument(hash);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const isNewest = this.#series.get(hash) === series;
      if (isNewest && !this.#disposed && !this.#done.has(hash)) this.#later(hash, series, attempt, error);
      return;
    }
    // A retry by hand may have overtaken this one, and a second document would begin all sums anew.
    if (this.#disposed || this.#done.has(hash)) return;
    this.#done.add(hash);
    this.#say(hash, null);
    this.onDocument(hash, document);
  }

  #later(hash: string, series: number, attempt: number, error: ApiError): void {
    if (attempt > 0 || error.status !== 404) this.#say(hash, error);
    if (error.status === 401 || error.status === 403) return;
    const wait = BACKOFF_MS[Math.min(attempt, BACKOFF_MS.length - 1)] ?? 30_000;
    this.#timers.set(
      hash,
      setTimeout(() => void this.#try(hash, series, attempt + 1), wait),
    );
  }

  #say(hash: string, error: ApiError | null): void {
    if (error === null && !this.failures.value.has(hash)) return;
    const next = new Map(this.failures.value);
    if (error === null) next.delete(hash);
    else next.set(hash, error);
    this.failures.value = next;
  }
}
