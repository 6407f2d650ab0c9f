/** Draws a timeline: lanes of slices, an axis, and nothing that would be thinner than half a pixel on its own. */

import { axisLabel, niceStep, shortType } from "../format";
import { BUCKETS, type Bucket, bucketCodes } from "../graph/group";
import { alpha, type Palette } from "../palette";
import { isWait } from "./input";
import { columnOf, type Level, type Levels, levelAt, levelsOf } from "./levels";
import { isExecutor, type Lane, shownOp, type TimelineModel } from "./model";
import { isRound, isServer } from "./server";

const LEAST_LABELLED = 34;
/** How many slices may begin within one that began left of what is shown (bodies of control flow), and it is seen. */
const NESTED = 64;
/** Shades of a colour by how much of a pixel's time is busy. */
const SHADES = 8;
export const LANE_H = 24;
export const TOP = 6;
export const AXIS_H = 24;

export interface TimelineScene {
  readonly model: TimelineModel;
  readonly palette: Palette;
  readonly from: number;
  readonly to: number;
  readonly left: number;
  readonly selectedOps: ReadonlySet<number>;
  readonly critical: ReadonlySet<number>;
  readonly hover: { readonly lane: number; readonly slice: number } | null;
  readonly measured: readonly [number, number] | null;
}

/** Paint, and answer how many slices were drawn (those merged into one pixel count as drawn). */
export function paintTimeline(ctx: CanvasRenderingContext2D, w: number, h: number, scene: TimelineScene): number {
  const { model, palette } = scene;
  ctx.clearRect(0, 0, w, h);
  paintAxis(ctx, w, TOP + model.lanes.length * LANE_H, scene);
  let painted = 0;
  model.lanes.forEach((lane, index) => {
    const y = TOP + index * LANE_H;
    ctx.fillStyle = palette.accent;
    if (lane.pinned) ctx.fillRect(6, y, 3, LANE_H - 5);
    ctx.fillStyle = lane.pinned ? palette.text : palette.muted;
    ctx.font = `11px ${palette.sans}`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.fillText(fitting(ctx, lane.label, scene.left - 20), 14, y + 15, scene.left - 20);
    painted += paintLane(ctx, w, y, lane, index, scene);
  });
  paintMeasured(ctx, w, TOP + model.lanes.length * LANE_H, scene);
  return painted;
}

/** A label, short where it is wider than its room: squeezed letters cannot be read. */
function fitting(ctx: CanvasRenderingContext2D, label: string, room: number): string {
  const fits = (text: string) => ctx.measureText(text).width <= room;
  if (fits(label)) return label;
  let short = label.replace("trainer-", "t").replace("pserver-", "ps").replace("trainer ", "t");
  if (fits(short)) return short;
  while (short.length > 1 && !fits(`${short}…`)) short = short.slice(0, -1);
  return `${short}…`;
}

/** Two upright lines and what lies between them. */
function paintMeasured(ctx: CanvasRenderingContext2D, w: number, bottom: number, scene: TimelineScene): void {
  if (scene.measured === null) return;
  const perNs = (w - scene.left) / (scene.to - scene.from);
  const [a, b] = scene.measured.map((ns) =>
    Math.min(w, Math.max(scene.left, scene.left + (ns - scene.from) * perNs)),
  ) as [number, number];
  ctx.fillStyle = alpha(scene.palette.accent, 0.16);
  ctx.fillRect(Math.min(a, b), 0, Math.abs(b - a), bottom);
  ctx.fillStyle = scene.palette.accent;
  for (const x of [a, b]) ctx.fillRect(Math.round(x) - 0.5, 0, 1, bottom);
}

function paintAxis(ctx: CanvasRenderingContext2D, w: number, bottom: number, scene: TimelineScene): void {
  const { palette } = scene;
  const width = w - scene.left;
  const span = scene.to - scene.from;
  const step = niceStep((span * 120) / Math.max(120, width));
  ctx.font = `11px ${palette.sans}`;
  ctx.textBaseline = "alphabetic";
  ctx.textAlign = "left";
  ctx.lineWidth = 1;
  for (let at = Math.ceil(scene.from / step) * step; at <= scene.to; at += step) {
    const x = Math.round(scene.left + ((at - scene.from) / span) * width) + 0.5;
    ctx.strokeStyle = palette.line;
    ctx.beginPath();
    ctx.moveTo(x, 0);
    ctx.lineTo(x, bottom + 6);
    ctx.stroke();
    if (x > w - 54) continue;
    ctx.fillStyle = palette.muted;
    ctx.fillText(axisLabel(at, step), x + 4, bottom + 17);
  }
}

