/** Where a person looks at a graph from. Pure: sizes and cameras in, cameras out. */
import type { Layout } from "./layout";
import { type Camera, isDrawn, isOpen } from "./scene";

export const MIN_SCALE = 0.004;
export const MAX_SCALE = 4;
/** Around a graph that is fitted into its canvas; the hint stands below. */
export const PAD = { x: 20, top: 20, bottom: 40 } as const;
/** What a narrow page needs below instead: there the hint has two lines. */
export const PAD_BELOW = 60;
/** How much of a box stays in view at least, in pixels of the screen; all of a smaller one. */
const KEPT_PX = 40;

/** Width and height of a canvas; [0, 0]: there is none. */
export const sizeOf = (
  canvas: { readonly clientWidth: number; readonly clientHeight: number } | null,
): readonly [number, number] => (canvas === null ? [0, 0] : [canvas.clientWidth, canvas.clientHeight]);

/** The camera that shows the same, by pixels elsewhere on the canvas. */
export const moved = ({ x, y, scale }: Camera, dx: number, dy: number): Camera => ({ x: x + dx, y: y + dy, scale });

export function fitCamera(layout: Layout, w: number, h: number): Camera {
  if (layout.width === 0 || w === 0) return { x: PAD.x, y: PAD.top, scale: 1 };
  if (layout.down) {
    const scale = Math.max(MIN_SCALE, Math.min(1.25, (w - PAD.x) / layout.width));
    return { x: (w - layout.width * scale) / 2, y: PAD.top, scale };
  }
  const room = h - PAD.top - PAD.bottom;
  const scale = Math.max(MIN_SCALE, Math.min(1.25, (w - 2 * PAD.x) / layout.width, room / layout.height));
  return {
    x: (w - layout.width * scale) / 2,
    y: PAD.top + Math.max(0, (room - layout.height * scale) / 2),
    scale,
  };
}

/**
 * The camera nearest to the one wished for that shows a box: between columns and around the graph there are places
 * larger than a canvas, in which there is no way back to be seen. The inside of an open frame is no box. O(boxes).
 */
export function withBoxInView(layout: Layout, wished: Camera, w: number, h: number): Camera {
  if (w === 0 || h === 0) return wished;
  const { x, y, scale } = wished;
  let [moveX, moveY] = [0, 0];
  let nearest = Number.POSITIVE_INFINITY;
  for (const box of layout.boxes) {
    if (!isDrawn(box, scale) || isOpen(box, scale)) continue;
    const dx = moveInto(box.x * scale + x, box.w * scale, w);
    const dy = moveInto(box.y * scale + y, box.h * scale, h);
    const far = dx * dx + dy * dy;
    if (far === 0) return wished;
    if (far < nearest) [nearest, moveX, moveY] = [far, dx, dy];
  }
  return { x: x + moveX, y: y + moveY, scale };
}

/** How far a stretch has to move until enough of it is within 0 … `room`. */
function moveInto(from: number, length: number, room: number): number {
  const kept = Math.min(KEPT_PX, length, room);
  if (from + length < kept) return kept - from - length;
  return Math.min(0, room - kept - from);
}
