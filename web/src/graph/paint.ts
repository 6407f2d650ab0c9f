/** Draws a laid-out graph. Reads positions, colours and glow; decides nothing about what is lit. */
import { percent } from "../format";
import { alpha, type Palette } from "../palette";
import type { CriticalPath } from "./critical";
import type { Box, Edge, Layout } from "./layout";

export interface Camera {
  readonly x: number;
  readonly y: number;
  readonly scale: number;
}

export interface Scene {
  readonly layout: Layout;
  readonly camera: Camera;
  readonly palette: Palette;
  readonly critical: CriticalPath;
  readonly criticalEdges: ReadonlySet<string>;
  readonly selected: number;
  readonly hovered: number;
  /** Share of the step's operator time that a box took; NaN before anything was measured. */
  readonly share: Float64Array;
  readonly maxShare: number;
  /** 0 … 1 by box: how lit it is in this animation frame. */
  readonly glow: Float64Array;
}

const LABEL_MIN_SCALE = 0.42;
const SUB_MIN_SCALE = 0.62;
/** Boxes from this height on have room for larger letters and a bar that shows the share. */
const TALL_H = 54;

export function paintGraph(ctx: CanvasRenderingContext2D, w: number, h: number, scene: Scene): void {
  const { camera, layout } = scene;
  ctx.clearRect(0, 0, w, h);
  ctx.save();
  ctx.translate(camera.x, camera.y);
  ctx.scale(camera.scale, camera.scale);
  for (const edge of layout.edges) paintEdge(ctx, scene, edge, "quiet");
  for (const edge of layout.edges) paintEdge(ctx, scene, edge, "loud");
  const visible = (box: Box) =>
    (box.x + box.w) * camera.scale + camera.x > 0 &&
    box.x * camera.scale + camera.x < w &&
    (box.y + box.h) * camera.scale + camera.y > 0 &&
    box.y * camera.scale + camera.y < h;
  layout.boxes.forEach((box, index) => {
    if (visible(box)) paintBox(ctx, scene, box, index);
  });
  // Inner edges lie inside a frame that was just painted, so they come after it, and their boxes again on top.
  for (const edge of layout.edges) if (layout.boxes[edge.from]?.op) paintEdge(ctx, scene, edge, "inner");
  layout.boxes.forEach((box, index) => {
    if (box.op !== null && visible(box)) paintBox(ctx, scene, box, index);
  });
  ctx.restore();
}

type Pass = "quiet" | "loud" | "inner";

function paintEdge(ctx: CanvasRenderingContext2D, scene: Scene, edge: Edge, pass: Pass): void {
  const { layout, palette } = scene;
  const from = layout.boxes[edge.from];
  const to = layout.boxes[edge.to];
  if (from === undefined || to === undefined || (from.op !== null) !== (pass === "inner")) return;
  const touched =
    edge.from === scene.selected ||
    edge.to === scene.selected ||
    edge.from === scene.hovered ||
    edge.to === scene.hovered;
  const critical = scene.criticalEdges.has(`${edge.from},${edge.to}`);
  if (edge.implied && !touched && !critical) return;
  if (pass !== "inner" && (touched || critical) !== (pass === "loud")) return;
  ctx.beginPath();
  trace(ctx, from, to);
  ctx.strokeStyle = critical ? palette.critical : touched ? palette.muted : palette.edge;
  ctx.lineWidth = critical ? 2 : touched ? 1.6 : 1.2;
  ctx.setLineDash(edge.implied && !critical ? [3, 4] : []);
  ctx.stroke();
  ctx.setLineDash([]);
}

