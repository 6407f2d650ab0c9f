/** A sampled step as lanes of slices, and what share of it was computing, exchanging, feeding or idle. Pure. */
import { BUCKETS, type Bucket, bucketCodes } from "../graph/group";
import type { InputEvent } from "../store/input";
import type { StepTrace } from "../store/steps";
import type { GraphDocument, GraphOp } from "../types";
import type { NodeClock } from "./clocks";
import { inputLanes, isInput, waitedNs } from "./input";
import { isServer, type ServerWork, serverLanes } from "./server";

export interface Lane {
  readonly label: string;
  /** What names it in the address. */
  readonly key: string;
  readonly pinned: boolean;
  /** Among all lanes, before any was pinned. */
  readonly place: number;
  readonly stream: number;
  readonly thread: number;
  /** Nanoseconds from the left edge, ascending. */
  readonly start: Float64Array;
  readonly duration: Float64Array;
  /** Operators of `document`. */
  readonly op: Int32Array;
  readonly document: GraphDocument;
  /** Each operator of `document` in the graph that is shown, by name; -1 where it has none. Null: it is that graph. */
  readonly shown: Int32Array | null;
  /** Where slices are cut at the edges: how long they were. */
  readonly whole?: Float64Array;
}

export interface TimelineModel {
  readonly lanes: readonly Lane[];
  /** Unix time of the left edge, by the server's clock where nodes' clocks are known. */
  readonly beginNs: bigint;
  readonly spanNs: number;
  /** From the first operator to the end of the last: without the wait for data before it. */
  readonly stepNs: number;
  /** How long training waited for the step's data before it began; 0 if that is not known. */
  readonly waitedNs: number;
  /** Step of each stream, ascending and without repetition; more than one when trainers sampled different steps. */
  readonly steps: readonly number[];
  readonly shares: Readonly<Record<"compute" | "sync" | "input" | "idle", number>>;
  readonly numSlices: number;
  /** Of a while in which every step was recorded. */
  readonly inFull: boolean;
  /** The clocks of the nodes that the processes run on, by which their events were moved. */
  readonly clocks: readonly NodeClock[];
}

export const EMPTY_MODEL: TimelineModel = {
  lanes: [],
  beginNs: 0n,
  spanNs: 0,
  stepNs: 0,
  waitedNs: 0,
  steps: [],
  shares: { compute: 0, sync: 0, input: 0, idle: 0 },
  numSlices: 0,
  inFull: false,
  clocks: [],
};

/** A step of one process, and the graph that it ran. */
export interface Traced {
  readonly trace: StepTrace;
  readonly document: GraphDocument;
  readonly name: string;
  /** Of its node; null if that is not known. */
  readonly clock?: NodeClock | null;
  /** Of the data feed, in nanoseconds from the step's begin. */
  readonly input?: readonly InputEvent[];
}

/** Whether the lane is one of an executor's threads. */
export const isExecutor = (lane: Lane): boolean => !isInput(lane) && !isServer(lane);

/**
 * `shown`: the graph on the page, which selections are of. `pins`: keys of the lanes that stand first. `servers`: what
 * they did meanwhile; where trainers sampled different steps, during that of the first of them.
 */
