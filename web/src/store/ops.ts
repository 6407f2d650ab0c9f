/**
 * What operators did, as far as received frames say so.
 *
 * One `GraphRuntime` for each graph document of the job. Numbers are sums since the page subscribed. `freshAt`
 * is the arrival of the last frame that named the operator, `litAt` the animation frame that first showed it:
 * nothing else ever lights an operator. Frames that arrive before their document wait in a bounded queue.
 */
import { type Frame, smallColumn, WORD, wideWords } from "../codec";
import { Column, Kind } from "../constants";
import type { GraphDocument } from "../types";
import { Durations } from "./durations";

/** A frame that waited longer than this for an animation frame no longer lights anything. */
export const FRESH_MS = 1500;
/** How long a lit operator takes to fade. */
export const DECAY_MS = 900;
/** Rows that wait for the document of their graph, some 20 MB: far more than a server sends to a page that opens. */
export const MAX_WAITING_ROWS = 1_000_000;

export class GraphRuntime {
  document: GraphDocument | null = null;
  /** Rows received, over all kinds: the graph with most of them is what the dashboard shows by default. */
  rows = 0;
  lastRowMs = 0;
  count = new Float64Array(0);
  totalNs = new Float64Array(0);
  maxNs = new Float64Array(0);
  /** Of the runs in sampled steps. */
  durations = new Durations();
  /** Nanoseconds of all operators together. */
  sumNs = 0;
  #trains: boolean | null = null;
  received = new Uint8Array(0);
  lit = new Uint8Array(0);
  freshAt = new Float64Array(0);
  litAt = new Float64Array(0);
  waiting: { readonly frame: Frame; readonly mode: "live" | "replay" }[] = [];
  #waitingRows = 0;
  /** Rows that named an operator the document does not have, or waited too long: counted as dropped. */
  lostRows = 0;

  constructor(readonly hash: string) {}

  /** Whether it trains; one without backward and update evaluates. Null while the document is not there. */
  get trains(): boolean | null {
    return this.#trains;
  }

  setDocument(document: GraphDocument): void {
    const n = document.ops.length;
    this.document = document;
    this.#trains = document.ops.some((op) => op.role === "backward" || op.role === "optimize");
    this.count = new Float64Array(n);
    this.totalNs = new Float64Array(n);
    this.maxNs = new Float64Array(n);
    this.sumNs = 0;
    this.durations = new Durations();
    this.received = new Uint8Array(n);
    this.lit = new Uint8Array(n);
    this.freshAt = new Float64Array(n).fill(Number.NEGATIVE_INFINITY);
    this.litAt = new Float64Array(n).fill(Number.NEGATIVE_INFINITY);
    const waiting = this.waiting;
    this.waiting = [];
    this.#waitingRows = 0;
    for (const { frame, mode } of waiting) this.ingest(frame, performance.now(), mode);
  }

  /** Take an OP_EVENTS or OP_SUMS frame. A replayed frame counts, but lights nothing: it did not just run. */
  ingest(frame: Frame, nowMs: number, mode: "live" | "replay"): void {
    this.rows += frame.count;
    this.lastRowMs = nowMs;
    if (this.document === null) {
      this.#wait(frame, mode);
      return;
    }
    const ops = smallColumn(frame, Column.OP);
    for (let i = 0; i < ops.length; i++) {
      const op = ops[i] ?? 0;
      if (op >= this.received.length) {
        this.lostRows += 1;
        continue;
      }
      this.received[op] = 1;
      if (mode === "live") this.freshAt[op] = nowMs;
    }
    if (frame.kind === Kind.OP_EVENTS) this.#addDurations(frame, ops);
    else this.#sum(frame, ops);
  }

