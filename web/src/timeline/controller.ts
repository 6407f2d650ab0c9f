/**
 * The timeline behind its canvas. Shows the newest sampled step at most once a second; a zoom, a pan or "hold"
 * keeps the step that one is looking at, and says how many newer ones have come since.
 */
import { signal } from "@preact/signals";
import { type Again, addPainter, invalidate, paintWhenRestored } from "../frameloop";
import { palette } from "../palette";
import { rangeText, type Sampled, type StepRange } from "../store/history";
import type { JobStore } from "../store/job";
import type { GraphDocument } from "../types";
import { clocksOf } from "./clocks";
import {
  buildTimeline,
  EMPTY_MODEL,
  endOfTrace,
  pinnedFirst,
  shownOp,
  sliceAt,
  type TimelineModel,
  type Traced,
} from "./model";
import { AXIS_H, LANE_H, paintTimeline, TOP } from "./paint";
import type { ServerWork } from "./server";

const REFRESH_MS = 1000;

export interface Hover {
  readonly lane: number;
  readonly slice: number;
  readonly x: number;
  readonly y: number;
}

export class TimelineController {
  readonly model = signal<TimelineModel>(EMPTY_MODEL);
  readonly held = signal(false);
  readonly newer = signal(0);
  readonly hover = signal<Hover | null>(null);
  /** Two times of the step, in the order that they were set; equal while only one is. Null: nothing is measured. */
  readonly measured = signal<readonly [number, number] | null>(null);
  /** What the address shows of the chosen step, until it is there. */
  wantedSpan: readonly [number, number] | null = null;
  /** Called with what is shown of a step after a zoom or pan, null: all of it; and with the step that is held live. */
  onShown: (span: readonly [number, number] | null, heldStep: number | null) => void = () => {};
  selectedOps: ReadonlySet<number> = new Set();
  critical: ReadonlySet<number> = new Set();
  paintedSlices = 0;

  #from = 0;
  #to = 0;
  #canvas: HTMLCanvasElement | null = null;
  #detach: () => void = () => {};
  #document: GraphDocument | null = null;
  #refreshedAt = Number.NEGATIVE_INFINITY;
  #stepsAtHold = 0;
  #replayed: Sampled | null = null;
  #wanted: StepRange | null = null;
  #later: ReturnType<typeof setTimeout> | undefined;
  #painter = (): Again => this.#paint();
  #pins: readonly string[] = [];

  constructor(readonly store: JobStore) {}