export function buildTimeline(
  shown: GraphDocument,
  given: readonly Traced[],
  pins: readonly string[] = [],
  servers: readonly ServerWork[] = [],
): TimelineModel {
  if (given.length === 0) return EMPTY_MODEL;
  const traced = given.map(onOneClock);
  const traces = traced.map(({ trace }) => trace);
  const steps = [...new Set(traces.map((trace) => trace.step))].sort((a, b) => a - b);
  // Trainers that sampled the same step share a clock axis; different steps are each drawn from their own start.
  const origin = traces.reduce((least, trace) => (trace.t0Ns < least ? trace.t0Ns : least), traces[0]?.t0Ns ?? 0n);
  const own = traced.flatMap((one) => {
    const shiftNs = steps.length === 1 ? Number(one.trace.t0Ns - origin) : 0;
    const { name, trace, input = [] } = one;
    const feed = inputLanes({ name, stream: trace.stream, shiftNs, endNs: endOfTrace(trace) }, input);
    return [...feed, ...lanesOf(one, shiftNs, shownBy(one.document, shown))];
  });
  const anchor = steps.length === 1 ? null : (traces[0] ?? null);
  const within = anchor === null ? edgesOf(own) : { from: 0, to: endOfTrace(anchor) };
  const others = serverLanes(servers, { originNs: anchor?.t0Ns ?? origin, ...within });
  const lanes = [...own, ...others].map((lane, place) => ({ ...lane, place }));
  const first = lanes.reduce((least, lane) => Math.min(least, lane.start[0] ?? least), Number.POSITIVE_INFINITY);
  for (const lane of lanes) {
    for (let i = 0; i < lane.start.length; i++) lane.start[i] = (lane.start[i] ?? 0) - first;
  }
  const spanNs = lanes.reduce((most, lane) => Math.max(most, endOf(lane)), 0);
  const executor = lanes.filter(isExecutor);
  const stepNs = stepSpan(executor);
  const model = {
    lanes,
    beginNs: origin + BigInt(Number.isFinite(first) ? Math.round(first) : 0),
    spanNs,
    stepNs,
    waitedNs: waitedNs(lanes),
    steps,
    shares: sharesOf(executor, stepNs),
    numSlices: lanes.reduce((sum, lane) => sum + lane.start.length, 0),
    inFull: traces.some((trace) => trace.inFull),
    clocks: clocksOf([...traced, ...servers.filter(({ stream }) => others.some((lane) => lane.stream === stream))]),
  };
  return pinnedFirst(model, pins);
}

const clocksOf = (of: readonly { readonly clock?: NodeClock | null }[]): NodeClock[] => [
  ...new Map(of.flatMap(({ clock }) => (clock == null ? [] : [[clock.node, clock] as const]))).values(),
];

function edgesOf(lanes: readonly Lane[]): { from: number; to: number } {
  const from = lanes.reduce((least, lane) => Math.min(least, lane.start[0] ?? least), Number.POSITIVE_INFINITY);
  return Number.isFinite(from) ? { from, to: Math.max(...lanes.map(endOf)) } : { from: 0, to: 0 };
}

/** The events of a process by the server's clock. */
function onOneClock(one: Traced): Traced {
  if (one.clock == null) return one;
  return { ...one, trace: { ...one.trace, t0Ns: one.trace.t0Ns - BigInt(Math.round(one.clock.offsetMs * 1e6)) } };
}

/** Pinned lanes in the order of their pins, then the others by process and thread. */
export function pinnedFirst(model: TimelineModel, pins: readonly string[]): TimelineModel {
  const rank = (lane: Lane) => (pins.includes(lane.key) ? pins.indexOf(lane.key) : pins.length);
  const lanes = model.lanes
    .map((lane) => ({ ...lane, pinned: pins.includes(lane.key) }))
    .sort((a, b) => rank(a) - rank(b) || a.place - b.place);
  return { ...model, lanes };
}

const nameIn = (op: GraphOp): string => `${op.name} ${op.replica}`;

/** Operators of one graph in another, by name and replica: trainers of one job may have graphs that differ a little. */
function shownBy(document: GraphDocument, shown: GraphDocument): Int32Array | null {
  if (document === shown) return null;
  const at = new Map(shown.ops.map((op, index) => [nameIn(op), index]));
  return Int32Array.from(document.ops, (op) => at.get(nameIn(op)) ?? -1);
}

function lanesOf({ trace, document, name }: Traced, shiftNs: number, shown: Int32Array | null): Lane[] {
  return rowsByThread(trace).map(([thread, rows]) => {
    const [start, duration] = [new Float64Array(rows.length), new Float64Array(rows.length)];
    const op = new Int32Array(rows.length);
    for (let at = 0; at < rows.length; at++) {
      const row = rows[at] ?? 0;
      start[at] = (trace.start[row] ?? 0) + shiftNs;
      duration[at] = trace.duration[row] ?? 0;
      op[at] = trace.op[row] ?? 0;
    }
    const [label, key] = [`${name} · thread ${thread}`, `${name}.${thread}`];
    return { label, key, pinned: false, place: 0, stream: trace.stream, thread, start, duration, op, document, shown };
  });
}

