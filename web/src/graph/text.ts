/** Text on boxes, drawn in pixels of the screen: what has no room for letters that can be read has none. */
import { percent } from "../format";
import type { Box } from "./layout";
import { isOpen, type Scene } from "./scene";

/** The smallest letters on a canvas. */
export const MIN_TEXT_PX = 11;
const LABEL_PX = 11;
/** Letters grow with the zoom up to this much. */
const MOST_GROWTH = 1.3;
const MARGIN = 7;
/** As in the layout: what a frame has above the boxes inside it. */
const TITLE_H = 26;

export interface Room {
  /** Heights of the lines, 0 for none. */
  readonly label: number;
  readonly sub: number;
  readonly bar: boolean;
}

/** What a box has room for at a scale: one line, two, or two above a bar. */
export function roomFor(box: Box, scale: number): Room {
  const [w, h] = [box.w * scale, box.h * scale];
  const grown = Math.min(MOST_GROWTH, Math.max(1, scale));
  const label = Math.max(MIN_TEXT_PX, LABEL_PX * grown);
  const sub = MIN_TEXT_PX * grown;
  if (w < 34 || h < label + 3) return { label: 0, sub: 0, bar: false };
  const two = h >= label + sub + 7;
  return { label, sub: two ? sub : 0, bar: h >= label + sub + 22 };
}

export function paintText(ctx: CanvasRenderingContext2D, scene: Scene, index: number): void {
  const { palette, camera } = scene;
  const box = scene.layout.boxes[index] as Box;
  const { label, sub, bar } = roomFor(box, camera.scale);
  if (label === 0) return;
  const [x, y] = [box.x * camera.scale + camera.x, box.y * camera.scale + camera.y];
  const [w, h] = [box.w * camera.scale, box.h * camera.scale];
  const open = isOpen(box, camera.scale);
  const title = TITLE_H * camera.scale;
  const lines = sub === 0 || open ? label : label + sub + 5;
  if (open && title < label && box.depth > 0) return;
  // A frame's title has its strip above the boxes inside; where that is too low, it stands above the frame.
  const above = title < label ? -label - 3 : Math.max(1, (title - label) / 2);
  const top = open ? y + above : bar ? y + 7 : y + Math.max(2, (h - lines) / 2);
  ctx.textBaseline = "alphabetic";
  ctx.textAlign = "left";
  ctx.fillStyle = palette.text;
  write(ctx, `600 ${label}px ${palette.sans}`, nameOf(box), x + MARGIN, top + label * 0.85, w - 2 * MARGIN);
  if (sub === 0 || open) return;
  paintSub(ctx, scene, index, { sub, x: x + MARGIN, base: top + label + 5 + sub * 0.85, room: w - 2 * MARGIN });
}

interface SubLine {
  readonly sub: number;
  readonly x: number;
  readonly base: number;
  readonly room: number;
}

/** The types that a box has, and its share, or what a pass does to it, on the right. */
function paintSub(ctx: CanvasRenderingContext2D, scene: Scene, index: number, { sub, x, base, room }: SubLine): void {
  const { palette, layout } = scene;
  const box = layout.boxes[index] as Box;
  const share = scene.share[index] ?? Number.NaN;
  const font = `${sub}px ${palette.sans}`;
  ctx.font = font;
  // What stands on a strong colour needs the stronger one of letters.
  ctx.fillStyle = scene.tints.notes === undefined ? palette.muted : palette.text;
  const time = scene.tints.notes?.[index] ?? (Number.isFinite(share) && share > 0 ? percent(share) : "");
  const taken = time === "" ? 0 : ctx.measureText(time).width;
  if (taken > 0 && taken < room) {
    ctx.textAlign = "right";
    ctx.fillText(time, x + room, base);
    ctx.textAlign = "left";
  }
  const left = room - taken - (taken === 0 ? 0 : 6);
  const text = box.op?.type ?? box.group.sub;
  // The first type alone says more than two that are cut.
  const fits = ctx.measureText(text).width <= left;
  write(ctx, font, fits ? text : (text.split(" · ")[0] ?? text), x, base, left);
}

const nameOf = (box: Box): string => box.op?.name ?? box.group.label;

function write(ctx: CanvasRenderingContext2D, font: string, text: string, x: number, y: number, room: number): void {
  ctx.font = font;
  const cut = clip(ctx, font, text, Math.floor(room));
  if (cut !== "") ctx.fillText(cut, x, y);
}

const MAX_CLIPPED = 20_000;
const clipped = new Map<string, string>();

/** `text` as far as there is room, then "…". Measuring costs more than drawing, so results are kept. */
function clip(ctx: CanvasRenderingContext2D, font: string, text: string, room: number): string {
  const key = `${font}|${room}|${text}`;
  const found = clipped.get(key);
  if (found !== undefined) return found;
  if (clipped.size > MAX_CLIPPED) clipped.clear();
  const made = ctx.measureText(text).width <= room ? text : shortened(ctx, text, room);
  clipped.set(key, made);
  return made;
}

function shortened(ctx: CanvasRenderingContext2D, text: string, room: number): string {
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ctx.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low < 2 ? "" : `${text.slice(0, low)}…`;
}
