/**
 * The live graph behind its canvas: layout, camera, selection, and the one painter that lights operators.
 *
 * Owned by `GraphView`; all of it runs on the main thread. The painter asks for another animation frame only
 * while something fades, so an idle job costs nothing.
 */
import { signal } from "@preact/signals";
import { ApiError } from "../api";
import { type Again, addPainter, invalidate, paintWhenRestored } from "../frameloop";
import { type Palette, palette } from "../palette";
import type { JobStore } from "../store/job";
import type { GraphRuntime } from "../store/ops";
import type { Behind } from "../store/staleness";
import type { GraphDocument } from "../types";
import { edgesAlong, glows, NO_SHARES, type Shares, shares } from "./boxsums";
import { fitCamera, MAX_SCALE, MIN_SCALE, moved, PAD, PAD_BELOW, sizeOf, withBoxInView } from "./camera";
import { type CriticalPath, NO_PATH } from "./critical";
import { everyGroup, type Group, pathTo } from "./group";
import type { Layout, Place } from "./layout";
import { paintGraph, pick } from "./paint";
import type { Plan } from "./plan";
import { pathThrough, planGraph } from "./remote";
import type { Camera } from "./scene";
import { type Tint, type Tints, tintsOf, tintsOfPass } from "./tints";
import { usedBoxes } from "./uses";
import { cameraAt, type Viewpoint, viewpointOf } from "./viewpoint";
import { nearestBox } from "./walk";

/** A canvas narrower than this gets the layout from top to bottom. */
const NARROW_PX = 700;
const CRITICAL_PERIOD_MS = 2000;
/** Fading lamps are drawn at most this often: the page may share two cores with the training that it shows. */
const FADE_PERIOD_MS = 50;

export class GraphController {
  readonly expanded = signal<ReadonlySet<string>>(new Set());
  readonly replica = signal<number | "all">("all");
  /** What colours say. */
  tint: Tint = "role";
  /** How old parameters are, for the colours of staleness; another object once something has changed. */
  behind: Behind = new Map();
  readonly hovered = signal(-1);
  /** A layout is under way in the worker, and why the last one failed. */
  readonly busy = signal(false);
  readonly failure = signal<ApiError | null>(null);
  /** Bumped with every new layout, so that text about it is rendered again. */
  readonly layoutVersion = signal(0);
  /** Grows when another critical path is there. */
  readonly criticalVersion = signal(0);
  layout: Layout | null = null;
  groups: readonly Group[] = [];
  critical: CriticalPath = NO_PATH;
  selected = -1;
  /** What the address says of where one looks from, until that is shown. */
  wantedView: Viewpoint | null = null;
  /** Called when one looks from elsewhere, or other modules are open. */
  onLooked: () => void = () => {};

