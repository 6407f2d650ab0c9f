/** Lanes of parameter servers: each trainer's requests, the updates, and blocks that are looked up or updated. Pure. */
import { FIRST_BLOCK, ROUNDS_LANE } from "../constants";
import type { InputEvent } from "../store/input";
import type { GraphDocument, GraphOp } from "../types";
import type { NodeClock } from "./clocks";
import type { Lane } from "./model";

/** What one server did. */
export interface ServerWork {
  readonly name: string;
  readonly stream: number;
  /** Of its node; null if that is not known. */
  readonly clock: NodeClock | null;
  /** Between two times of its own clock, in nanoseconds from the first of them. */
  readonly between: (fromNs: bigint, toNs: bigint) => readonly InputEvent[];
  /** The block of a lane, if that is known. */
  readonly blockOf: (lane: number) => string | undefined;
}

/** What is shown, in nanoseconds from the left edge's zero, which lies at `originNs`. */
export interface Window {
  readonly originNs: bigint;
  readonly from: number;
  readonly to: number;
}

/** WORK of a server's events begins there; the rest is the data feed's. */
const FIRST_WORK = 3;
const ROUND = 4;
const WORKS = [
  ["receive", "communication"],
  ["wait for the round", "communication"],
  ["merge", "communication"],
  ["log", "communication"],
  ["update", "optimize"],
  ["look up", "forward"],
  ["answer", "communication"],
] as const;
/** Requests of a trainer that are worked on at once: more of them share the last lane. */
const MOST_AT_ONCE = 8;

function operator([name, role]: (typeof WORKS)[number]): GraphOp {
  const facts = { replica: -1, module: "", source: "", inputs: [], outputs: [], bytes: 0, flops: 0 };
  return { name, type: `server.${name}`, kind: "computation", role, ...facts };
}

const SERVER: GraphDocument = {
  version: 1,
  program: "server",
  mode: "local",
  num_replicas: 1,
  num_threads: 1,
  batch: [],
  ops: WORKS.map(operator),
  edges: [],
  syncs: [],
};
const NOT_SHOWN = Int32Array.from(WORKS, () => -1);

/** Whether a lane is of a parameter server. */
export const isServer = (lane: Lane): boolean => lane.document === SERVER;

/** Whether nothing is done in a slice: a trainer's step waits for those of others. */
export const isRound = (lane: Lane, slice: number): boolean => isServer(lane) && lane.op[slice] === ROUND - FIRST_WORK;

/** The lanes of what the servers did within a window, which cuts what began before it or goes on after it. */
export function serverLanes(servers: readonly ServerWork[], window: Window): Lane[] {
  return servers.flatMap((server) => {
    const movedNs = BigInt(Math.round((server.clock?.offsetMs ?? 0) * 1e6));
    const begin = window.originNs + movedNs + BigInt(Math.floor(window.from));
    const events = server
      .between(begin, begin + BigInt(Math.ceil(window.to - window.from)))
      .filter((one) => one.work >= FIRST_WORK && one.work < FIRST_WORK + WORKS.length);
    const threads = [...new Set(events.map((one) => one.thread))].sort((a, b) => a - b);
    return threads.flatMap((thread) => {
      const rows = besideEachOther(events.filter((one) => one.thread === thread));
      return rows.map((row, at) => laneOf(server, thread, at, row, window));
    });
  });
}

/** Events of one thread, in as few rows as none of them overlaps another in. */
function besideEachOther(events: readonly InputEvent[]): InputEvent[][] {
  const rows: InputEvent[][] = [];
  for (const one of events) {
    const free = rows.findIndex((row) => (row.at(-1)?.end ?? 0) <= one.start);
    const at = free >= 0 ? free : Math.min(rows.length, MOST_AT_ONCE - 1);
    rows[at] = [...(rows[at] ?? []), one];
  }
  return rows;
}

function laneOf(server: ServerWork, thread: number, at: number, events: InputEvent[], window: Window): Lane {
  const most = window.to - window.from;
  const starts = events.map((one) => Math.max(0, one.start));
  const { label, key } = namesOf(server, thread);
  return {
    label: `${server.name} · ${label}${at === 0 ? "" : ` (${at + 1})`}`,
    key: `${server.name}.${key}${at === 0 ? "" : `.${at + 1}`}`,
    pinned: false,
    place: 0,
    stream: server.stream,
    thread,
    start: Float64Array.from(starts, (start) => start + window.from),
    duration: Float64Array.from(events, (one, i) => Math.max(0, Math.min(most, one.end) - (starts[i] ?? 0))),
    op: Int32Array.from(events, (one) => one.work - FIRST_WORK),
    document: SERVER,
    shown: NOT_SHOWN,
    whole: Float64Array.from(events, (one) => one.end - one.start),
  };
}

function namesOf(server: ServerWork, thread: number): { label: string; key: string } {
  if (thread === ROUNDS_LANE) return { label: "updates", key: "u" };
  if (thread < ROUNDS_LANE) return { label: `trainer ${thread}`, key: `t${thread}` };
  const block = thread - FIRST_BLOCK;
  return { label: server.blockOf(thread) ?? `block ${block}`, key: `b${block}` };
}