  #addDurations(frame: Frame, ops: Uint16Array | Uint32Array): void {
    const spent = smallColumn(frame, Column.DURATION_NS);
    for (let i = 0; i < ops.length; i++) {
      const op = ops[i] ?? 0;
      if (op < this.received.length) this.durations.add(op, spent[i] ?? 0);
    }
  }

  #wait(frame: Frame, mode: "live" | "replay"): void {
    this.waiting.push({ frame, mode });
    this.#waitingRows += frame.count;
    while (this.#waitingRows > MAX_WAITING_ROWS && this.waiting.length > 1) {
      const rows = this.waiting.shift()?.frame.count ?? 0;
      this.#waitingRows -= rows;
      this.lostRows += rows;
    }
  }

  #sum(frame: Frame, ops: Uint16Array | Uint32Array): void {
    const counts = smallColumn(frame, Column.COUNT);
    const totals = wideWords(frame, Column.TOTAL_NS);
    const maxima = smallColumn(frame, Column.MAX_NS);
    for (let i = 0; i < counts.length; i++) {
      const op = ops[i] ?? 0;
      if (op >= this.received.length) continue;
      this.count[op] = (this.count[op] ?? 0) + (counts[i] ?? 0);
      const spent = (totals[2 * i] ?? 0) + (totals[2 * i + 1] ?? 0) * WORD;
      this.totalNs[op] = (this.totalNs[op] ?? 0) + spent;
      this.sumNs += spent;
      this.maxNs[op] = Math.max(this.maxNs[op] ?? 0, maxima[i] ?? 0);
    }
  }

  /** Note, in an animation frame that draws the graph, what is lit in it; answer whether anything still fades. */
  light(nowMs: number): boolean {
    let fading = false;
    for (let op = 0; op < this.received.length; op++) {
      const fresh = this.freshAt[op] ?? Number.NEGATIVE_INFINITY;
      if (fresh > Number.NEGATIVE_INFINITY) {
        this.freshAt[op] = Number.NEGATIVE_INFINITY;
        if (nowMs - fresh < FRESH_MS) {
          this.litAt[op] = nowMs;
          this.lit[op] = 1;
        }
      }
      if (nowMs - (this.litAt[op] ?? Number.NEGATIVE_INFINITY) < DECAY_MS) fading = true;
    }
    return fading;
  }

  /** 1 in the frame that lights the operator, 0 when it has faded. */
  glow(op: number, nowMs: number): number {
    const since = nowMs - (this.litAt[op] ?? Number.NEGATIVE_INFINITY);
    return since >= DECAY_MS ? 0 : 1 - since / DECAY_MS;
  }

  meanNs(op: number): number {
    const count = this.count[op] ?? 0;
    return count === 0 ? Number.NaN : (this.totalNs[op] ?? 0) / count;
  }
}

export interface OpSums {
  readonly total: number;
  readonly count: number;
  readonly max: number;
  /** Of all operator time of the graph; NaN before any was measured. */
  readonly share: number;
}

/** Sums over some operators. O(operators given): the total of all is kept as frames arrive. */
export function sumOf(runtime: GraphRuntime, ops: readonly number[]): OpSums {
  let [total, count, max] = [0, 0, 0];
  for (const op of ops) {
    total += runtime.totalNs[op] ?? 0;
    count += runtime.count[op] ?? 0;
    max = Math.max(max, runtime.maxNs[op] ?? 0);
  }
  return { total, count, max, share: runtime.sumNs === 0 ? Number.NaN : total / runtime.sumNs };
}

/** The `most` of `items` whose operators took longest, longest first. One pass, without a sort of all. */
export function longestOf<T>(
  runtime: GraphRuntime,
  items: Iterable<T>,
  opsOf: (item: T) => readonly number[],
  most: number,
): T[] {
  const top: { readonly item: T; readonly total: number }[] = [];
  for (const item of items) {
    let total = 0;
    for (const op of opsOf(item)) total += runtime.totalNs[op] ?? 0;
    if (top.length === most && total <= (top[most - 1]?.total ?? 0)) continue;
    const at = top.findIndex((one) => one.total < total);
    top.splice(at < 0 ? top.length : at, 0, { item, total });
    if (top.length > most) top.pop();
  }
  return top.map(({ item }) => item);
}

/** All graphs of a job, and which one each stream (replica) runs now. */
export class OpsStore {
  readonly graphs = new Map<string, GraphRuntime>();
  readonly hashOfStream = new Map<number, string>();
  /** Rows whose stream has not yet said which graph they index. */
  orphanRows = 0;

  constructor(private readonly onNewGraph: (hash: string) => void) {}

  use(stream: number, hash: string): void {
    this.hashOfStream.set(stream, hash);
    this.ensure(hash);
  }

  ensure(hash: string): GraphRuntime {
    let graph = this.graphs.get(hash);
    if (graph === undefined) {
      graph = new GraphRuntime(hash);
      this.graphs.set(hash, graph);
      this.onNewGraph(hash);
    }
    return graph;
  }

  of(stream: number): GraphRuntime | undefined {
    const hash = this.hashOfStream.get(stream);
    return hash === undefined ? undefined : this.graphs.get(hash);
  }

  ingest(frame: Frame, nowMs: number, mode: "live" | "replay"): GraphRuntime | undefined {
    const graph = this.of(frame.stream);
    if (graph === undefined) this.orphanRows += frame.count;
    graph?.ingest(frame, nowMs, mode);
    return graph;
  }

  /**
   * The graph that ran most among those that train: a short last batch does not switch it, and evaluation, which may
   * run longer, never takes its place.
   */
  busiest(): GraphRuntime | undefined {
    let best: GraphRuntime | undefined;
    // A graph whose document is on its way may train.
    const rank = (graph: GraphRuntime) => (graph.trains === null ? 1 : graph.trains ? 2 : 0);
    for (const graph of this.graphs.values()) {
      const more = best === undefined ? 1 : rank(graph) - rank(best) || graph.rows - best.rows;
      if (more > 0) best = graph;
    }
    return best;
  }

  get lostRows(): number {
    let rows = this.orphanRows;
    for (const graph of this.graphs.values()) rows += graph.lostRows;
    return rows;
  }
}