  #camera: Camera = { x: 0, y: 0, scale: 1 };
  /** Where a drag has pulled it to, which may be a place without a box. */
  #pulled: Camera = this.#camera;
  #placed: Place = { aspect: 0, down: false };
  #fitted = true;
  /** Of the canvas that the camera was placed for: it may have another until the observer reports that. */
  #size: readonly [number, number] = [0, 0];
  #canvas: HTMLCanvasElement | null = null;
  #document: GraphDocument | null = null;
  #criticalEdges: ReadonlySet<number> = new Set();
  #criticalAt = Number.NEGATIVE_INFINITY;
  #criticalRows = -1;
  #criticalLater: ReturnType<typeof setTimeout> | undefined;
  #detach: () => void = () => {};
  /** An operator to reveal, or a group to select, as soon as there is a layout that has it. */
  #wanted: number | null = null;
  #wantedGroup: string | null = null;
  /** All is to be expanded as soon as it is known which groups there are. */
  #wantsAll = false;
  #planning = 0;
  #shares: Shares = NO_SHARES;
  #tints: { tints: Tints; layout: Layout; palette: Palette; behind: Behind } | null = null;
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
      paintWhenRestored(canvas, this.#painter),
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

  /**
   * Lay out anew for a document, a replica or a set of expanded groups; keeps the selected operator. A large graph is
   * laid out in a worker, and the layout before it stays until then.
   */
  relayout(document: GraphDocument | null): void {
    const fresh = document !== this.#document;
    this.#document = document;
    this.#planning += 1;
    if (fresh || document === null) {
      this.layout = null;
      this.groups = [];
      this.selected = -1;
      this.critical = NO_PATH;
    }
    if (document === null) {
      this.busy.value = false;
      this.#laidOut(fresh);
      return;
    }
    const place = this.#place();
    this.#placed = place;
    const request = { replica: this.replica.value, expanded: [...this.expanded.value], place };
    const plan = planGraph(document, request);
    // Until the first layout of a document is there, each request is for a first one.
    const first = fresh || this.layout === null;
    if (plan instanceof Promise) void this.#later(plan, this.#planning, first);
    else this.#adopt(plan, first);
  }

  async #later(plan: Promise<Plan>, number: number, fresh: boolean): Promise<void> {
    this.busy.value = true;
    try {
      const made = await plan;
      if (number !== this.#planning) return;
      this.#adopt(made, fresh);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (number !== this.#planning) return;
      this.busy.value = false;
      this.failure.value = error;
    }
  }

  #adopt(plan: Plan, fresh: boolean): void {
    const op = this.selectedOps()[0];
    const before = this.layout;
    this.busy.value = false;
    this.failure.value = null;
    this.groups = plan.groups;
    this.layout = plan.layout;
    if (before !== null) this.#holdInPlace(before, plan.layout);
    this.selected = op === undefined ? -1 : (plan.layout.boxOfOp[op] ?? -1);
    this.#laidOut(fresh);
    if (this.#wantsAll) this.expandAll();
  }

  /** A box that a person opens, closes or has selected stays where it is on the screen. */
  #holdInPlace(before: Layout, after: Layout): void {
    const id = this.#wantedGroup ?? before.boxes[this.selected]?.id;
    if (id === undefined) return;
    const [from, to] = [before, after].map((layout) => layout.boxes.find((box) => box.id === id));
    if (from === undefined || to === undefined) return;
    const { x, y, scale } = this.#camera;
    this.#camera = { scale, x: x + (from.x - to.x) * scale, y: y + (from.y - to.y) * scale };
  }

