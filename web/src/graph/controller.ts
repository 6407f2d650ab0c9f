/**
 * The live graph behind its canvas: layout, camera, selection, and the one painter that lights operators.
 *
 * Owned by `GraphView`; all of it runs on the main thread. The painter asks for another animation frame only
 * while something fades, so an idle job costs nothing.
 */
import { signal } from "@preact/signals";
import { type Again, addPainter, invalidate } from "../frameloop";
import { palette } from "../palette";
import type { JobStore } from "../store/job";
import type { GraphRuntime } from "../store/ops";
import { reducedMotion } from "../store/session";
import type { GraphDocument } from "../types";
import { type CriticalPath, criticalPath, NO_PATH } from "./critical";
import { type Group, groupOps } from "./group";
import { type Layout, layoutGraph, type Place } from "./layout";
import { type Camera, fitCamera, PAD, PAD_BELOW, paintGraph, pick } from "./paint";

/** A canvas narrower than this gets the layout from top to bottom. */
const NARROW_PX = 700;
const CRITICAL_PERIOD_MS = 2000;
/** Fading lamps are drawn at most this often: the page may share two cores with the training that it shows. */
const FADE_PERIOD_MS = 50;

export class GraphController {
  readonly expanded = signal<ReadonlySet<string>>(new Set());
  readonly replica = signal<number | "all">("all");
  readonly hovered = signal(-1);
  /** Bumped with every new layout, so that text about it is rendered again. */
  readonly layoutVersion = signal(0);
  layout: Layout | null = null;
  groups: readonly Group[] = [];
  critical: CriticalPath = NO_PATH;
  selected = -1;

  #camera: Camera = { x: 0, y: 0, scale: 1 };
  #placed: Place = { aspect: 0, down: false };
  #fitted = true;
  #canvas: HTMLCanvasElement | null = null;
  #document: GraphDocument | null = null;
  #criticalEdges: ReadonlySet<string> = new Set();
  #criticalAt = Number.NEGATIVE_INFINITY;
  #criticalRows = -1;
  #criticalLater: ReturnType<typeof setTimeout> | undefined;
  #detach: () => void = () => {};
  /** An operator to reveal as soon as there is a layout that has it. */
  #wanted: number | null = null;
  #urgent = true;
  #paintedAt = Number.NEGATIVE_INFINITY;
  #painter = (nowMs: number): Again => this.#paint(nowMs);

  constructor(readonly store: JobStore) {}

