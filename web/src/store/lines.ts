/** Lines that are shown, from one render to the next: merged again only after a log grew, searched only where new. */
import { signal } from "@preact/signals";
import type { Span } from "./find";
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

/** Spans of texts, null where there is none; a promise where they are looked for in a worker. */
export type Ask = (texts: readonly string[]) => readonly Span[] | Promise<readonly Span[]>;

/** What is found in lines. A line is searched once, and again if it has changed since: it was open. */
export class Search {
  /** Changes when spans have come from the worker. */
  readonly version = signal(0);
  /** Set for good: nothing is searched after it. */
  error: string | null = null;
  readonly #known = new WeakMap<ReplicaLog, { dropped: number; readonly spans: (Known | undefined)[] }>();
  #isWaiting = false;
  #of: readonly LineOf[] | null = null;
  #found: readonly LineOf[] = [];

  constructor(
    private readonly ask: Ask,
    /** Ends the worker. */
    readonly end: () => void = () => undefined,
  ) {}

  /** Those of the lines of which it is known that they have it; none after an error. */
  among(lines: readonly LineOf[]): readonly LineOf[] {
    if (this.error !== null) return [];
    if (lines === this.#of) return this.#found;
    const unknown = lines.filter((at) => this.#spanOf(at) === undefined);
    if (unknown.length > 0 && !this.#isWaiting) this.#look(unknown);
    this.#found = lines.filter((at) => this.span(at) !== null);
    this.#of = this.#isWaiting ? null : lines;
    return this.#found;
  }

  /** Where a line has it. */
  span(at: LineOf): Span {
    return this.#spanOf(at) ?? null;
  }

  #look(lines: readonly LineOf[]): void {
    const asked = lines.map(({ log, line }) => ({ log, number: log.dropped + line, text: log.lines[line] ?? "" }));
    const take = (spans: readonly Span[]) => {
      asked.forEach(({ log, number, text }, index) => {
        // It may have been dropped while the worker searched.
        const spansOf = this.#spansOf(log);
        if (number >= log.dropped) spansOf[number - log.dropped] = { text, span: spans[index] ?? null };
      });
    };
    const answer = this.ask(asked.map(({ text }) => text));
    if (!(answer instanceof Promise)) {
      take(answer);
      return;
    }
    this.#isWaiting = true;
    void answer
      .then(take, (error: Error) => {
        this.error = error.message;
      })
      .then(() => {
        this.#isWaiting = false;
        this.version.value += 1;
      });
  }

  /** Undefined: not searched yet. */
  #spanOf({ log, line }: LineOf): Span | undefined {
    const known = this.#spansOf(log)[line];
    return known !== undefined && known.text === log.lines[line] ? known.span : undefined;
  }

  #spansOf(log: ReplicaLog): (Known | undefined)[] {
    const known = this.#known.get(log) ?? { dropped: log.dropped, spans: [] };
    this.#known.set(log, known);
    if (log.dropped > known.dropped) known.spans.splice(0, log.dropped - known.dropped);
    known.dropped = log.dropped;
    return known.spans;
  }
}

interface Known {
  readonly text: string;
  readonly span: Span;
}