function paintLane(
  ctx: CanvasRenderingContext2D,
  w: number,
  y: number,
  lane: Lane,
  laneIndex: number,
  scene: TimelineScene,
): number {
  const nsPerPixel = (scene.to - scene.from) / (w - scene.left);
  const levels = isExecutor(lane) ? levelsOf(lane) : null;
  const level = levels === null ? null : levelAt(levels, nsPerPixel);
  ctx.save();
  ctx.beginPath();
  ctx.rect(scene.left, y, w - scene.left, LANE_H);
  ctx.clip();
  let painted: number;
  if (levels !== null && level !== null) {
    paintColumns(ctx, w, y, levels.originNs, level, scene);
    paintSlices(ctx, w, y, lane, laneIndex, scene, onTop(lane, levels, scene));
    if (scene.hover?.lane === laneIndex) paintSlices(ctx, w, y, lane, laneIndex, scene, [scene.hover.slice]);
    painted = Math.max(0, firstAfter(lane, scene.to) - firstShown(lane, scene.from));
  } else {
    painted = paintSlices(ctx, w, y, lane, laneIndex, scene, null);
  }
  ctx.restore();
  return painted;
}

/** A bar for each run of pixels alike: the colour of the role that takes most of the time, paler the less is busy. */
function paintColumns(
  ctx: CanvasRenderingContext2D,
  w: number,
  y: number,
  originNs: number,
  level: Level,
  scene: TimelineScene,
): void {
  const nsPerPixel = (scene.to - scene.from) / (w - scene.left);
  const binAt = (pixel: number) => Math.floor((scene.from + pixel * nsPerPixel - originNs) / level.binNs);
  const dim = scene.selectedOps.size > 0 ? 0.45 : 1;
  const width = Math.ceil(w - scene.left);
  let run = { role: -1, shade: 0, from: 0 };
  let bin = binAt(0);
  for (let pixel = 0; pixel <= width; pixel++) {
    const end = binAt(pixel + 1);
    const { role, share } = pixel === width ? { role: -1, share: 0 } : columnOf(level, bin, end);
    bin = end;
    const shade = Math.ceil(share * SHADES) / SHADES;
    if (role === run.role && shade === run.shade) continue;
    const bucket = BUCKETS[run.role];
    if (bucket !== undefined) {
      ctx.fillStyle = alpha(scene.palette.bucket[bucket], (0.22 + 0.7 * run.shade) * dim);
      ctx.fillRect(scene.left + run.from, y, pixel - run.from, LANE_H - 5);
    }
    run = { role, shade, from: pixel };
  }
}

interface Chosen {
  readonly selected: ReadonlySet<number>;
  readonly critical: ReadonlySet<number>;
  readonly slices: readonly number[];
}
const chosen = new WeakMap<Float64Array, Chosen>();
/** Pixels from which a slice of the critical path is underlined. */
const UNDERLINED = 1.5;

/** What is drawn on its own upon the columns, ascending: long, selected and critical slices; found once for a choice. */
function onTop(lane: Lane, { long, levels }: Levels, { selectedOps: selected, critical }: TimelineScene) {
  if (selected.size === 0 && critical.size === 0) return long;
  const before = chosen.get(lane.start);
  if (before?.selected === selected && before.critical === critical) return before.slices;
  const alone = new Set(long);
  const least = UNDERLINED * (levels[0]?.binNs ?? 0); // a pixel is at least a bin wide here
  const slices: number[] = [];
  for (let i = 0; i < lane.op.length; i++) {
    const op = shownOp(lane, i);
    const isMarked = (lane.duration[i] ?? 0) > least && critical.has(op);
    if (isMarked || selected.has(op) || alone.has(i)) slices.push(i);
  }
  chosen.set(lane.start, { selected, critical, slices });
  return slices;
}