  /** Draw on a canvas until the result is called, or another is attached: its place may be taken before it goes. */
  attach(canvas: HTMLCanvasElement): () => void {
    this.#detach();
    this.#canvas = canvas;
    const observer = new ResizeObserver(() => this.#resize());
    observer.observe(canvas);
    const disposers = [
      addPainter(this.#painter),
      this.store.onFrame(() => invalidate(this.#painter)),
      () => observer.disconnect(),
    ];
    this.#resize();
    // The first layout was made before there was a canvas to fill.
    this.relayout(this.#document);
    const detach = () => {
      if (this.#detach !== detach) return;
      this.#detach = () => {};
      for (const dispose of disposers) dispose();
      clearTimeout(this.#criticalLater);
      this.#criticalLater = undefined;
      this.#canvas = null;
    };
    this.#detach = detach;
    return detach;
  }

  /** Draw in the next animation frame: something that the person did. */
  repaint(): void {
    this.#urgent = true;
    invalidate(this.#painter);
  }

  /** Lay out anew for a document, a replica or a set of expanded groups; keeps the selected operator. */
  relayout(document: GraphDocument | null): void {
    const op = this.selectedOps()[0];
    const fresh = document !== this.#document;
    this.#document = document;
    if (document === null) {
      this.layout = null;
    } else {
      this.groups = groupOps(document, this.replica.value);
      this.#placed = this.#place();
      this.layout = layoutGraph(document, this.groups, this.expanded.value, this.#placed);
    }
    this.#criticalAt = Number.NEGATIVE_INFINITY;
    this.#criticalRows = -1;
    this.selected = op === undefined || fresh ? -1 : (this.layout?.boxOfOp[op] ?? -1);
    if (this.#fitted || fresh) this.fit();
    this.layoutVersion.value += 1;
    this.repaint();
    const wanted = this.#wanted;
    this.#wanted = null;
    if (wanted !== null) this.reveal(wanted);
  }

  selectedOps(): readonly number[] {
    const box = this.layout?.boxes[this.selected];
    return box?.op?.ops ?? box?.group.ops ?? [];
  }

  select(box: number): void {
    this.selected = box;
    this.layoutVersion.value += 1;
    this.repaint();
  }

  /** Show operator `op`: expands its group, selects its box and brings it into view. */
  reveal(op: number): void {
    const group = this.groups.find((one) => one.ops.includes(op));
    if (group === undefined || this.#document === null) {
      this.#wanted = this.#document === null ? op : null;
      return;
    }
    if (!this.expanded.value.has(group.id)) {
      this.expanded.value = new Set([...this.expanded.value, group.id]);
      this.relayout(this.#document);
    }
    this.select(this.layout?.boxOfOp[op] ?? -1);
    this.#bringIntoView(this.selected);
  }

  toggle(groupId: string): void {
    const next = new Set(this.expanded.value);
    if (!next.delete(groupId)) next.add(groupId);
    this.setExpanded(next);
    const index = this.layout?.boxes.findIndex((box) => box.id === groupId) ?? -1;
    this.select(index);
  }

  setExpanded(ids: ReadonlySet<string>): void {
    this.expanded.value = ids;
    this.relayout(this.#document);
  }

  at(px: number, py: number): number {
    return this.layout === null ? -1 : pick(this.layout, this.#camera, px, py);
  }

  hover(box: number): void {
    if (box === this.hovered.value) return;
    this.hovered.value = box;
    this.repaint();
  }

  pan(dx: number, dy: number): void {
    this.#camera = { ...this.#camera, x: this.#camera.x + dx, y: this.#camera.y + dy };
    this.#fitted = false;
    this.repaint();
  }

  zoom(factor: number, px: number, py: number): void {
    const scale = Math.min(4, Math.max(0.05, this.#camera.scale * factor));
    const k = scale / this.#camera.scale;
    this.#camera = { scale, x: px - (px - this.#camera.x) * k, y: py - (py - this.#camera.y) * k };
    this.#fitted = false;
    this.repaint();
  }

  #place(): Place {
    const { clientWidth: w, clientHeight: h } = this.#canvas ?? { clientWidth: 0, clientHeight: 0 };
    const down = w > 0 && w < NARROW_PX;
    const aspect = h < 120 ? Number.POSITIVE_INFINITY : (w - 2 * PAD.x) / (h - PAD.top - PAD.bottom);
    return { aspect: down ? 0 : Math.round(aspect * 50) / 50, down };
  }

  fit(): void {
    if (this.layout === null || this.#canvas === null) return;
    const { clientWidth: w, clientHeight: h } = this.#canvas;
    this.#camera = fitCamera(this.layout, w, h);
    const needed = this.layout.down ? this.layout.height * this.#camera.scale + PAD.top + PAD_BELOW : 0;
    this.#canvas.parentElement?.style.setProperty("--graph-height", `${Math.ceil(needed)}px`);
    this.#fitted = true;
    this.repaint();
  }

  /** The nearest box from the selected one in a direction; the first box when none is selected. */
  step(dx: number, dy: number): void {
    const boxes = this.layout?.boxes ?? [];
    const from = boxes[this.selected];
    if (from === undefined) {
      this.select(boxes.length > 0 ? 0 : -1);
      return;
    }
    let best = -1;
    let bestCost = Number.POSITIVE_INFINITY;
    boxes.forEach((box, index) => {
      const x = box.x + box.w / 2 - from.x - from.w / 2;
      const y = box.y + box.h / 2 - from.y - from.h / 2;
      const along = x * dx + y * dy;
      const aside = Math.abs(x * dy) + Math.abs(y * dx);
      if (index === this.selected || along <= 1) return;
      const cost = along + aside * 2;
      if (cost < bestCost) {
        best = index;
        bestCost = cost;
      }
    });
    if (best < 0) return;
    this.select(best);
    this.#bringIntoView(best);
  }

  #bringIntoView(index: number): void {
    const box = this.layout?.boxes[index];
    const canvas = this.#canvas;
    if (box === undefined || canvas === null) return;
    const { scale } = this.#camera;
    const x = box.x * scale + this.#camera.x;
    const y = box.y * scale + this.#camera.y;
    const inside = x > 0 && y > 30 && x + box.w * scale < canvas.clientWidth && y + box.h * scale < canvas.clientHeight;
    if (inside && scale > 0.5) return;
    const next = Math.max(scale, 0.8);
    this.#camera = {
      scale: next,
      x: canvas.clientWidth / 2 - (box.x + box.w / 2) * next,
      y: canvas.clientHeight / 2 - (box.y + box.h / 2) * next,
    };
    this.#fitted = false;
    this.repaint();
  }

  #resize(): void {
    const canvas = this.#canvas;
    if (canvas === null) return;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    const place = this.#place();
    // Another shape asks for another layout; one that a person moved about in stays until the page turns narrow or wide.
    const turned = place.down !== this.#placed.down;
    if (turned || (this.#fitted && place.aspect !== this.#placed.aspect)) this.relayout(this.#document);
    else if (this.#fitted) this.fit();
    this.repaint();
  }

  #paint(nowMs: number): Again {
    if (!this.#urgent && nowMs - this.#paintedAt < FADE_PERIOD_MS) return "again";
    this.#urgent = false;
    this.#paintedAt = nowMs;
    const ctx = this.#canvas?.getContext("2d");
    const canvas = this.#canvas;
    if (!ctx || canvas === null || this.layout === null || this.#document === null) return "done";
    const hash = this.store.shownHash.value;
    const graph = hash === null ? undefined : this.store.ops.graphs.get(hash);
    if (graph === undefined || graph.document !== this.#document) return "done";
    const fading = graph.light(nowMs);
    this.#refreshCritical(graph, nowMs);
    const { share, maxShare } = shares(this.layout, graph);
    const ratio = devicePixelRatio || 1;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    paintGraph(ctx, canvas.clientWidth, canvas.clientHeight, {
      layout: this.layout,
      camera: this.#camera,
      palette: palette(),
      critical: this.critical,
      criticalEdges: this.#criticalEdges,
      selected: this.selected,
      hovered: this.hovered.value,
      share,
      maxShare,
      glow: glows(this.layout, graph, nowMs),
    });
    return fading ? "again" : "done";
  }

  #refreshCritical(graph: GraphRuntime, nowMs: number): void {
    if (this.#document === null || this.layout === null || graph.rows === this.#criticalRows) return;
    const wait = this.#criticalAt + CRITICAL_PERIOD_MS - nowMs;
    if (wait > 0) {
      // Events may end here; the path must still come to report all of them.
      this.#criticalLater ??= setTimeout(() => {
        this.#criticalLater = undefined;
        this.repaint();
      }, wait);
      return;
    }
    this.#criticalAt = nowMs;
    this.#criticalRows = graph.rows;
    this.critical = criticalPath(this.#document, (op) => graph.meanNs(op));
    const edges = new Set<string>();
    for (const pair of this.critical.edges) {
      const [from, to] = pair.split(",").map(Number) as [number, number];
      for (const of of [this.layout.boxOfOp, this.layout.groupBoxOfOp]) {
        const a = of[from] ?? -1;
        const b = of[to] ?? -1;
        if (a >= 0 && b >= 0 && a !== b) edges.add(`${a},${b}`);
      }
    }
    this.#criticalEdges = edges;
  }
}

function shares(layout: Layout, graph: GraphRuntime): { share: Float64Array; maxShare: number } {
  const share = new Float64Array(layout.boxes.length).fill(Number.NaN);
  let total = 0;
  for (let op = 0; op < layout.boxOfOp.length; op++) {
    if ((layout.groupBoxOfOp[op] ?? -1) >= 0) total += graph.totalNs[op] ?? 0;
  }
  if (total === 0) return { share, maxShare: 0 };
  let maxShare = 0;
  layout.boxes.forEach((box, index) => {
    const ops = box.op?.ops ?? box.group.ops;
    share[index] = ops.reduce((sum, op) => sum + (graph.totalNs[op] ?? 0), 0) / total;
    if (!box.expanded) maxShare = Math.max(maxShare, share[index] ?? 0);
  });
  return { share, maxShare };
}

function glows(layout: Layout, graph: GraphRuntime, nowMs: number): Float64Array {
  const glow = new Float64Array(layout.boxes.length);
  for (let op = 0; op < layout.boxOfOp.length; op++) {
    const lit = graph.glow(op, nowMs);
    if (lit === 0) continue;
    const shown = reducedMotion.matches ? 1 : lit;
    for (const of of [layout.boxOfOp, layout.groupBoxOfOp]) {
      const box = of[op] ?? -1;
      if (box >= 0) glow[box] = Math.max(glow[box] ?? 0, shown);
    }
  }
  return glow;
}