/** Rows of each thread in the order of time, which most frames have already. */
function rowsByThread(trace: StepTrace): [number, number[]][] {
  const found = new Map<number, number[]>();
  const unordered = new Set<number[]>();
  for (let row = 0; row < trace.op.length; row++) {
    const thread = trace.thread[row] ?? 0;
    let rows = found.get(thread);
    if (rows === undefined) {
      rows = [];
      found.set(thread, rows);
    }
    const before = rows[rows.length - 1];
    if (before !== undefined && (trace.start[before] ?? 0) > (trace.start[row] ?? 0)) unordered.add(rows);
    rows.push(row);
  }
  for (const rows of unordered) rows.sort((a, b) => (trace.start[a] ?? 0) - (trace.start[b] ?? 0));
  return [...found].sort((a, b) => a[0] - b[0]);
}

/** When a trace ends, from its own begin. */
export function endOfTrace({ start, duration }: StepTrace): number {
  let end = 0;
  for (let i = 0; i < start.length; i++) end = Math.max(end, (start[i] ?? 0) + (duration[i] ?? 0));
  return end;
}

function endOf(lane: Lane): number {
  let end = 0;
  for (let i = 0; i < lane.start.length; i++) end = Math.max(end, (lane.start[i] ?? 0) + (lane.duration[i] ?? 0));
  return end;
}

const PART: Readonly<Record<Bucket, "compute" | "sync" | "input">> = {
  forward: "compute",
  backward: "compute",
  optimize: "compute",
  communication: "sync",
  input: "input",
};

function stepSpan(lanes: readonly Lane[]): number {
  if (lanes.length === 0) return 0;
  return Math.max(...lanes.map(endOf)) - Math.min(...lanes.map((lane) => lane.start[0] ?? 0));
}

function sharesOf(lanes: readonly Lane[], spanNs: number): TimelineModel["shares"] {
  const sums = { compute: 0, sync: 0, input: 0 };
  for (const lane of lanes) {
    const codes = bucketCodes(lane.document);
    for (let i = 0; i < lane.op.length; i++) {
      const bucket = BUCKETS[codes[lane.op[i] ?? -1] ?? -1];
      if (bucket !== undefined) sums[PART[bucket]] += lane.duration[i] ?? 0;
    }
  }
  const all = Math.max(1, spanNs * lanes.length);
  const busy = sums.compute + sums.sync + sums.input;
  return {
    compute: sums.compute / all,
    sync: sums.sync / all,
    input: sums.input / all,
    idle: Math.max(0, 1 - busy / all),
  };
}

/** The operator of a slice in the graph that is shown; -1 if that has none. */
export const shownOp = (lane: Lane, slice: number): number => {
  const op = lane.op[slice] ?? -1;
  return lane.shown === null ? op : (lane.shown[op] ?? -1);
};

/** A slice of a lane. */
export interface LongSlice {
  readonly lane: Lane;
  readonly index: number;
}

/** The `most` slices that took longest, longest first, without an object for each of all. */
export function longestSlices(model: TimelineModel, most: number): LongSlice[] {
  const durations = new Float64Array(model.numSlices);
  let at = 0;
  for (const lane of model.lanes) {
    durations.set(lane.duration, at);
    at += lane.duration.length;
  }
  durations.sort();
  const least = durations[Math.max(0, durations.length - most)] ?? 0;
  const found: LongSlice[] = [];
  for (const lane of model.lanes) {
    for (let index = 0; index < lane.duration.length; index++) {
      if ((lane.duration[index] ?? 0) >= least) found.push({ lane, index });
    }
  }
  const ns = ({ lane, index }: LongSlice) => lane.duration[index] ?? 0;
  return found.sort((a, b) => ns(b) - ns(a)).slice(0, most);
}

/** Index of the slice of `lane` at time `at`, -1 for none. */
export function sliceAt(lane: Lane, at: number, slackNs: number): number {
  let low = 0;
  let high = lane.start.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if ((lane.start[middle] ?? 0) <= at + slackNs) low = middle + 1;
    else high = middle - 1;
  }
  const end = (lane.start[high] ?? 0) + (lane.duration[high] ?? 0);
  return high >= 0 && end + slackNs >= at ? high : -1;
}
