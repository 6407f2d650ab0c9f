/** Edges of a graph: those in view, gathered into one path for each style. */
import type { Box, Edge } from "./layout";
import type { Scene } from "./scene";

export interface View {
  readonly x0: number;
  readonly y0: number;
  readonly x1: number;
  readonly y1: number;
}

type Style = "quiet" | "touched" | "critical" | "implied";
const STYLES: readonly Style[] = ["quiet", "implied", "touched", "critical"];
/** Above this scale edges are curves; below it the difference cannot be seen. */
const CURVE_SCALE = 0.45;
/** Quiet edges between operators are drawn from this scale on. */
const INNER_SCALE = 0.3;

/** One number for a pair of boxes. */
export const edgeKey = (from: number, to: number): number => from * 2 ** 26 + to;

export function paintEdges(ctx: CanvasRenderingContext2D, scene: Scene, view: View, depth: number): void {
  const { layout, camera } = scene;
  const paths: Record<Style, Path2D> = {
    quiet: new Path2D(),
    touched: new Path2D(),
    critical: new Path2D(),
    implied: new Path2D(),
  };
  const curved = camera.scale >= CURVE_SCALE;
  for (const edge of layout.edges) {
    const from = layout.boxes[edge.from] as Box;
    const to = layout.boxes[edge.to] as Box;
    if (from.depth !== depth || isOutside(from, to, view)) continue;
    const style = styleOf(scene, edge);
    if (style === null || (depth > 0 && style === "quiet" && camera.scale < INNER_SCALE)) continue;
    trace(paths[style], from, to, curved);
  }
  const px = 1 / Math.min(1, camera.scale);
  for (const style of STYLES) stroke(ctx, scene, style, paths[style], px);
}

function styleOf(scene: Scene, edge: Edge): Style | null {
  if (scene.criticalEdges.has(edgeKey(edge.from, edge.to))) return "critical";
  const touched = (box: number) => box === edge.from || box === edge.to;
  if (touched(scene.selected) || touched(scene.hovered)) return edge.implied ? "implied" : "touched";
  return edge.implied ? null : "quiet";
}

function stroke(ctx: CanvasRenderingContext2D, { palette }: Scene, style: Style, path: Path2D, px: number): void {
  ctx.strokeStyle = style === "critical" ? palette.critical : style === "quiet" ? palette.edge : palette.muted;
  ctx.lineWidth = px * (style === "critical" ? 2 : style === "quiet" ? 1.1 : 1.6);
  ctx.setLineDash(style === "implied" ? [3 * px, 4 * px] : []);
  ctx.stroke(path);
  ctx.setLineDash([]);
}

/** The bounding box of two boxes holds every curve between them. */
const isOutside = (a: Box, b: Box, view: View): boolean =>
  Math.max(a.x + a.w, b.x + b.w) < view.x0 ||
  Math.min(a.x, b.x) > view.x1 ||
  Math.max(a.y + a.h, b.y + b.h) < view.y0 ||
  Math.min(a.y, b.y) > view.y1;

/** Append the way from one box to another, to its right or left if there is room, else above or below. */
export function trace(path: Path2D, a: Box, b: Box, curved: boolean): void {
  const ay = a.y + a.h / 2;
  const by = b.y + b.h / 2;
  const [right, left] = [b.x >= a.x + a.w, b.x + b.w <= a.x];
  if (right || left) {
    const [x1, x2] = right ? [a.x + a.w, b.x] : [a.x, b.x + b.w];
    const bend = Math.min(90, Math.max(18, Math.abs(x2 - x1) / 2)) * (right ? 1 : -1);
    path.moveTo(x1, ay);
    if (curved) path.bezierCurveTo(x1 + bend, ay, x2 - bend, by, x2, by);
    else path.lineTo(x2, by);
    return;
  }
  const down = by > ay;
  const [x1, x2] = [a.x + a.w / 2, b.x + b.w / 2];
  const [y1, y2] = [down ? a.y + a.h : a.y, down ? b.y : b.y + b.h];
  path.moveTo(x1, y1);
  if (curved) path.bezierCurveTo(x1, (y1 + y2) / 2, x2, (y1 + y2) / 2, x2, y2);
  else path.lineTo(x2, y2);
}
