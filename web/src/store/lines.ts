/** Lines that are shown, from one render to the next: merged again only after a log grew, searched only where new. */
import type { Pattern } from "./find";
import { type LineOf, merged, type ReplicaLog } from "./logs";

export interface Listed {
  readonly lines: readonly LineOf[];
  /** Lines that the logs retain; of several logs more than are listed. */
  readonly total: number;
}

/** One log's lines, or the newest of all by time; the same array as before while no log grew. */
export class Listing {
  #key = "";
  #listed: Listed = { lines: [], total: 0 };

  of(replicaId: string | null, logs: ReadonlyMap<string, ReplicaLog>): Listed {
    const chosen = [...logs].filter(([id]) => replicaId === null || id === replicaId);
    const key = JSON.stringify([replicaId, chosen.map(([id, log]) => [id, log.next])]);
    if (key !== this.#key) {
      this.#key = key;
      this.#listed = { lines: merged(chosen), total: chosen.reduce((sum, [, log]) => sum + log.lines.length, 0) };
    }
    return this.#listed;
  }
}

/** Of the expression's work on one set of lines; far more than 50 000 lines need. */
export const SEARCH_MS = 250;
export const TOO_LONG = "the expression takes too long; make it simpler";

/** What a pattern finds. Each line is searched once, the last of a log again: it may be open. */
export class Search {
  /** Set for good once a search took too long. A line that alone takes longer is waited for. */
  error: string | null = null;
  readonly #seen = new WeakMap<ReplicaLog, { dropped: number; readonly found: (boolean | undefined)[] }>();
  #of: readonly LineOf[] | null = null;
  #found: readonly LineOf[] = [];

  constructor(
    readonly pattern: Pattern,
    private readonly now: () => number = () => performance.now(),
  ) {}

  /** Those of the lines that have the pattern; none after an error. */
  among(lines: readonly LineOf[]): readonly LineOf[] {
    if (this.error !== null) return [];
    if (lines === this.#of) return this.#found;
    const found: LineOf[] = [];
    const begin = this.now();
    for (const at of lines) {
      if (this.#has(at)) found.push(at);
      if (this.now() - begin > SEARCH_MS) {
        this.error = TOO_LONG;
        return [];
      }
    }
    [this.#of, this.#found] = [lines, found];
    return found;
  }

  #has({ log, line }: LineOf): boolean {
    const found = this.#seenOf(log);
    const known = found[line];
    if (known !== undefined) return known;
    const has = this.pattern(log.lines[line] ?? "") !== null;
    if (line < log.lines.length - 1) found[line] = has;
    return has;
  }

  #seenOf(log: ReplicaLog): (boolean | undefined)[] {
    const seen = this.#seen.get(log) ?? { dropped: log.dropped, found: [] };
    this.#seen.set(log, seen);
    seen.found.splice(0, log.dropped - seen.dropped);

    seen.dropped = log.dropped;
    return seen.found;
  }
}