function trace(ctx: CanvasRenderingContext2D, a: Box, b: Box): void {
  const ay = a.y + a.h / 2;
  const by = b.y + b.h / 2;
  const bend = (gap: number) => Math.min(90, Math.max(18, gap / 2));
  if (b.x >= a.x + a.w) {
    const k = bend(b.x - a.x - a.w);
    ctx.moveTo(a.x + a.w, ay);
    ctx.bezierCurveTo(a.x + a.w + k, ay, b.x - k, by, b.x, by);
  } else if (b.x + b.w <= a.x) {
    const k = bend(a.x - b.x - b.w);
    ctx.moveTo(a.x, ay);
    ctx.bezierCurveTo(a.x - k, ay, b.x + b.w + k, by, b.x + b.w, by);
  } else {
    const down = by > ay;
    const x1 = a.x + a.w / 2;
    const x2 = b.x + b.w / 2;
    const y1 = down ? a.y + a.h : a.y;
    const y2 = down ? b.y : b.y + b.h;
    ctx.moveTo(x1, y1);
    ctx.bezierCurveTo(x1, (y1 + y2) / 2, x2, (y1 + y2) / 2, x2, y2);
  }
}

function paintBox(ctx: CanvasRenderingContext2D, scene: Scene, box: Box, index: number): void {
  const { palette } = scene;
  const colour = palette.bucket[box.group.bucket];
  const share = scene.share[index] ?? Number.NaN;
  const heat = Number.isFinite(share) && scene.maxShare > 0 ? Math.sqrt(share / scene.maxShare) : 0;
  const glow = scene.glow[index] ?? 0;
  const chosen = index === scene.selected;
  const radius = box.op === null ? 7 : 5;
  ctx.beginPath();
  ctx.roundRect(box.x, box.y, box.w, box.h, radius);
  ctx.fillStyle = box.expanded ? palette.bg : palette.raised;
  ctx.fill();
  ctx.fillStyle = alpha(colour, box.expanded ? 0.05 : 0.08 + 0.38 * heat);
  ctx.fill();
  ctx.strokeStyle = alpha(colour, chosen ? 1 : index === scene.hovered ? 0.95 : 0.45 + 0.5 * Math.max(heat, glow));
  ctx.lineWidth = chosen ? 2.4 : 1.1;
  ctx.stroke();
  if (chosen) paintRing(ctx, box, radius, colour);
  if (glow > 0) paintLamp(ctx, box, colour, glow);
  const part = Number.isFinite(share) && scene.maxShare > 0 ? share / scene.maxShare : 0;
  if (box.h >= TALL_H && box.op === null && !box.expanded) paintShare(ctx, box, colour, part);
  if (scene.camera.scale >= LABEL_MIN_SCALE) paintText(ctx, scene, box, share);
}

function paintRing(ctx: CanvasRenderingContext2D, box: Box, radius: number, colour: string): void {
  ctx.beginPath();
  ctx.roundRect(box.x - 3, box.y - 3, box.w + 6, box.h + 6, radius + 3);
  ctx.strokeStyle = alpha(colour, 0.28);
  ctx.lineWidth = 3;
  ctx.stroke();
}

/** The lamp at the corner: on in frames with events of the operator. */
function paintLamp(ctx: CanvasRenderingContext2D, box: Box, colour: string, glow: number): void {
  const x = box.x + box.w - 10;
  const y = box.y + 10;
  ctx.fillStyle = alpha(colour, 0.22 * glow);
  ctx.beginPath();
  ctx.arc(x, y, 7, 0, 7);
  ctx.fill();
  ctx.fillStyle = alpha(colour, 0.25 + 0.75 * glow);
  ctx.beginPath();
  ctx.arc(x, y, 3.2, 0, 7);
  ctx.fill();
}

interface Letters {
  readonly label: number;
  readonly sub: number;
  /** Baselines, from the top of the box. */
  readonly labelY: number;
  readonly subY: number;
}

