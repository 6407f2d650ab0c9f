/** What the page makes of what arrives: operators, sync, steps, series, logs. */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { type ColumnArray, decodeFrame, type Frame } from "../src/codec";
import { Column, FLAG_WHOLE_STEP, Kind } from "../src/constants";
import { axisLabel, niceStep } from "../src/format";
import { LogStore, ReplicaLog } from "../src/store/logs";
import { DECAY_MS, FRESH_MS, GraphRuntime, OpsStore } from "../src/store/ops";
import { Series, SeriesStore } from "../src/store/series";
import { endOfFrameMs, StepStore } from "../src/store/steps";
import { SyncStore, WINDOW_MS } from "../src/store/sync";
import { buildTimeline, shownOp, sliceAt } from "../src/timeline/model";
import type { GraphDocument } from "../src/types";

function frame(kind: Frame["kind"], columns: [Column, ColumnArray][], more: Partial<Frame> = {}): Frame {
  const count = columns[0]?.[1].length ?? 0;
  return {
    kind,
    flags: 0,
    numColumns: columns.length,
    stream: 1,
    epoch: 1,
    seq: 0n,
    t0Ns: 0n,
    step: 1,
    count,
    bodyBytes: 0,
    columns: new Map(columns),
    body: undefined,
    ...more,
  };
}

function sums(ops: number[], totalNs = 1000): Frame {
  return frame(Kind.OP_SUMS, [
    [Column.OP, Uint16Array.from(ops)],
    [Column.COUNT, Uint32Array.from(ops, () => 2)],
    [Column.TOTAL_NS, BigUint64Array.from(ops, () => BigInt(totalNs))],
    [Column.MAX_NS, Uint32Array.from(ops, () => 700)],
  ]);
}

function events(
  rows: [start: number, duration: number, op: number, thread: number][],
  more: Partial<Frame> = {},
): Frame {
  const column = (i: 0 | 1 | 2 | 3) => rows.map((row) => row[i]);
  return frame(
    Kind.OP_EVENTS,
    [
      [Column.START_NS, Uint32Array.from(column(0))],
      [Column.DURATION_NS, Uint32Array.from(column(1))],
      [Column.OP, Uint16Array.from(column(2))],
      [Column.THREAD, Uint16Array.from(column(3))],
    ],
    { flags: FLAG_WHOLE_STEP, ...more },
  );
}

const roles = ["forward", "backward", "communication", "input"] as const;
const document: GraphDocument = {
  version: 1,
  program: "p",
  mode: "reduce",
  num_replicas: 1,
  num_threads: 2,
  batch: [1],
  ops: roles.map((role, i) => ({
    name: `op_${i}`,
    type: "aten.mm.default",
    kind: "computation" as const,
    role,
    replica: 0,
    module: "m",
    source: "",
    inputs: [],
    outputs: [],
    bytes: 0,
    flops: 0,
  })),
  edges: [],
  syncs: [
    { parameter: "w", gradient: "dw", mode: "reduce", owner: 0, bytes: 400, sparse: false, ops: [2] },
    { parameter: "e", gradient: "de", mode: "reduce", owner: 0, bytes: 0, sparse: true, ops: [2] },
  ],
};

function runtime(): GraphRuntime {
  const graph = new GraphRuntime("h");
  graph.setDocument(document);
  return graph;
}

const lit = (graph: GraphRuntime) => [...graph.lit.keys()].filter((op) => graph.lit[op] === 1);

