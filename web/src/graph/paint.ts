/**
 * Draws a laid-out graph, at a level of detail that follows the zoom: operators, then modules as blocks. What is out
 * of view is not drawn, and no text is smaller than `MIN_TEXT_PX`. Reads positions, colours and glow; decides nothing
 * about what is lit.
 */
import { alpha } from "../palette";
import { paintEdges } from "./edges";
import type { Box, Layout } from "./layout";
import { type Camera, isDrawn, isOpen, type Scene } from "./scene";
import { paintText, roomFor } from "./text";
import { paintUsed } from "./uses";

/** Boxes from this height on have room for a bar that shows the share. */
const TALL_H = 54;

export function paintGraph(ctx: CanvasRenderingContext2D, w: number, h: number, scene: Scene): void {
  const { camera, layout } = scene;
  ctx.clearRect(0, 0, w, h);
  ctx.save();
  ctx.translate(camera.x, camera.y);
  ctx.scale(camera.scale, camera.scale);
  const view = { x0: -camera.x / camera.scale, y0: -camera.y / camera.scale, x1: 0, y1: 0 };
  view.x1 = view.x0 + w / camera.scale;
  view.y1 = view.y0 + h / camera.scale;
  const seen: number[] = [];
  layout.boxes.forEach((box, index) => {
    if (!isDrawn(box, camera.scale)) return;
    if (box.x + box.w > view.x0 && box.x < view.x1 && box.y + box.h > view.y0 && box.y < view.y1) seen.push(index);
  });
  // What is inside a frame lies on it; its edges lie between.
  const deepest = seen.reduce((most, index) => Math.max(most, layout.boxes[index]?.depth ?? 0), 0);
  for (let depth = 0; depth <= deepest; depth++) {
    paintEdges(ctx, scene, view, depth);
    for (const index of seen) if (layout.boxes[index]?.depth === depth) paintBox(ctx, scene, index);
  }
  paintUsed(ctx, scene);
  ctx.restore();
  for (const index of seen) paintText(ctx, scene, index);
}

/** Share of a box as a part of the largest one. */
function partOf(scene: Scene, index: number): number {
  const share = scene.share[index] ?? Number.NaN;
  return Number.isFinite(share) && scene.maxShare > 0 ? Math.min(1, share / scene.maxShare) : 0;
}

function tintAt(scene: Scene, index: number, box: Box): { readonly colour: string; readonly part: number } {
  const { colours, strength } = scene.tints;
  return {
    colour: colours[index] ?? scene.palette.bucket[box.group.bucket],
    part: strength?.[index] ?? partOf(scene, index),
  };
}

/** A colour of one hue for all has to say the amount by its depth alone; text stays legible on it. */
const depthOf = ({ tints }: Scene): number => (tints.tint === "role" ? 0.38 : 0.44);

function paintBox(ctx: CanvasRenderingContext2D, scene: Scene, index: number): void {
  const { palette, camera } = scene;
  const box = scene.layout.boxes[index] as Box;
  const { colour, part } = tintAt(scene, index, box);
  const heat = Math.sqrt(part);
  const glow = scene.glow[index] ?? 0;
  const open = isOpen(box, camera.scale);
  const chosen = index === scene.selected;
  const radius = box.op === null ? 7 : 5;
  const small = box.h * camera.scale < 16;
  ctx.beginPath();
  if (small) ctx.rect(box.x, box.y, box.w, box.h);
  else ctx.roundRect(box.x, box.y, box.w, box.h, radius);
  ctx.fillStyle = open ? palette.bg : palette.raised;
  ctx.fill();
  ctx.fillStyle = alpha(colour, open ? 0.05 : 0.08 + depthOf(scene) * Math.max(heat, small ? glow : 0));
  ctx.fill();
  // Lines keep their width on the screen, however far away the graph is.
  const px = 1 / Math.min(1, camera.scale);
  ctx.strokeStyle = alpha(colour, chosen ? 1 : index === scene.hovered ? 0.95 : 0.45 + 0.5 * Math.max(heat, glow));
  ctx.lineWidth = (chosen ? 2.4 : 1.1) * (small ? px : 1);
  ctx.stroke();
  if (chosen) paintRing(ctx, box, radius, colour, px);
  if (glow > 0 && !small) paintLamp(ctx, box, colour, glow, px);
  if (box.h >= TALL_H && box.op === null && !open && roomFor(box, camera.scale).bar) paintShare(ctx, box, colour, part);
}

function paintRing(ctx: CanvasRenderingContext2D, box: Box, radius: number, colour: string, px: number): void {
  ctx.beginPath();
  ctx.roundRect(box.x - 3 * px, box.y - 3 * px, box.w + 6 * px, box.h + 6 * px, radius + 3 * px);
  ctx.strokeStyle = alpha(colour, 0.28);
  ctx.lineWidth = 3 * px;
  ctx.stroke();
}

/** The lamp on the corner, where it takes no room from the text: on in frames with events of the operator. */
function paintLamp(ctx: CanvasRenderingContext2D, box: Box, colour: string, glow: number, px: number): void {
  const x = box.x + box.w - 2 * px;
  const y = box.y + 2 * px;
  ctx.fillStyle = alpha(colour, 0.22 * glow);
  ctx.beginPath();
  ctx.arc(x, y, 6.5 * px, 0, 7);
  ctx.fill();
  ctx.fillStyle = alpha(colour, 0.25 + 0.75 * glow);
  ctx.beginPath();
  ctx.arc(x, y, 3.2 * px, 0, 7);
  ctx.fill();
}

/** How a box's share compares with the largest one. */
function paintShare(ctx: CanvasRenderingContext2D, box: Box, colour: string, part: number): void {
  const [x, y, w] = [box.x + 9, box.y + box.h - 11, box.w - 18];
  ctx.fillStyle = alpha(colour, 0.16);
  ctx.fillRect(x, y, w, 3);
  ctx.fillStyle = alpha(colour, 0.9);
  ctx.fillRect(x, y, w * part, 3);
}

/** The innermost box that is drawn at a point of the canvas, -1 for none. */
export function pick(layout: Layout, camera: Camera, px: number, py: number): number {
  const x = (px - camera.x) / camera.scale;
  const y = (py - camera.y) / camera.scale;
  for (let index = layout.boxes.length - 1; index >= 0; index--) {
    const box = layout.boxes[index];
    if (box === undefined || !isDrawn(box, camera.scale)) continue;
    if (x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h) return index;
  }
  return -1;
}
