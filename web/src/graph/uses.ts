/**
 * What a selected operator waits for and what waits for it, where they are drawn: a ring around each box, and a line to
 * it across modules. The edges of a layout end at modules; these do not.
 */
import type { GraphDocument } from "../types";
import { trace } from "./edges";
import type { Layout } from "./layout";
import { isDrawn, type Scene } from "./scene";
import { type IsShown, usesOf } from "./walk";

export interface Uses {
  readonly producers: readonly number[];
  readonly consumers: readonly number[];
}

/** Boxes of the layout. */
export interface UsedBoxes {
  readonly producers: ReadonlySet<number>;
  readonly consumers: ReadonlySet<number>;
}

const NONE: UsedBoxes = { producers: new Set(), consumers: new Set() };
/** A parameter that thousands read would cover the graph. */
const MOST_LINES = 64;

/** The operator of a box: its own, or the only one of a module; null for a module of several, and for no box. */
export function opOfBox(layout: Layout | null, index: number): number | null {
  const box = layout?.boxes[index];
  if (box === undefined) return null;
  return box.op?.ops[0] ?? (box.group.ops.length === 1 ? (box.group.ops[0] ?? null) : null);
}

/** Whether an operator has a box in the layout: that of another replica, or of a folded layer, has none. */
export const shownIn =
  (layout: Layout): IsShown =>
  (op) =>
    (layout.boxOfOp[op] ?? -1) >= 0;

const found = new WeakMap<Layout, { readonly op: number; readonly uses: Uses }>();

/** Producers and consumers that have a box in the layout. O(edges) for another operator, O(1) for the same again. */
export function usesIn(document: GraphDocument, layout: Layout, op: number): Uses {
  const before = found.get(layout);
  if (before?.op === op) return before.uses;
  const isShown = shownIn(layout);
  const uses = {
    producers: usesOf(document, op, "producers", isShown),
    consumers: usesOf(document, op, "consumers", isShown),
  };
  found.set(layout, { op, uses });
  return uses;
}

/** The boxes to mark around a selected one. */
export function usedBoxes(document: GraphDocument, layout: Layout, selected: number): UsedBoxes {
  const op = opOfBox(layout, selected);
  return op === null ? NONE : boxesOf(usesIn(document, layout, op), layout, selected);
}

function boxesOf(uses: Uses, layout: Layout, selected: number): UsedBoxes {
  const of = (ops: readonly number[]) => {
    const boxes = new Set(ops.map((op) => layout.boxOfOp[op] ?? -1));
    boxes.delete(selected);
    return new Set([...boxes].slice(0, MOST_LINES));
  };
  return { producers: of(uses.producers), consumers: of(uses.consumers) };
}

/** On top of all boxes and under their text, in coordinates of the layout. */
export function paintUsed(ctx: CanvasRenderingContext2D, { layout, camera, palette, selected, used }: Scene): void {
  const at = layout.boxes[selected];
  if (at === undefined) return;
  const px = 1 / Math.min(1, camera.scale);
  const path = new Path2D();
  for (const [boxes, isAfter] of [
    [used.producers, false],
    [used.consumers, true],
  ] as const) {
    for (const index of boxes) {
      const box = layout.boxes[index];
      if (box === undefined || !isDrawn(box, camera.scale)) continue;
      trace(path, ...(isAfter ? ([at, box] as const) : ([box, at] as const)), true);
      path.roundRect(box.x - 2 * px, box.y - 2 * px, box.w + 4 * px, box.h + 4 * px, 6 * px);
    }
  }
  ctx.strokeStyle = palette.accent;
  ctx.lineWidth = 1.4 * px;
  ctx.stroke(path);
}
