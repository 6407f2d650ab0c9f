/**
 * Regular expressions are searched for in a worker: one that backtracks without end cannot be interrupted, only ended
 * with its thread. A text takes time linear in the line, and is searched for at once.
 */
import { patternOf, type Span } from "./find";
import type { FindReply, FindRequest } from "./findworker";
import { Search } from "./lines";

/** Far more than 50 000 lines need. */
const MOST_MS = 1000;
export const TOO_LONG = "the expression takes too long; make it simpler";

export interface Wanted {
  readonly text: string;
  readonly how: "text" | "expression";
}

/** Null: there is nothing to find; a text: why the expression is none. */
export function searchFor({ text, how }: Wanted): Search | string | null {
  const pattern = patternOf(text, how);
  if (typeof pattern !== "function") return pattern;
  return how === "text" ? new Search((texts) => texts.map(pattern)) : searchInWorker(text);
}

function searchInWorker(expression: string): Search {
  const worker = new Worker(new URL("./findworker.ts", import.meta.url), { type: "module" });
  const next = () =>
    new Promise<FindReply>((resolve, reject) => {
      worker.onmessage = (event: MessageEvent<FindReply>) => resolve(event.data);
      worker.onerror = (event) => reject(new Error(`the search failed: ${event.message}`));
    });
  const loaded = next();
  const ask = async (lines: readonly string[]): Promise<readonly Span[]> => {
    await loaded;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        worker.terminate();
        reject(new Error(TOO_LONG));
      }, MOST_MS);
    });
    const found = next();
    worker.postMessage({ expression, lines } satisfies FindRequest);
    try {
      return (await Promise.race([found, late])) ?? [];
    } finally {
      clearTimeout(timer);
    }
  };
  return new Search(ask, () => worker.terminate());
}
