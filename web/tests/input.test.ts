/** The data feed's lanes: what belongs to a step, from when its thread began to wait for the batch. */
import { describe, expect, test } from "vitest";
import type { Frame } from "../src/codec";
import { Column, FIRST_READER, Kind } from "../src/constants";
import { InputStore } from "../src/store/input";
import { isWait } from "../src/timeline/input";
import { buildTimeline, type Lane, type Traced } from "../src/timeline/model";
import type { GraphDocument } from "../src/types";

const [READ, BATCH, WAIT] = [0, 1, 2];
const T0 = 1_796_000_000_000_000_000n;

type Row = readonly [work: number, thread: number, begin: number, end: number];

/** Times in microseconds after T0 plus `at`. */
function frame(seq: number, at: number, ...rows: Row[]): Frame {
  const us = (of: (row: Row) => number) => Uint32Array.from(rows, (row) => of(row) * 1000);
  const columns = new Map<number, Uint8Array | Uint16Array | Uint32Array>([
    [Column.START_NS, us(([, , begin]) => begin)],
    [Column.DURATION_NS, us(([, , begin, end]) => end - begin)],
    [Column.WORK, Uint8Array.from(rows, ([work]) => work)],
    [Column.THREAD, Uint16Array.from(rows, ([, thread]) => thread)],
  ]);
  const head = { kind: Kind.INPUT_EVENTS, stream: 1, epoch: 1, seq: BigInt(seq), t0Ns: T0 + BigInt(at) * 1000n };
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

/** A step that begins `at` microseconds after T0 and takes 500. */
function traced(store: InputStore, at: number): Traced {
  const columns = { start: Uint32Array.of(0), duration: Uint32Array.of(500_000), op: Uint16Array.of(0) };
  const t0Ns = T0 + BigInt(at) * 1000n;
  const head = { stream: 1, epoch: 1, hash: "h", step: 7, t0Ns, inFull: false };
  const trace = { ...head, ...columns, thread: Uint16Array.of(0) };
  return { trace, document, name: "trainer-0", input: store.ofStep(1, t0Ns, t0Ns + 500_000n) };
}

const us = (values: Iterable<number>) => [...values].map((ns) => ns / 1000);
const shapes = (lanes: readonly Lane[]) =>
  lanes.map((lane) => [lane.key, us(lane.start), us(lane.duration), [...lane.op]]);

test("what a thread did long before a step is not the step's", () => {
  const store = new InputStore();
  store.ingest(frame(1, 0, [WAIT, 0, 0, 900], [BATCH, 0, 900, 1000]));
  expect(traced(store, 1100).input).toHaveLength(2);
  expect(traced(store, 2_000_000).input).toHaveLength(0);
});

describe("the data feed of a step", () => {
  const store = new InputStore();
  store.ingest(
    frame(
      1,
      0,
      [WAIT, 0, 100, 900], // for the step before
      [BATCH, 0, 900, 950],
      [READ, FIRST_READER, 700, 1900],
      [WAIT, 0, 1500, 1910],
      [BATCH, 0, 1910, 1990],
      [READ, FIRST_READER + 1, 2100, 2900],
      [WAIT, 0, 2600, 2700], // for the next
    ),
  );

  test("begins when its thread began to wait, and what reaches beyond it is cut", () => {
    const model = buildTimeline(document, [traced(store, 2000)]);
    expect(shapes(model.lanes)).toEqual([
      ["trainer-0.r0", [0], [400], [READ]],
      ["trainer-0.r1", [600], [400], [READ]],
      ["trainer-0.b0", [0, 410], [410, 80], [WAIT, BATCH]],
      ["trainer-0.0", [500], [500], [0]],
    ]);
    expect(us(model.lanes[0]?.whole ?? [])).toEqual([1200]);
    expect([model.waitedNs, model.stepNs, model.spanNs]).toEqual([410_000, 500_000, 1_000_000]);
  });

  test("takes no share of the threads' time", () => {
    const { shares } = buildTimeline(document, [traced(store, 2000)]);
    expect(shares).toEqual({ compute: 1, sync: 0, input: 0, idle: 0 });
  });

  test("is drawn as waiting only where a thread waits", () => {
    const lanes = buildTimeline(document, [traced(store, 2000)]).lanes;
    expect(lanes.map((lane) => [...lane.op.keys()].map((i) => isWait(lane, i)))).toEqual([
      [false],
      [false],
      [true, false],
      [false],
    ]);
  });

  test("of which nothing is known leaves the timeline as it is", () => {
    const model = buildTimeline(document, [traced(new InputStore(), 2000)]);
    expect(shapes(model.lanes)).toEqual([["trainer-0.0", [0], [500], [0]]]);
    expect(model.waitedNs).toBe(0);
  });

  test("counts a frame once, live or recorded", () => {
    expect(store.ingest(frame(1, 0, [READ, FIRST_READER, 0, 1]))).toBe(false);
    expect(store.ingest(frame(2, 0, [READ, FIRST_READER, 0, 1]))).toBe(true);
  });
});

test("a step whose batch was there begins with making it", () => {
  const store = new InputStore();
  store.ingest(frame(1, 0, [BATCH, 0, 100, 150], [BATCH, 0, 1900, 1980]));
  expect(shapes(buildTimeline(document, [traced(store, 2000)]).lanes)).toEqual([
    ["trainer-0.b0", [0], [80], [BATCH]],
    ["trainer-0.0", [100], [500], [0]],
  ]);
});
