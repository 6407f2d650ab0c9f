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

/** The operators on the other side of the edges of `op`, ascending, each once and in one replica. O(edges). */
export function usesOf(document: GraphDocument, op: number, way: Way, isShown: IsShown): number[] {
  const found = new Set<number>();
  for (const [before, after] of document.edges) {
    if (way === "producers" && after === op) found.add(before);
    if (way === "consumers" && before === op) found.add(after);
  }
  const shown = [...found].filter((one) => one !== op && isShown(one)).sort((a, b) => a - b);
  return inOneReplica(document, shown);
}

/** An exchange waits for the same operator of each replica: the first stands for all of them. */
function inOneReplica(document: GraphDocument, ops: readonly number[]): number[] {
  const replicas = new Map<string, number>();
  return ops.filter((index) => {
    const op = document.ops[index];
    if (op === undefined) return false;
    const key = `${op.name}|${op.module}`;
    const first = replicas.get(key) ?? op.replica;
    replicas.set(key, first);
    return first === op.replica;
  });
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

const nameOf = (document: GraphDocument, op: number): string => document.ops[op]?.name ?? `operator ${op}`;

/** "consumer 1 of 3 of relu_1". */
export const placeText = (document: GraphDocument, { from, way, at, count }: Walked): string =>
  `${way === "producers" ? "producer" : "consumer"} ${at + 1} of ${count} of ${nameOf(document, from)}`;

/** What a screen reader says. */
export function walkedText(document: GraphDocument, walked: Walked): string {
  const { op, from, way, count } = walked;
  const name = nameOf(document, op);
  if (count === 0) return `${nameOf(document, from)} ${way === "producers" ? "has no producer" : "has no consumer"}`;
  const found = document.ops[op];
  const facts = found === undefined ? "" : `, ${bucketOf(found)}${found.module === "" ? "" : ` of ${found.module}`}`;
  return `${name}${facts}; ${placeText(document, walked)}`;
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