describe("operators", () => {
  test("nothing is lit before an animation frame, and then only what a frame named", () => {
    const graph = runtime();
    graph.ingest(sums([1, 3]), 100, "live");
    expect(lit(graph)).toEqual([]);
    expect(graph.light(116)).toBe(true);
    expect(lit(graph)).toEqual([1, 3]);
    expect(graph.glow(1, 116)).toBe(1);
    expect(graph.glow(0, 116)).toBe(0);
  });

  test("light fades to nothing, and then no further frame is asked for", () => {
    const graph = runtime();
    graph.ingest(sums([1]), 100, "live");
    graph.light(116);
    expect(graph.glow(1, 116 + DECAY_MS / 2)).toBeCloseTo(0.5);
    expect(graph.light(116 + DECAY_MS)).toBe(false);
    expect(graph.glow(1, 116 + DECAY_MS)).toBe(0);
  });

  test("what the server kept counts, and lights nothing", () => {
    const graph = runtime();
    graph.ingest(sums([0, 1]), 100, "replay");
    graph.light(116);
    expect(lit(graph)).toEqual([]);
    expect([...graph.received]).toEqual([1, 1, 0, 0]);
    expect(graph.meanNs(0)).toBe(500);
  });

  test("events that waited for a frame too long, in a hidden tab, light nothing", () => {
    const graph = runtime();
    graph.ingest(sums([2]), 100, "live");
    graph.light(100 + FRESH_MS + 1);
    expect(lit(graph)).toEqual([]);
  });

  test("whole steps light but are not counted again: their operators are in the sums", () => {
    const graph = runtime();
    graph.ingest(events([[0, 10, 2, 0]]), 100, "live");
    graph.light(116);
    expect(lit(graph)).toEqual([2]);
    expect(graph.count[2]).toBe(0);
  });

  test("frames before the document wait for it, and keep whether they were live", () => {
    const graph = new GraphRuntime("h");
    graph.ingest(sums([0]), 100, "replay");
    graph.setDocument(document);
    graph.light(performance.now());
    expect([...graph.received]).toEqual([1, 0, 0, 0]);
    expect(lit(graph)).toEqual([]);
  });

  test("rows that no graph can show are counted as lost", () => {
    const store = new OpsStore(() => undefined);
    store.ingest(sums([0, 1]), 0, "live");
    store.use(1, "h");
    store.ensure("h").setDocument(document);
    store.ingest(sums([0, 99]), 0, "live");
    expect(store.lostRows).toBe(3);
  });

  test("the page shows the graph that runs most, whatever ran last", () => {
    const asked: string[] = [];
    const store = new OpsStore((hash) => asked.push(hash));
    store.use(1, "train");
    for (let i = 0; i < 5; i++) store.ingest(sums([0, 1]), 0, "live");
    store.use(1, "test");
    store.ingest(sums([0]), 0, "live");
    expect(store.busiest()?.hash).toBe("train");
    expect(asked).toEqual(["train", "test"]);
  });
});

describe("gradient sync", () => {
  const sync = (count: number, bytes: number, wait: number) =>
    frame(Kind.SYNC, [
      [Column.PARAM, Uint16Array.of(1)],
      [Column.COUNT, Uint32Array.of(count)],
      [Column.BYTES, BigUint64Array.of(BigInt(bytes))],
      [Column.TOTAL_NS, BigUint64Array.of(BigInt(count * 50))],
      [Column.WAIT_NS, BigUint64Array.of(BigInt(wait))],
    ]);

  test("amounts are per exchange, over the last window; the count is over all", () => {
    const store = new SyncStore();
    store.ingest("h", sync(10, 9000, 90_000), 0);
    store.ingest("h", sync(2, 80, 200), WINDOW_MS + 1);
    const row = store.rows(document, "h")[1];
    expect(row).toMatchObject({ parameter: "e", sparse: true, count: 12, bytes: 40, timeNs: 50, waitNs: 100 });
  });

  test("a parameter that was not exchanged yet shows the size of its gradient", () => {
    expect(new SyncStore().rows(document, "h")[0]).toMatchObject({ parameter: "w", bytes: 400, count: 0, waitNs: 0 });
  });
});