/** `only`: these slices of the lane instead of all, ascending. */
function paintSlices(
  ctx: CanvasRenderingContext2D,
  w: number,
  y: number,
  lane: Lane,
  laneIndex: number,
  scene: TimelineScene,
  only: readonly number[] | null,
): number {
  const perNs = (w - scene.left) / (scene.to - scene.from);
  let painted = 0;
  let filledTo = Number.NEGATIVE_INFINITY;
  const codes = bucketCodes(lane.document);
  const count = only?.length ?? lane.start.length;
  const first = firstShown(lane, scene.from);
  for (let at = only === null ? first : lowerBound(only, first); at < count; at++) {
    const i = only?.[at] ?? at;
    const start = lane.start[i] ?? 0;
    const duration = lane.duration[i] ?? 0;
    if (start > scene.to) break;
    if (start + duration < scene.from) continue;
    painted += 1;
    const x = scene.left + (start - scene.from) * perNs;
    const wide = duration * perNs;
    if (x + wide < filledTo + 0.5) continue; // nothing of it would show beside its neighbour
    const op = lane.op[i] ?? -1;
    const bucket = BUCKETS[codes[op] ?? -1];
    if (bucket === undefined) continue;
    filledTo = x + Math.max(1, wide);
    paintSlice(ctx, x, y, wide, { bucket, ...styleOf(lane, laneIndex, i, wide, scene) });
  }
  return painted;
}

function styleOf(
  lane: Lane,
  laneIndex: number,
  i: number,
  wide: number,
  scene: TimelineScene,
): Omit<SliceStyle, "bucket"> {
  const shown = shownOp(lane, i);
  return {
    // Only where it may fit.
    text: wide < LEAST_LABELLED ? "" : labelOf(lane, lane.op[i] ?? -1),
    even: i % 2 === 0,
    hot: scene.hover?.lane === laneIndex && scene.hover.slice === i,
    selected: scene.selectedOps.has(shown),
    critical: scene.critical.has(shown),
    dim: scene.selectedOps.size > 0 && !scene.selectedOps.has(shown),
    idle: isWait(lane, i) || isRound(lane, i),
    palette: scene.palette,
  };
}

function labelOf(lane: Lane, op: number): string {
  const found = lane.document.ops[op];
  return isServer(lane) ? (found?.name ?? "") : shortType(found?.type ?? "");
}

/** Where the first of ascending values is that is not less than `least`. */
function lowerBound(values: ArrayLike<number>, least: number): number {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((values[middle] ?? 0) < least) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The first slice that begins at or after a time. */
const firstAfter = ({ start }: Lane, ns: number): number => lowerBound(start, ns);

/** Before it all slices of a lane end left of `from`, but for one that contains others. */
const firstShown = (lane: Lane, from: number): number => Math.max(0, firstAfter(lane, from) - NESTED);

interface SliceStyle {
  readonly bucket: Bucket;
  readonly text: string;
  readonly even: boolean;
  readonly hot: boolean;
  readonly selected: boolean;
  readonly critical: boolean;
  readonly dim: boolean;
  /** Nothing is done: drawn as an outline. */
  readonly idle: boolean;
  readonly palette: Palette;
}

function paintSlice(ctx: CanvasRenderingContext2D, x: number, y: number, wide: number, style: SliceStyle): void {
  const { palette } = style;
  const colour = palette.bucket[style.bucket];
  const h = LANE_H - 5;
  const w = Math.max(0.8, wide > 3 ? wide - 1 : wide);
  // Neighbours of one colour alternate slightly, so that a row of short operators reads as many, not as one.
  const base = style.idle ? 0.16 : style.even ? 0.92 : 0.74;
  ctx.fillStyle = alpha(colour, (style.hot || style.selected) && !style.idle ? 1 : style.dim ? base * 0.45 : base);
  ctx.fillRect(x, y, w, h);
  if (style.idle && wide > 3) {
    ctx.strokeStyle = colour;
    ctx.lineWidth = 1;
    ctx.strokeRect(x + 0.5, y + 0.5, Math.max(1, w - 1), h - 1);
  }
  if (style.critical && wide > UNDERLINED) {
    ctx.fillStyle = palette.critical;
    ctx.fillRect(x, y + h, w, 2);
  }
  if (style.hot || style.selected) {
    ctx.strokeStyle = palette.text;
    ctx.lineWidth = 1.4;
    ctx.strokeRect(x + 0.7, y + 0.7, Math.max(1, w - 1.4), h - 1.4);
  }
  if (wide < LEAST_LABELLED) return;
  ctx.font = `11px ${palette.sans}`;
  if (ctx.measureText(style.text).width > wide - 8) return;
  ctx.fillStyle = style.idle ? palette.text : palette.onFill;
  ctx.textAlign = "left";
  ctx.fillText(style.text, x + 4, y + 13);
}