  /** What is shown of the step, in nanoseconds from its left edge. */
  get shown(): readonly [number, number] {
    return [this.#from, this.#to];
  }

  get left(): number {
    return (this.#canvas?.clientWidth ?? 800) < 640 ? 100 : 164;
  }

  /** Draw on a canvas until the result is called, or another is attached: its place may be taken before it goes. */
  attach(canvas: HTMLCanvasElement): () => void {
    this.#detach();
    this.#canvas = canvas;
    const observer = new ResizeObserver(() => this.#resize());
    observer.observe(canvas.parentElement ?? canvas);
    const remove = [addPainter(this.#painter), paintWhenRestored(canvas, this.#painter)];
    this.#resize();
    const detach = () => {
      if (this.#detach !== detach) return;
      this.#detach = () => {};
      for (const one of remove) one();
      observer.disconnect();
      clearTimeout(this.#later);
      this.#later = undefined;
      this.#canvas = null;
    };
    this.#detach = detach;
    return detach;
  }

  repaint(): void {
    invalidate(this.#painter);
  }

  /** Take the newest sampled step of the shown graph, unless a step is held or the last one is too recent to read. */
  refresh(force: "force" | "gently" = "gently"): void {
    const hash = this.store.shownHash.value;
    const document = this.store.shownDocument.value;
    if (hash === null || document === null) return;
    const replayed = this.store.history.chosen.value;
    const changed = document !== this.#document || replayed !== this.#replayed;
    if (replayed !== null && !changed) return;
    if (this.held.value && !changed) {
      this.newer.value = this.store.steps.steps - this.#stepsAtHold;
      return;
    }
    const now = performance.now();
    const wait = this.#refreshedAt + REFRESH_MS - now;
    if (force === "gently" && !changed && wait > 0) {
      // The newest step must come to be shown even if no other follows it.
      this.#later ??= setTimeout(() => {
        this.#later = undefined;
        this.refresh();
      }, wait);
      return;
    }
    // More of the steps that are shown came from the recording: what one looks at stays where it is.
    const wanted = replayed === null ? null : this.store.history.wanted.value;
    const isSame = wanted !== null && this.#wanted !== null && rangeText(wanted) === rangeText(this.#wanted);
    this.#wanted = wanted;
    this.#document = document;
    this.#replayed = replayed;
    this.#refreshedAt = now;
    const before = this.model.value;
    const next = buildTimeline(document, this.#traced(), this.#pins, this.#servers());
    this.model.value = next;
    this.hover.value = null;
    const moved = isSame ? Number(before.beginNs - next.beginNs) : null;
    this.#show(next.spanNs, moved !== null && this.#isZoomed(before.spanNs) ? moved : null);
    if (replayed !== null) this.#showWanted(next.spanNs);
    const measured = this.measured.value;
    this.measured.value = moved === null || measured === null ? null : [measured[0] + moved, measured[1] + moved];
    this.#resize();
  }

  #isZoomed(spanNs: number): boolean {
    return this.#from > 0 || this.#to < spanNs;
  }

  /** Show what the address names, once. */
  #showWanted(spanNs: number): void {
    if (this.wantedSpan === null || spanNs === 0) return;
    const [from, to] = this.wantedSpan;
    this.wantedSpan = null;
    if (to <= spanNs + 1) [this.#from, this.#to] = [from, Math.min(to, spanNs)];
  }

  /** Show all, or, if the left edge lies `movedNs` earlier than before, the same part as before. */
  #show(spanNs: number, movedNs: number | null): void {
    const [from, to] = movedNs === null ? [0, spanNs] : [this.#from + movedNs, this.#to + movedNs];
    const isInside = from < spanNs && to > 0;
    this.#from = isInside ? Math.max(0, from) : 0;
    this.#to = isInside ? Math.min(spanNs, to) : spanNs;
  }

  /** The newest steps of all trainers, each with its graph; if an evaluation was chosen by hand, its own. */
  #traced(): Traced[] {
    const { ops, steps, chosenGraph, history } = this.store;
    const chosen = ops.graphs.get(chosenGraph.value ?? "");
    const trains = (hash: string) => {
      const graph = ops.graphs.get(hash);
      if (graph?.document == null) return null;
      return chosen?.trains === false ? graph === chosen : graph.trains;
    };
    const replayed = history.chosen.value?.traces;
    // A test pass may have steps of the same numbers.
    const trained = replayed?.filter((trace) => trains(trace.hash) === true) ?? [];
    const traces = trained.length > 0 ? trained : (replayed ?? steps.newest(trains));
    const clocks = clocksOf(this.store.job.value?.replicas ?? [], this.store.nodes.value);
    return [...traces].flatMap((trace) => {
      const document = ops.graphs.get(trace.hash)?.document;
      if (document == null) return [];
      const input = this.store.input.ofStep(
        trace.stream,
        trace.t0Ns,
        trace.t0Ns + BigInt(Math.ceil(endOfTrace(trace))),
      );
      const clock = clocks.get(trace.stream) ?? null;
      return [{ trace, document, name: this.#nameOf(trace.stream), clock, input }];
    });
  }

  #servers(): ServerWork[] {
    const { job, nodes, input } = this.store;
    const replicas = job.value?.replicas ?? [];
    const clocks = clocksOf(replicas, nodes.value);
    return replicas
      .filter((one) => one.role === "pserver")
      .map(({ stream }) => ({
        name: this.#nameOf(stream),
        stream,
        clock: clocks.get(stream) ?? null,
        between: (fromNs, toNs) => input.between(stream, fromNs, toNs),
        blockOf: (lane) => input.blockOf(stream, lane),
      }));
  }

  #nameOf(stream: number): string {
    const replica = this.store.job.value?.replicas.find((one) => one.stream === stream);
    return replica === undefined ? `stream ${stream}` : `${replica.role}-${replica.index}`;
  }

  /** Put lanes first, by their keys; the step that is shown stays. */
  pin(keys: readonly string[]): void {
    if (keys.join() === this.#pins.join()) return;
    this.#pins = keys;
    this.hover.value = null;
    this.model.value = pinnedFirst(this.model.value, keys);
    this.repaint();
  }

  /** The key of the lane at a height of the canvas, if the point lies on its label. */
  labelAt(px: number, py: number): string | null {
    return px >= this.left ? null : (this.model.value.lanes[Math.floor((py - TOP) / LANE_H)]?.key ?? null);
  }

  hold(on: boolean): void {
    if (on && !this.held.value) this.#stepsAtHold = this.store.steps.steps;
    this.held.value = on;
    this.newer.value = 0;
    if (!on) this.refresh("force");
    this.tell();
  }

  fit(): void {
    this.#from = 0;
    this.#to = this.model.value.spanNs;
    this.tell();
    this.repaint();
  }

  /** Say what is shown, as after a zoom. */
  tell(): void {
    const { spanNs, steps } = this.model.value;
    const isLive = this.#replayed === null;
    if (spanNs === 0) return;
    const span = this.#isZoomed(spanNs) && (!isLive || this.held.value) ? this.shown : null;
    this.onShown(span, isLive && this.held.value ? Math.max(...steps) : null);
  }

  zoom(factor: number, px = this.left + this.#width() / 2): void {
    const span = this.#to - this.#from;
    const next = Math.min(this.model.value.spanNs, Math.max(200, span / factor));
    const anchor = this.#from + ((px - this.left) / this.#width()) * span;
    this.#setRange(anchor - ((anchor - this.#from) * next) / span, next);
  }

  pan(px: number): void {
    const span = this.#to - this.#from;
    this.#setRange(this.#from - (px / this.#width()) * span, span);
  }

  #setRange(from: number, span: number): void {
    if (this.model.value.spanNs === 0) return;
    this.hold(true);
    this.#from = Math.min(Math.max(0, from), this.model.value.spanNs - span);
    this.#to = this.#from + span;
    this.tell();
    this.repaint();
  }

  point(px: number, py: number): void {
    const next = this.#at(px, py);
    const last = this.hover.value;
    if (next === null && last === null) return;
    this.hover.value = next;
    if (next?.lane !== last?.lane || next?.slice !== last?.slice) this.repaint();
  }

  leave(): void {
    if (this.hover.value === null) return;
    this.hover.value = null;
    this.repaint();
  }

  /** Move the marked slice along its lane or to another lane; how the keyboard reads a timeline. */
  stepSlice(along: number, across: number): void {
    const { lanes } = this.model.value;
    const now = this.hover.value ?? { lane: 0, slice: -1, x: 0, y: 0 };
    const laneIndex = Math.min(lanes.length - 1, Math.max(0, now.lane + across));
    const lane = lanes[laneIndex];
    if (lane === undefined) return;
    const wanted = across === 0 ? now.slice + along : Math.min(now.slice, lane.start.length - 1);
    const slice = Math.min(lane.start.length - 1, Math.max(0, wanted));
    const at = ((lane.start[slice] ?? 0) - this.#from) / (this.#to - this.#from);
    this.hold(true);
    this.hover.value = {
      lane: laneIndex,
      slice,
      x: this.left + at * this.#width(),
      y: TOP + laneIndex * LANE_H + LANE_H,
    };
    this.repaint();
  }

  /** Measure from one point of the canvas to another. */
  measure(fromPx: number, toPx: number): void {
    this.hold(true);
    this.measured.value = [this.#timeAt(fromPx), this.#timeAt(toPx)];
    this.repaint();
  }

  /** m: the first time sets the beginning of the marked slice, the second the end of the one that is marked then. */
  mark(): void {
    const hover = this.hover.value;
    const lane = hover === null ? undefined : this.model.value.lanes[hover.lane];
    const before = this.measured.value;
    if (hover === null || lane === undefined) {
      this.measured.value = null;
    } else {
      const start = lane.start[hover.slice] ?? 0;
      const end = start + (lane.duration[hover.slice] ?? 0);
      this.hold(true);
      this.measured.value = before !== null && before[0] === before[1] ? [before[0], end] : [start, start];
    }
    this.repaint();
  }

  #timeAt(px: number): number {
    const at = this.#from + ((px - this.left) / this.#width()) * (this.#to - this.#from);
    return Math.min(this.model.value.spanNs, Math.max(0, at));
  }

  opAt(hover: Hover | null): number {
    const lane = hover === null ? undefined : this.model.value.lanes[hover.lane];
    return hover === null || lane === undefined ? -1 : shownOp(lane, hover.slice);
  }

  #at(px: number, py: number): Hover | null {
    const index = Math.floor((py - TOP) / LANE_H);
    const lane = this.model.value.lanes[index];
    if (lane === undefined || px < this.left) return null;
    const perPixel = (this.#to - this.#from) / this.#width();
    const slice = sliceAt(lane, this.#from + (px - this.left) * perPixel, perPixel);
    return slice < 0 ? null : { lane: index, slice, x: px, y: py };
  }

  #width(): number {
    return Math.max(1, (this.#canvas?.clientWidth ?? 800) - this.left - 8);
  }

  /** Setting a canvas's size clears it, so it is set only when it changed, and painted before anyone sees it. */
  #resize(): void {
    const canvas = this.#canvas;
    if (canvas === null) return;
    const ratio = devicePixelRatio || 1;
    const height = TOP + Math.max(2, this.model.value.lanes.length) * LANE_H + AXIS_H;
    canvas.style.height = `${height}px`;
    const [w, h] = [Math.round(canvas.clientWidth * ratio), Math.round(height * ratio)];
    if (canvas.width === w && canvas.height === h) {
      this.repaint();
      return;
    }
    canvas.width = w;
    canvas.height = h;
    if (this.model.value.numSlices > 0) this.#paint();
    else this.repaint();
  }

  #paint(): Again {
    const ctx = this.#canvas?.getContext("2d");
    const canvas = this.#canvas;
    if (!ctx || canvas === null || this.#document === null || this.#to <= this.#from) return "done";
    const ratio = devicePixelRatio || 1;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.paintedSlices = paintTimeline(ctx, canvas.clientWidth - 8, canvas.clientHeight, {
      model: this.model.value,
      palette: palette(),
      from: this.#from,
      to: this.#to,
      left: this.left,
      selectedOps: this.selectedOps,
      critical: this.critical,
      hover: this.hover.value,
      measured: this.measured.value,
    });
    return "done";
  }
}