describe("timeline", () => {
  const steps = new StepStore();
  steps.ingest(
    "h",
    events(
      [
        [1000, 100, 0, 0],
        [1100, 100, 2, 0],
        [1000, 50, 1, 1],
      ],
      { step: 7 },
    ),
  );

  const traced = (store: StepStore, of = document) =>
    store.newest(() => true).map((trace) => ({ trace, document: of, name: `s${trace.stream}` }));

  test("lanes are threads, time begins at the first event, and shares add up to one", () => {
    const model = buildTimeline(document, traced(steps));
    expect(model.lanes.map((lane) => [lane.label, ...lane.start])).toEqual([
      ["s1 · thread 0", 0, 100],
      ["s1 · thread 1", 0],
    ]);
    expect(model.steps).toEqual([7]);
    expect(model.spanNs).toBe(200);
    expect(model.shares).toEqual({ compute: 150 / 400, sync: 100 / 400, input: 0, idle: 150 / 400 });
  });

  test("a step that comes in several frames is one step", () => {
    const store = new StepStore();
    store.ingest("h", events([[0, 500, 0, 0]], { step: 9, t0Ns: 1000n }));
    store.ingest("h", events([[0, 700, 1, 1]], { step: 9, t0Ns: 3000n }));
    const [trace] = store.newest(() => true);
    expect([[...(trace?.start ?? [])], [...(trace?.op ?? [])], store.steps]).toEqual([[0, 2000], [0, 1], 1]);
    store.ingest("h", events([[0, 100, 1, 1]], { step: 9, t0Ns: 9000n, epoch: 2 })); // a new attempt runs it again
    expect([...(store.newest(() => true)[0]?.start ?? [])]).toEqual([0]);
  });

  test("a slice is found by its time, and a gap is no slice", () => {
    const lane = buildTimeline(document, traced(steps)).lanes[0];
    if (lane === undefined) throw new Error("no lane");
    expect([sliceAt(lane, 50, 0), sliceAt(lane, 150, 0), sliceAt(lane, 201, 0)]).toEqual([0, 1, -1]);
  });

  test("a step that was not sampled whole is not drawn", () => {
    const store = new StepStore();
    store.ingest("h", events([[0, 1, 0, 0]], { flags: 0 }));
    expect(store.newest(() => true)).toEqual([]);
  });

  test("labels of an axis differ however far it is zoomed in", () => {
    expect([1_000_000, 1_000_500, 1_001_000].map((at) => axisLabel(at, 500))).toEqual([
      "1.0000 ms",
      "1.0005 ms",
      "1.0010 ms",
    ]);
    expect([axisLabel(0, 5), axisLabel(20_000_000, 10_000_000), axisLabel(1500, 500)]).toEqual([
      "0",
      "20 ms",
      "1.5 µs",
    ]);
  });

  test("how far behind a frame is, is measured from the end of its last event", () => {
    expect(endOfFrameMs(events([[0, 2_000_000, 0, 0]], { t0Ns: 1_790_000_000_000_000_000n }))).toBe(1_790_000_000_002);
  });

  test("axis steps are 1, 2 or 5 times a power of ten", () => {
    expect([1, 1.1, 3, 7, 99, 101].map(niceStep)).toEqual([1, 2, 5, 10, 100, 200]);
  });

  test("the golden frame of a sampled step makes a timeline", () => {
    const file = readFileSync(join(import.meta.dirname, "../../tests/golden/frames/op_events.bin"));
    const golden = decodeFrame(file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength) as ArrayBuffer);
    const store = new StepStore();
    store.ingest("h", { ...golden, flags: FLAG_WHOLE_STEP });
    expect(buildTimeline(document, traced(store)).numSlices).toBe(golden.count);
  });
});

describe("several trainers, and evaluation", () => {
  test("trainers whose graphs differ are drawn together, and an operator is found in the graph on the page", () => {
    const [first, ...others] = document.ops;
    if (first === undefined) throw new Error("no operator");
    const other = { ...document, ops: [{ ...first, name: "only_there" }, first, ...others] };
    const store = new StepStore();
    store.ingest("a", { ...events([[0, 10, 0, 0]], { step: 7 }), stream: 1 });
    store.ingest("b", {
      ...events(
        [
          [0, 10, 1, 0],
          [10, 10, 0, 0],
        ],
        { step: 7 },
      ),
      stream: 2,
    });
    const [one, two] = store.newest(() => true);
    if (one === undefined || two === undefined) throw new Error("a trainer is missing");
    const both = [
      { trace: one, document, name: "trainer-0" },
      { trace: two, document: other, name: "trainer-1" },
    ];
    const { lanes } = buildTimeline(document, both);
    expect(lanes.map((lane) => lane.label)).toEqual(["trainer-0 · thread 0", "trainer-1 · thread 0"]);
    const theirs = lanes[1];
    if (theirs === undefined) throw new Error("no lane");
    expect([shownOp(theirs, 0), shownOp(theirs, 1)]).toEqual([0, -1]);
  });

  test("evaluation never takes the place of training", () => {
    const store = new StepStore();
    store.ingest("train", { ...events([[0, 1, 0, 0]], { step: 9, t0Ns: 1n }), stream: 1 });
    store.ingest("test", { ...events([[0, 1, 0, 0]], { step: 40, t0Ns: 2n }), stream: 1 });
    store.ingest("test", { ...events([[0, 1, 0, 0]], { step: 40, t0Ns: 2n }), stream: 2 });
    const shown = (trains: (hash: string) => boolean | null) => store.newest(trains).map((one) => one.hash);
    expect(shown((hash) => hash === "train")).toEqual(["train"]);
    expect(shown(() => false)).toEqual(["test", "test"]);
    expect(shown((hash) => (hash === "train" ? null : false))).toEqual(["test", "test"]);
  });

  test("evaluation that ran longer than training is not shown in its place", () => {
    const store = new OpsStore(() => {});
    const [trains, evaluates] = [store.ensure("train"), store.ensure("test")];
    evaluates.rows = 1000;
    evaluates.setDocument({ ...document, ops: document.ops.filter((op) => op.role === "forward") });
    trains.setDocument({ ...document, ops: document.ops.map((op) => ({ ...op, role: "backward" })) });
    expect(store.busiest()?.hash).toBe("train");
  });
});

