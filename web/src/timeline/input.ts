/** Lanes of the data feed: its readers, and what the threads that train do for their batches. Pure. */
import { FIRST_READER } from "../constants";
import { type InputEvent, isReader } from "../store/input";
import type { GraphDocument, GraphOp } from "../types";
import type { Lane } from "./model";

/** By WORK, as a graph whose operators these are: lanes of the feed are drawn and listed as any other. */
const NAMES = ["read a batch", "make tensors", "wait for a batch"];
const WAIT = 2;
const TYPES = ["input.read", "input.batch", "input.wait"];

function operator(name: string, at: number): GraphOp {
  const facts = { replica: -1, module: "", source: "", inputs: [], outputs: [], bytes: 0, flops: 0 };
  return { name, type: TYPES[at] ?? "", kind: "feed", role: "input", ...facts };
}

const INPUT: GraphDocument = {
  version: 1,
  program: "input",
  mode: "local",
  num_replicas: 1,
  num_threads: 1,
  batch: [],
  ops: NAMES.map(operator),
  edges: [],
  syncs: [],
};
const NOT_SHOWN = Int32Array.from(NAMES, () => -1);

/** Whether a lane is of the data feed. */
export const isInput = (lane: Lane): boolean => lane.document === INPUT;

/** Whether nothing is done in a slice: a thread that trains waits for a batch. */
export const isWait = (lane: Lane, slice: number): boolean => isInput(lane) && lane.op[slice] === WAIT;

/**
 * One lane for each thread. `events`: in nanoseconds from the step's begin, by their start. What began before the
 * first wait, or ends after `endNs`, is cut there.
 */
export function inputLanes(
  { name, stream, shiftNs, endNs }: { name: string; stream: number; shiftNs: number; endNs: number },
  events: readonly InputEvent[],
): Lane[] {
  const begin = events.reduce((least, one) => (isReader(one.thread) ? least : Math.min(least, one.start)), 0);
  const threads = [...new Set(events.map((one) => one.thread))].sort(readersFirst);
  return threads.map((thread) => {
    const mine = events.filter((one) => one.thread === thread);
    const starts = mine.map((one) => Math.max(begin, one.start));
    return {
      ...namesOf(name, thread),
      pinned: false,
      place: 0,
      stream,
      thread,
      start: Float64Array.from(starts, (start) => start + shiftNs),
      duration: Float64Array.from(mine, (one, i) => Math.min(endNs, one.end) - (starts[i] ?? 0)),
      op: Int32Array.from(mine, (one) => Math.min(one.work, NAMES.length - 1)),
      document: INPUT,
      shown: NOT_SHOWN,
      whole: Float64Array.from(mine, (one) => one.end - one.start),
    };
  });
}

const readersFirst = (a: number, b: number): number => Number(isReader(b)) - Number(isReader(a)) || a - b;

function namesOf(name: string, thread: number): { label: string; key: string } {
  if (isReader(thread)) {
    const reader = thread - FIRST_READER;
    return { label: `${name} · reader ${reader}`, key: `${name}.r${reader}` };
  }
  return { label: `${name} · batches${thread === 0 ? "" : ` ${thread}`}`, key: `${name}.b${thread}` };
}

/** How long threads that train waited for batches, in the mean of those that did; 0 if none is known to have. */
export function waitedNs(lanes: readonly Lane[]): number {
  const sums = lanes
    .filter(isInput)
    .map((lane) => lane.duration.reduce((sum, ns, i) => sum + (isWait(lane, i) ? ns : 0), 0))
    .filter((ns) => ns > 0);
  return sums.length === 0 ? 0 : sums.reduce((sum, ns) => sum + ns, 0) / sums.length;
}