  #laidOut(fresh: boolean): void {
    // The path is one of operators; another layout has other edges along it.
    this.#setCritical(this.critical);
    if (fresh) {
      this.#criticalAt = Number.NEGATIVE_INFINITY;
      this.#criticalRows = -1;
    }
    this.#shares = NO_SHARES;
    this.#holdMiddle();
    if (this.#fitted || fresh) this.fit();
    else this.#lookFrom(this.#camera);
    this.layoutVersion.value += 1;
    this.repaint();
    const [wanted, group] = [this.#wanted, this.#wantedGroup];
    this.#wantedGroup = null;
    if (group !== null) this.select(this.layout?.boxes.findIndex((box) => box.id === group) ?? -1);
    if (wanted !== null && this.layout !== null) {
      this.#wanted = null;
      this.reveal(wanted);
    }
    this.#lookAsWanted();
  }

  /** Where one looks from; null: all of the graph is fitted into the canvas, or there is none yet. */
  get view(): Viewpoint | null {
    if (this.#fitted || this.layout === null || this.#canvas === null) return null;
    return viewpointOf(this.layout, this.#camera, ...this.#size);
  }

  /** Look from where the address says, once all is there that it names. */
  #lookAsWanted(): void {
    const [view, canvas] = [this.wantedView, this.#canvas];
    const isUnderWay = this.busy.value || this.#wantsAll || this.#wanted !== null;
    if (view !== null && this.layout !== null && canvas !== null && canvas.clientWidth > 0 && !isUnderWay) {
      this.wantedView = null;
      this.#moveTo(cameraAt(this.layout, view, canvas.clientWidth, canvas.clientHeight));
    }
    this.#tell();
  }

  #tell(): void {
    if (this.wantedView === null && this.#canvas !== null && this.layout !== null) this.onLooked();
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
    const path = pathTo(this.groups, op);
    if (path.length === 0 || this.#document === null || this.layout === null) {
      this.#wanted = this.layout === null ? op : null;
      return;
    }
    if (path.some((group) => !this.expanded.value.has(group.id))) {
      this.#wanted = op;
      this.setExpanded(new Set([...this.expanded.value, ...path.map((group) => group.id)]));
      return;
    }
    const box = this.layout.boxOfOp[op] ?? -1;
    if (this.layout.boxes[box]?.op == null && this.busy.value) {
      this.#wanted = op; // the layout with its operators is under way
      return;
    }
    this.select(box);
    this.#bringIntoView(this.selected);
  }

  /** Select a group's box and bring it into view. */
  showGroup(groupId: string): void {
    this.select(this.layout?.boxes.findIndex((box) => box.id === groupId) ?? -1);
    this.#bringIntoView(this.selected);
  }

  toggle(groupId: string): void {
    const next = new Set(this.expanded.value);
    if (!next.delete(groupId)) next.add(groupId);
    this.#wantedGroup = groupId;
    this.setExpanded(next);
  }

  /** Expand every group, of a graph that is still being laid out as soon as it is. */
  expandAll(): void {
    this.#wantsAll = this.layout === null;
    if (this.#wantsAll) return;
    this.#fitted = true; // all is to be seen
    this.setExpanded(new Set(everyGroup(this.groups).map((group) => group.id)));
  }

  collapseAll(): void {
    this.#wantsAll = false;
    this.#fitted = true;
    this.setExpanded(new Set());
  }

  setExpanded(ids: ReadonlySet<string>): void {
    this.expanded.value = ids;
    this.relayout(this.#document);
  }

  at(px: number, py: number): number {
    return this.layout === null ? -1 : pick(this.layout, this.#camera, px, py);
  }

  hover(box: number): void {
    if (box !== this.hovered.value) this.repaint();
    this.hovered.value = box;
  }

  /** Move by pixels. A drag is one `hold` and many moves: it gets across a place without boxes that way. */
  pan(dx: number, dy: number): void {
    this.#holdMiddle();
    const pulled = moved(this.#pulled, dx, dy);
    this.#moveTo(pulled);
    this.#pulled = pulled;
  }

  /** Begin a drag, from what is seen. */
  hold(): void {
    this.#pulled = this.#camera;
  }

  zoom(factor: number, px: number, py: number): void {
    this.#holdMiddle();
    const { x, y, scale: now } = this.#camera;
    const scale = Math.min(MAX_SCALE, Math.max(this.#leastScale(), now * factor));
    const k = scale / now;
    this.#moveTo({ scale, x: px - (px - x) * k, y: py - (py - y) * k });
  }

  /** Half of what shows everything. */
  #leastScale(): number {
    if (this.layout === null || this.#canvas === null) return MIN_SCALE;
    const fitted = fitCamera(this.layout, this.#canvas.clientWidth, this.#canvas.clientHeight);
    return Math.max(MIN_SCALE, Math.min(this.#camera.scale, fitted.scale / 2));
  }

  #moveTo(camera: Camera): void {
    this.#lookFrom(camera);
    this.#fitted = false;
    this.#tell();
    this.repaint();
  }

  #lookFrom(wished: Camera): void {
    const [w, h] = sizeOf(this.#canvas);
    this.#camera = this.layout === null ? wished : withBoxInView(this.layout, wished, w, h);
    if (w > 0) this.#size = [w, h];
    this.#pulled = this.#camera;
  }

  #place(): Place {
    const [w, h] = sizeOf(this.#canvas);
    const down = w > 0 && w < NARROW_PX;
    const aspect = h < 120 ? Number.POSITIVE_INFINITY : (w - 2 * PAD.x) / (h - PAD.top - PAD.bottom);
    return { aspect: down ? 0 : Math.round(aspect * 50) / 50, down };
  }

  fit(): void {
    if (this.layout === null || this.#canvas === null) return;
    this.#camera = fitCamera(this.layout, ...sizeOf(this.#canvas));
    this.#pulled = this.#camera;
    const needed = this.layout.down ? this.layout.height * this.#camera.scale + PAD.top + PAD_BELOW : 0;
    this.#canvas.parentElement?.style.setProperty("--graph-height", `${Math.ceil(needed)}px`);
    this.#fitted = true;
    this.#tell();
    this.repaint();
  }

  /** The nearest box from the selected one in a direction; the first box when none is selected. */
  step(dx: number, dy: number): void {
    const best = nearestBox(this.layout?.boxes ?? [], this.selected, dx, dy);
    if (best < 0) return;
    this.select(best);
    this.#bringIntoView(best);
  }

  #bringIntoView(index: number): void {
    const [box, canvas] = [this.layout?.boxes[index], this.#canvas];
    if (box === undefined || canvas === null) return;
    const { scale } = this.#camera;
    const [x, y] = [box.x * scale + this.#camera.x, box.y * scale + this.#camera.y];
    const inside = x > 0 && y > 30 && x + box.w * scale < canvas.clientWidth && y + box.h * scale < canvas.clientHeight;
    if (inside && scale > 0.5) return;
    const next = Math.max(scale, 0.8);
    this.#moveTo({
      scale: next,
      x: canvas.clientWidth / 2 - (box.x + box.w / 2) * next,
      y: canvas.clientHeight / 2 - (box.y + box.h / 2) * next,
    });
  }

  /** What is in the middle of the canvas stays there when its size changes: before moves by pixels of the new one. */
  #holdMiddle(): void {
    const [[w, h], [was, high]] = [sizeOf(this.#canvas), this.#size];
    const [dx, dy] = was > 0 && w > 0 && !this.#fitted ? [(w - was) / 2, (h - high) / 2] : [0, 0];
    [this.#camera, this.#pulled] = [moved(this.#camera, dx, dy), moved(this.#pulled, dx, dy)];
    if (w > 0) this.#size = [w, h];
  }

  #resize(): void {
    const canvas = this.#canvas;
    if (canvas === null) return;
    const ratio = devicePixelRatio || 1;
    const [w, h] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    const resized = canvas.width !== w || canvas.height !== h;
    this.#holdMiddle();
    if (resized) Object.assign(canvas, { width: w, height: h });
    const place = this.#place();
    // Another shape asks for another layout; one that a person moved about in stays until the page turns narrow or wide.
    const turned = place.down !== this.#placed.down;
    if (turned || (this.#fitted && place.aspect !== this.#placed.aspect)) this.relayout(this.#document);
    else if (this.#fitted) this.fit();
    else this.#lookFrom(this.#camera);
    this.repaint();
    // A new size clears the canvas: it is painted before anyone sees it.
    if (resized && this.layout !== null) this.#paint(performance.now());
  }

  #paint(nowMs: number): Again {
    if (!this.#urgent && nowMs - this.#paintedAt < FADE_PERIOD_MS) return "again";
    this.#urgent = false;
    this.#paintedAt = nowMs;
    const ctx = this.#canvas?.getContext("2d");
    const canvas = this.#canvas;
    if (!ctx || canvas === null || this.layout === null || this.#document === null) return "done";
    const graph = this.store.drawnRuntime.value;
    if (graph === undefined || graph.document !== this.#document) return "done";
    const fading = graph.light(nowMs);
    this.#refreshCritical(graph, nowMs);
    if (this.#shares.rows !== graph.rows) this.#shares = shares(this.layout, graph);
    const { share, maxShare } = this.#shares;
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
      used: usedBoxes(this.#document, this.layout, this.selected),
      share,
      maxShare,
      tints: this.#tintsOf(this.layout, this.#document),
      glow: glows(this.layout, graph, nowMs),
    });
    this.store.painted();
    return fading ? "again" : "done";
  }

  /** Kept until the layout, the theme or what is to be shown changes. */
  #tintsOf(layout: Layout, document: GraphDocument): Tints {
    const colours = palette();
    const kept = this.#tints;
    const stage = this.store.stage.value;
    const tint = stage === null ? this.tint : "pass";
    if (kept?.layout === layout && kept.palette === colours && kept.tints.tint === tint) {
      if (tint !== "staleness" || kept.behind === this.behind) return kept.tints;
    }
    const tints =
      stage === null
        ? tintsOf(this.tint, layout, document, colours, this.behind)
        : tintsOfPass(layout, stage.marks, colours);
    this.#tints = { tints, layout, palette: colours, behind: this.behind };
    return tints;
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
    const meansNs = new Float64Array(this.#document.ops.length);
    for (let op = 0; op < meansNs.length; op++) meansNs[op] = graph.meanNs(op);
    const path = pathThrough(this.#document, meansNs);
    if (path instanceof Promise) void this.#pathLater(path, this.#document);
    else this.#setCritical(path);
  }

  async #pathLater(path: Promise<CriticalPath>, document: GraphDocument): Promise<void> {
    try {
      const found = await path;
      if (document !== this.#document) return;
      this.#setCritical(found);
      this.repaint();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the path that is drawn stays
    }
  }

  #setCritical(path: CriticalPath): void {
    const isOther = path !== this.critical;
    this.critical = path;
    this.#criticalEdges = this.layout === null ? new Set() : edgesAlong(this.layout, path.chain);
    if (isOther) this.criticalVersion.value += 1;
  }
}