describe("series", () => {
  const delta = (from: number, to: number) => {
    const step = Array.from({ length: to - from }, (_, i) => from + i);
    return { step, time_ns: step.map((s) => s * 10), value: step.map((s) => s / 2) };
  };

  test("a snapshot that comes after newer points does not lose either", () => {
    const series = new Series();
    series.append(delta(5, 8));
    series.restart(delta(0, 6));
    expect(series.step).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  });

  test("a delta that repeats the end of the snapshot adds only what is new", () => {
    const series = new Series();
    series.restart(delta(0, 6));
    series.append(delta(4, 8));
    expect(series.step).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
  });

  test("points that are no number are left out", () => {
    const series = new Series();
    series.append({ step: [1, 2, 3], time_ns: [1, 2, 3], value: [Number.POSITIVE_INFINITY, Number.NaN, 4] });
    expect(series.value).toEqual([4]);
  });

  test("steps that a process takes again have their last value", () => {
    const series = new Series();
    series.append({ step: [1, 2, 3], time_ns: [1, 2, 3], value: [9, 8, 7] });
    series.append({ step: [2, 3], time_ns: [4, 5], value: [6, 5] });
    expect(series.bySteps()).toEqual([
      [1, 2, 3],
      [9, 6, 5],
    ]);
    expect(series.latest).toBe(5);
  });

  test("a long run is thinned out, and every point that arrived is counted", () => {
    const store = new SeriesStore();
    for (let i = 0; i < 50; i++) store.append({ loss: delta(i * 1000, (i + 1) * 1000) });
    const loss = store.byName.get("loss");
    expect(loss?.arrived).toBe(50_000);
    expect(loss?.step.length).toBeLessThan(9001);
    expect(loss?.latest).toBe(49_999 / 2);
  });
});

describe("logs", () => {
  test("pieces join to lines, and a repeated piece adds nothing", () => {
    const log = new ReplicaLog();
    log.append(0, "one\ntw");
    log.append(0, "one\ntw");
    log.append(6, "o\nthree\n");
    expect(log.lines).toEqual(["one", "two", "three"]);
    expect(log.next).toBe(14);
  });

  test("a piece that overlaps the last one adds what is behind it, also among other letters", () => {
    const log = new ReplicaLog();
    log.append(0, "né");
    log.append(1, "éo\n");
    expect(log.lines).toEqual(["néo"]);
  });

  test("offsets count bytes, also of other letters and of bytes that were no letter", () => {
    const store = new LogStore();
    store.of("r").append(0, "é✓\n");
    store.of("s").append(0, "\ufffd\n");
    expect(store.offsets()).toEqual({ r: 6, s: 2 });
  });

  test("colours are removed and a carriage return rewrites its line", () => {
    const log = new ReplicaLog();
    log.append(0, "\u001b[31mred\u001b[0m\n10 %\r50 %\r100 %\nend\r\n");
    expect(log.lines).toEqual(["red", "100 %", "end"]);
  });

  test("a log that begins in the middle says what was skipped", () => {
    const log = new ReplicaLog();
    log.append(5000, "late\n");
    expect([log.skippedBytes, log.lines]).toEqual([5000, ["late"]]);
  });
});
