/**
 * How the keyboard goes through a graph: from an operator to those that it waits for and those that wait for it, and from
 * a box to the next in a direction. Pure.
 */
import type { GraphDocument } from "../types";
import { bucketOf } from "./group";
import type { Box } from "./layout";

export type Way = "producers" | "consumers";

/** A step to `op`, one of the `count` producers or consumers of `from`. `op` is `from` if there are none. */
export interface Walked {
  readonly op: number;
  readonly from: number;
  readonly way: Way;
  readonly at: number;
  readonly count: number;
}

export type IsShown = (op: number) => boolean;

/** The operators on the other side of the edges of `op`, ascending, each once. O(edges). */
export function usesOf(document: GraphDocument, op: number, way: Way, isShown: IsShown): number[] {
  const found = new Set<number>();
  for (const [before, after] of document.edges) {
    if (way === "producers" && after === op) found.add(before);
    if (way === "consumers" && before === op) found.add(after);
  }
  return [...found].filter((one) => one !== op && isShown(one)).sort((a, b) => a - b);
}

/** Go to the first producer or consumer; back to where one came from, if that is one of them. */
export function along(document: GraphDocument, op: number, way: Way, isShown: IsShown, last: Walked | null): Walked {
  const uses = usesOf(document, op, way, isShown);
  const at = last?.op === op && last.way !== way ? Math.max(0, uses.indexOf(last.from)) : 0;
  return { op: uses[at] ?? op, from: op, way, at, count: uses.length };
}

/** Go to another of those that the last step chose among; null if it chose none, or the selection is another now. */
export function beside(
  document: GraphDocument,
  op: number,
  by: 1 | -1,
  isShown: IsShown,
  last: Walked | null,
): Walked | null {
  if (last === null || last.op !== op || last.count < 2) return null;
  const uses = usesOf(document, last.from, last.way, isShown);
  const at = (last.at + by + uses.length) % Math.max(1, uses.length);
  const next = uses[at];
  return next === undefined ? null : { ...last, op: next, at, count: uses.length };
}

/** What a screen reader says. */
export function walkedText(document: GraphDocument, { op, from, way, at, count }: Walked): string {
  const name = (index: number) => document.ops[index]?.name ?? `operator ${index}`;
  if (count === 0) return `${name(from)} ${way === "producers" ? "waits for no operator" : "is waited for by none"}`;
  const found = document.ops[op];
  const facts = found === undefined ? "" : `, ${bucketOf(found)}${found.module === "" ? "" : ` of ${found.module}`}`;
  return `${name(op)}${facts}; ${way === "producers" ? "producer" : "consumer"} ${at + 1} of ${count} of ${name(from)}`;
}

/** The nearest box from `selected` in a direction; the first if none is selected, -1 if there is none. O(boxes). */
export function nearestBox(boxes: readonly Box[], selected: number, dx: number, dy: number): number {
  const from = boxes[selected];
  if (from === undefined) return boxes.length > 0 ? 0 : -1;
  let best = -1;
  let bestCost = Number.POSITIVE_INFINITY;
  boxes.forEach((box, index) => {
    const x = box.x + box.w / 2 - from.x - from.w / 2;
    const y = box.y + box.h / 2 - from.y - from.h / 2;
    const along = x * dx + y * dy;
    const aside = Math.abs(x * dy) + Math.abs(y * dx);
    if (index === selected || along <= 1) return;
    const cost = along + aside * 2;
    if (cost < bestCost) {
      best = index;
      bestCost = cost;
    }
  });
  return best;
}
