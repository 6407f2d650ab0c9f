/**
 * The layout of a narrow page: forward runs from top to bottom, backward comes back up beside it, exchange and
 * updates stand to the right of the gradients that they take. One row for each column of the wide layout; three
 * lanes, so that letters stay readable at the width of a telephone.
 */
import { bandOf, type Group } from "./group";
import type { Box } from "./layout";

const BOX_W = 116;
const BOX_H = 38;
const GAP_X = 14;
const GAP_Y = 12;
const STACK_GAP = 5;
const NUM_LANES = 3;

/** Forward, backward, and all that happens to a gradient then. */
const laneOf = (group: Group): number => Math.min(bandOf(group), NUM_LANES - 1);

/** Place all boxes; every stack (boxes of one lane in one row) is in the order of the bands. */
export function placeDown(
  boxes: readonly Box[],
  groups: readonly Group[],
  columns: Int32Array,
): { width: number; height: number } {
  for (const box of boxes) if (!box.expanded) Object.assign(box, { w: BOX_W, h: BOX_H });
  const { left, width } = lanesAcross(boxes, groups);
  const rows: Box[][][] = [];
  for (const box of [...boxes].sort((a, b) => bandOf(a.group) - bandOf(b.group))) {
    const row = columns[boxes.indexOf(box)] ?? 0;
    rows[row] ??= Array.from({ length: NUM_LANES }, () => []);
    rows[row][laneOf(box.group)]?.push(box);
  }
  let top = 0;
  for (const row of rows) {
    if (row === undefined) continue;
    const height = row.reduce((most, stack) => Math.max(most, heightOf(stack)), 0);
    row.forEach((stack, lane) => {
      let y = top + (height - heightOf(stack)) / 2;
      for (const box of stack) {
        const from = left[lane] ?? 0;
        box.x = from + ((left[lane + 1] ?? 0) - from - GAP_X - box.w) / 2;
        box.y = y;
        y += box.h + STACK_GAP;
      }
    });
    top += height + GAP_Y;
  }
  return { width, height: Math.max(0, top - GAP_Y) };
}

/** Left edge of each lane, and of what follows the last. */
function lanesAcross(boxes: readonly Box[], groups: readonly Group[]): { left: number[]; width: number } {
  const widest = new Float64Array(NUM_LANES);
  groups.forEach((group, g) => {
    widest[laneOf(group)] = Math.max(widest[laneOf(group)] ?? 0, boxes[g]?.w ?? 0);
  });
  const left = [0];
  for (const w of widest) left.push((left[left.length - 1] ?? 0) + (w > 0 ? w + GAP_X : 0));
  return { left, width: Math.max(0, (left[NUM_LANES] ?? 0) - GAP_X) };
}

const heightOf = (stack: readonly Box[]): number =>
  Math.max(
    0,
    stack.reduce((sum, box) => sum + box.h + STACK_GAP, -STACK_GAP),
  );