/** Sizes of a box's text. A graph that is drawn small gets the larger letters that its boxes still have room for. */
function lettersOf(box: Box, scale: number): Letters {
  const boost = (least: number, most: number) => Math.min(most, Math.max(least, 1 / scale));
  if (box.op !== null) {
    const k = boost(1, 1.12);
    return { label: 10 * k, sub: 9 * k, labelY: 13, subY: 24 };
  }
  const tall = box.h >= TALL_H && !box.expanded;
  const k = tall ? boost(1, 1.15) : boost(1, 1.12);
  return { label: 11.5 * k, sub: 10.5 * k, labelY: tall ? 20 : 17, subY: tall ? 38 : 33 };
}

function paintText(ctx: CanvasRenderingContext2D, scene: Scene, box: Box, share: number): void {
  const { palette } = scene;
  const letters = lettersOf(box, scene.camera.scale);
  const label = box.op?.name ?? box.group.label;
  ctx.textBaseline = "alphabetic";
  ctx.textAlign = "left";
  ctx.fillStyle = palette.text;
  ctx.font = `600 ${letters.label}px ${palette.sans}`;
  ctx.fillText(clip(ctx, label, box.w - 22), box.x + 9, box.y + letters.labelY);
  if (box.expanded || scene.camera.scale < SUB_MIN_SCALE) return;
  const y = box.y + letters.subY;
  const time = Number.isFinite(share) && share > 0 ? percent(share) : "";
  ctx.fillStyle = palette.muted;
  ctx.font = `${letters.sub}px ${palette.sans}`;
  ctx.textAlign = "right";
  ctx.fillText(time, box.x + box.w - 8, y);
  const room = box.w - 22 - (time === "" ? 0 : ctx.measureText(time).width);
  ctx.textAlign = "left";
  const sub = box.op?.type ?? box.group.sub;
  // The first type alone says more than two that are cut.
  const fits = ctx.measureText(sub).width <= room;
  ctx.fillText(clip(ctx, fits ? sub : (sub.split(" · ")[0] ?? sub), room), box.x + 9, y);
}

/** How a box's share compares with the largest one. */
function paintShare(ctx: CanvasRenderingContext2D, box: Box, colour: string, part: number): void {
  const [x, y, w] = [box.x + 9, box.y + box.h - 11, box.w - 18];
  ctx.fillStyle = alpha(colour, 0.16);
  ctx.fillRect(x, y, w, 3);
  ctx.fillStyle = alpha(colour, 0.9);
  ctx.fillRect(x, y, w * part, 3);
}

function clip(ctx: CanvasRenderingContext2D, text: string, room: number): string {
  if (ctx.measureText(text).width <= room) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ctx.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low === 0 ? "" : `${text.slice(0, low)}…`;
}

/** The innermost box at a point of the canvas, -1 for none. */
export function pick(layout: Layout, camera: Camera, px: number, py: number): number {
  const x = (px - camera.x) / camera.scale;
  const y = (py - camera.y) / camera.scale;
  for (let index = layout.boxes.length - 1; index >= 0; index--) {
    const box = layout.boxes[index];
    if (box && x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + box.h) return index;
  }
  return -1;
}

/** Around a graph that is fitted into its canvas; the hint stands below. */
export const PAD = { x: 20, top: 20, bottom: 40 } as const;
/** What a narrow page needs below instead: there the hint has two lines. */
export const PAD_BELOW = 60;

export function fitCamera(layout: Layout, w: number, h: number): Camera {
  if (layout.width === 0 || w === 0) return { x: PAD.x, y: PAD.top, scale: 1 };
  if (layout.down) {
    const scale = Math.max(0.05, Math.min(1.25, (w - PAD.x) / layout.width));
    return { x: (w - layout.width * scale) / 2, y: PAD.top, scale };
  }
  const room = h - PAD.top - PAD.bottom;
  const scale = Math.max(0.05, Math.min(1.25, (w - 2 * PAD.x) / layout.width, room / layout.height));
  return {
    x: (w - layout.width * scale) / 2,
    y: PAD.top + Math.max(0, (room - layout.height * scale) / 2),
    scale,
  };
}
