/** Lanes of parameter servers: what they did while the trainers ran a step, on one clock. */
import { describe, expect, test } from "vitest";
import type { Frame } from "../src/codec";
import { Column, FIRST_BLOCK, Kind, ROUNDS_LANE } from "../src/constants";
import { InputStore } from "../src/store/input";
import { buildTimeline, isExecutor, type Lane, type Traced } from "../src/timeline/model";
import { isRound, isServer, type ServerWork } from "../src/timeline/server";
import type { GraphDocument } from "../src/types";

const [RECEIVE, ROUND, UPDATE, LOOK_UP, ANSWER] = [3, 4, 7, 8, 9];
const T0 = 1_796_000_000_000_000_000n;
type Row = readonly [work: number, thread: number, begin: number, end: number];

/** Work of stream 9; times in microseconds after T0 + 1 ms. */
function frame(...rows: Row[]): Frame {
  const us = (of: (row: Row) => number) => Uint32Array.from(rows, (row) => of(row) * 1000);
  const columns = new Map<number, Uint8Array | Uint16Array | Uint32Array>([
    [Column.START_NS, us(([, , begin]) => begin + 1000)],
    [Column.DURATION_NS, us(([, , begin, end]) => end - begin)],
    [Column.WORK, Uint8Array.from(rows, ([work]) => work)],
    [Column.THREAD, Uint16Array.from(rows, ([, thread]) => thread)],
  ]);
  const head = { kind: Kind.INPUT_EVENTS, stream: 9, epoch: 1, seq: 1n, t0Ns: T0 };
  return { ...head, count: rows.length, columns } as unknown as Frame;
}

const op = { name: "fc", role: "forward", replica: 0, bytes: 0, flops: 0, type: "t", kind: "computation", module: "" };
const document = {
  version: 1,
  program: "p",
  mode: "local",
  num_replicas: 1,
  num_threads: 1,
  batch: [1],
  ops: [{ ...op, source: "", inputs: [], outputs: [] }],
  edges: [],
  syncs: [],
} as GraphDocument;

/** A step of a trainer from T0 + 1 ms + `at`, of 500 us. */
function traced(stream: number, step: number, at: number): Traced {
  const columns = { start: Uint32Array.of(0), duration: Uint32Array.of(500_000), op: Uint16Array.of(0) };
  const head = { stream, epoch: 1, hash: "h", step, t0Ns: T0 + BigInt(1_000_000 + at * 1000), inFull: false };
  return { trace: { ...head, ...columns, thread: Uint16Array.of(0) }, document, name: `trainer-${stream}` };
}

function server(store: InputStore, offsetMs: number | null = null): ServerWork {
  const clock = offsetMs === null ? null : { node: "b", offsetMs, errorMs: 0.1 };
  return {
    name: "pserver-0",
    stream: 9,
    clock,
    between: (from, to) => store.between(9, from, to),
    blockOf: (lane) => store.blockOf(9, lane),
  };
}

function workOf(...rows: Row[]): InputStore {
  const store = new InputStore();
  store.ingest(frame(...rows));
  return store;
}

const us = (values: Iterable<number>) => [...values].map((ns) => ns / 1000);
const shapes = (lanes: readonly Lane[]) =>
  lanes.filter(isServer).map((lane) => [lane.label, us(lane.start), us(lane.duration)]);

describe("a step of two trainers", () => {
  const rows: Row[] = [
    [RECEIVE, 0, 100, 120],
    [ROUND, 0, 120, 300],
    [RECEIVE, 1, 250, 280],
    [UPDATE, ROUNDS_LANE, 280, 295],
    [ANSWER, 0, 300, 310],
    [LOOK_UP, FIRST_BLOCK + 2, 20, 30],
  ];

  test("has lanes of each trainer's requests, the updates and the blocks", () => {
    const store = workOf(...rows);
    store.nameBlocks({ ...frame(), body: { lanes: { [FIRST_BLOCK + 2]: "embedding" } } } as Frame);
    const { lanes } = buildTimeline(document, [traced(1, 7, 0), traced(2, 7, 50)], [], [server(store)]);
    expect(shapes(lanes)).toEqual([
      ["pserver-0 · trainer 0", [100, 120, 300], [20, 180, 10]],
      ["pserver-0 · trainer 1", [250], [30]],
      ["pserver-0 · updates", [280], [15]],
      ["pserver-0 · embedding", [20], [10]],
    ]);
    expect(lanes.filter(isExecutor)).toHaveLength(2);
    const [trainer] = lanes.filter(isServer);
    expect(trainer !== undefined && [0, 1, 2].map((slice) => isRound(trainer, slice))).toEqual([false, true, false]);
  });

  test("does not count the servers' work as the threads'", () => {
    const without = buildTimeline(document, [traced(1, 7, 0)]);
    const model = buildTimeline(document, [traced(1, 7, 0)], [], [server(workOf(...rows))]);
    expect(model.shares).toEqual(without.shares);
    expect([model.spanNs, model.stepNs]).toEqual([without.spanNs, without.stepNs]);
  });

  test("moves the servers onto one clock, which is named", () => {
    const model = buildTimeline(
      document,
      [traced(1, 7, 0)],
      [],
      [server(workOf([UPDATE, ROUNDS_LANE, 280, 295]), 0.2)],
    );
    expect(shapes(model.lanes)).toEqual([["pserver-0 · updates", [80], [15]]]);
    expect(model.clocks).toEqual([{ node: "b", offsetMs: 0.2, errorMs: 0.1 }]);
  });
});

test("what began before the step, or goes on after it, is cut at its edges", () => {
  const store = workOf([ROUND, 0, -50, 30], [ANSWER, 0, 480, 700], [RECEIVE, 0, 900, 910]);
  const [lane] = buildTimeline(document, [traced(1, 7, 0)], [], [server(store)]).lanes.filter(isServer);
  expect(lane && [us(lane.start), us(lane.duration), us(lane.whole ?? [])]).toEqual([
    [0, 480],
    [30, 20],
    [80, 220],
  ]);
});

test("requests of one trainer that are worked on at once stand below each other", () => {
  const store = workOf([LOOK_UP, 0, 100, 200], [LOOK_UP, 0, 150, 250], [ANSWER, 0, 210, 220]);
  const { lanes } = buildTimeline(document, [traced(1, 7, 0)], [], [server(store)]);
  expect(shapes(lanes)).toEqual([
    ["pserver-0 · trainer 0", [100, 210], [100, 10]],
    ["pserver-0 · trainer 0 (2)", [150], [100]],
  ]);
});

test("of steps that differ the servers are shown during the first trainer's", () => {
  const store = workOf([UPDATE, ROUNDS_LANE, 280, 295], [UPDATE, ROUNDS_LANE, 9280, 9290]);
  const { lanes } = buildTimeline(document, [traced(1, 7, 0), traced(2, 8, 9000)], [], [server(store)]);
  expect(shapes(lanes)).toEqual([["pserver-0 · updates", [280], [15]]]);
});
