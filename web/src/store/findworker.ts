/** Searches lines for a regular expression beside the page, which ends this worker if that takes too long. */
import { patternOf, type Span } from "./find";

export interface FindRequest {
  readonly expression: string;
  readonly lines: readonly string[];
}

/** Null: the worker has been loaded. */
export type FindReply = readonly Span[] | null;

const reply = (message: FindReply): void => postMessage(message);

addEventListener("message", (event: MessageEvent<FindRequest>) => {
  const pattern = patternOf(event.data.expression, "expression");
  if (typeof pattern !== "function") throw new Error(`no expression: ${event.data.expression}`);
  reply(event.data.lines.map(pattern));
});
reply(null);
