/** Where the boxes inside a frame stand: columns in a grid, folded so that a long chain is about as high as wide. Pure. */
import type { Bucket } from "./group";

export const OP_W = 118;
export const OP_H = 30;
const OP_GAP_X = 22;
const OP_GAP_Y = 8;
/** A group of this many columns or fewer is not folded when it is more than a chain. */
const MAX_UNFOLDED = 24;
const FOLDED_ASPECT = 1.8;
const PAD = 10;
const TITLE_H = 26;

interface Sized {
  x: number;
  y: number;
  readonly w: number;
  readonly h: number;
}

/** Columns of cells in a grid; a chain is folded into rows, the way back runs from right to left. */
export function placeCells(
  boxes: readonly Sized[],
  cells: readonly number[][],
  bucket: Bucket,
  fold: number,
): { width: number; height: number } {
  const tallest = cells.reduce((most, column) => Math.max(most, column.length), 1);
  const widest = fold === 1 && tallest <= 3 ? 1 : Math.min(cells.length, foldOf(cells.length, tallest, fold));
  const at = (c: number) => (bucket === "backward" ? widest - 1 - (c % widest) : c % widest);
  const widths = new Float64Array(widest);
  const heights = new Float64Array(Math.ceil(cells.length / Math.max(1, widest)));
  const heightOf = (column: readonly number[]) =>
    column.reduce((sum, part) => sum + (boxes[part]?.h ?? 0) + OP_GAP_Y, -OP_GAP_Y);
  cells.forEach((column, c) => {
    const widestBox = column.reduce((most, part) => Math.max(most, boxes[part]?.w ?? 0), 0);
    widths[at(c)] = Math.max(widths[at(c)] ?? 0, widestBox);
    const row = Math.floor(c / widest);
    heights[row] = Math.max(heights[row] ?? 0, heightOf(column));
  });
  const starts = (sizes: Float64Array, first: number, gap: number) => {
    const list = [first];
    for (const size of sizes) list.push((list[list.length - 1] ?? first) + size + gap);
    return list;
  };
  const left = starts(widths, PAD, OP_GAP_X);
  const top = starts(heights, TITLE_H, OP_GAP_Y);
  cells.forEach((column, c) => {
    const row = Math.floor(c / widest);
    let y = (top[row] ?? 0) + ((heights[row] ?? 0) - heightOf(column)) / 2;
    for (const part of column) {
      const box = boxes[part] as Sized;
      box.x = (left[at(c)] ?? 0) + ((widths[at(c)] ?? 0) - box.w) / 2;
      box.y = y;
      y += box.h + OP_GAP_Y;
    }
  });
  return {
    width: (left[left.length - 1] ?? 0) - OP_GAP_X + PAD,
    height: (top[top.length - 1] ?? 0) - OP_GAP_Y + PAD,
  };
}

/** Columns of a folded chain: at least `least`, and more where it would else be much higher than wide. */
function foldOf(columns: number, tallest: number, least: number): number {
  const square = Math.sqrt((FOLDED_ASPECT * columns * tallest * (OP_H + OP_GAP_Y)) / (OP_W + OP_GAP_X));
  return Math.max(tallest > 3 ? Math.min(columns, MAX_UNFOLDED) : least, Math.ceil(square));
}
