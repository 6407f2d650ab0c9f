/** Sampled steps: each is once, whatever way it came; one that is chosen again is what it was. */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { decodeFrame, type Frame } from "../src/codec";
import { neighbour, newestInFull, oneStep, rangeOf, rangeText, runtimeOfStep, StepHistory } from "../src/store/history";
import { StepStore, type StepTrace } from "../src/store/steps";
import { buildTimeline } from "../src/timeline/model";
import type { GraphDocument, GraphOp } from "../src/types";

const GOLDEN = join(import.meta.dirname, "../../tests/golden/frames");

function golden(name: string): ArrayBuffer {
  const file = readFileSync(join(GOLDEN, `${name}.bin`));
  return file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength) as ArrayBuffer;
}

/** Frames as the server answers with them: each behind its length. */
function page(...frames: ArrayBuffer[]): ArrayBuffer {
  const parts = frames.flatMap((frame) => [
    new Uint8Array(Uint32Array.of(frame.byteLength).buffer),
    new Uint8Array(frame),
  ]);
  const content = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    content.set(part, at);
    at += part.length;
  }
  return content.buffer;
}

function graph(n: number): GraphDocument {
  const facts = { type: "t", kind: "computation" as const, module: "", source: "", inputs: [], outputs: [] };
  const role = (i: number): GraphOp["role"] => (i % 2 === 0 ? "forward" : "communication");
  const ops = Array.from({ length: n }, (_, i) => ({
    name: `o${i}`,
    role: role(i),
    replica: 0,
    bytes: 0,
    flops: 0,
    ...facts,
  }));
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, batch: [1], ops, edges: [], syncs: [] };
}

function trace(step: number, more: Partial<StepTrace> = {}): StepTrace {
  const events = {
    start: Uint32Array.of(0, 100),
    duration: Uint32Array.of(100, 300),
    op: Uint16Array.of(0, 1),
    thread: Uint16Array.of(0, 0),
  };
  const head = { stream: 1, epoch: 1, hash: "h", step, t0Ns: BigInt(step * 1000), inFull: false };
  return { ...head, ...events, ...more };
}

const none = () => Promise.resolve(new ArrayBuffer(0));
const document = graph(2);

describe("sampled steps", () => {
  test("that were recorded in full are counted", () => {
    const history = new StepHistory(none);
    for (const step of [1, 2, 3]) history.add(trace(step, { inFull: step > 1 }));
    expect(history.inFull()).toBe(2);
  });

  test("are bars in the order of time, trainers of one step together, none of them twice", () => {
    const history = new StepHistory(none);
    for (const one of [trace(20), trace(10), trace(10, { stream: 2, t0Ns: 10_200n }), trace(20)]) history.add(one);
    const bars = history.bars(() => document);
    expect(bars.map((bar) => [bar.step, bar.traces.length, bar.spanNs])).toEqual([
      [10, 2, 600],
      [20, 1, 400],
    ]);
    expect([bars[0]?.compute, bars[0]?.sync, bars[0]?.input]).toEqual([0.25, 0.75, 0]);
    expect(history.bars(() => null).length).toBe(2); // what was measured stays
  });

  test("do not grow by a test pass whose steps have the same numbers", () => {
    const history = new StepHistory(none);
    history.add(trace(10));
    history.add(trace(10, { hash: "test", t0Ns: 99_000_000n }));
    const bars = history.bars((hash) => (hash === "h" ? document : null));
    expect(bars.map((bar) => [bar.step, bar.spanNs])).toEqual([[10, 400]]);
    expect(history.all().map((one) => one.traces.map((of) => [of.hash, of.op.length]))).toEqual([
      [
        ["h", 2],
        ["test", 2],
      ],
    ]);
  });

  test("of a run that was started again are entries of their own", () => {
    const history = new StepHistory(none);
    history.add(trace(10));
    history.add(trace(10, { epoch: 2, t0Ns: 99_000n }));
    expect(history.all().map((one) => one.t0Ns)).toEqual([10_000n, 99_000n]);
  });

  test("are walked from the newest, and past the last one back to live", () => {
    const history = new StepHistory(none);
    for (const step of [10, 20, 30]) history.add(trace(step));
    const bars = history.bars(() => document);
    expect([neighbour(bars, null, -1), neighbour(bars, oneStep(20), 1), neighbour(bars, oneStep(10), -1)]).toEqual([
      20, 30, 10,
    ]);
    expect(neighbour(bars, oneStep(30), 1)).toBeNull();
    const range = { first: 20, last: 30 };
    expect([neighbour(bars, range, -1), neighbour(bars, range, 1)]).toEqual([10, null]);
  });

  test("above the bound the oldest are dropped", () => {
    const history = new StepHistory(none);
    const many = { op: new Uint16Array(2_000_000) };
    history.add(trace(1, many));
    history.add(trace(2, many));
    expect(history.all().map((one) => one.step)).toEqual([2]);
  });

  test("of a small graph, sampled at every step, cost as little as few", () => {
    const history = new StepHistory(none);
    const before = process.cpuUsage();
    for (let step = 0; step < 20_000; step++) history.add(trace(step));
    const { user, system } = process.cpuUsage(before);
    expect((user + system) / 1000).toBeLessThan(1000);
    expect([history.all().length, history.all()[0]?.step]).toEqual([4000, 16_000]);
  });
});

describe("a range of steps", () => {
  const filled = (): StepHistory => {
    const history = new StepHistory(none);
    for (const step of [1, 2, 3, 4]) {
      history.add(trace(step, { inFull: step > 1 }));
      history.add(trace(step, { stream: 2, t0Ns: BigInt(step * 1000 + 50), inFull: step > 1 }));
    }
    return history;
  };

  test("is one entry of the steps' events on one axis, by process", () => {
    const history = filled();
    history.wanted.value = { first: 2, last: 4 };
    const chosen = history.chosen.value;
    expect(chosen).toMatchObject({ step: 4, t0Ns: 2000n, range: { first: 2, count: 3 } });
    expect(chosen?.traces.map((one) => [one.stream, one.t0Ns, [...one.start]])).toEqual([
      [1, 2000n, [0, 100, 1000, 1100, 2000, 2100]],
      [2, 2050n, [0, 100, 1000, 1100, 2000, 2100]],
    ]);
    const traced = (chosen?.traces ?? []).map((one) => ({ trace: one, document, name: `t${one.stream}` }));
    const model = buildTimeline(document, traced);
    expect(model.lanes.map((lane) => lane.start[0])).toEqual([0, 50]);
    expect([model.spanNs, model.numSlices]).toEqual([2450, 12]);
  });

  test("sums its steps for the graph", () => {
    const history = filled();
    history.wanted.value = { first: 2, last: 4 };
    const chosen = history.chosen.value;
    if (chosen === null) throw new Error("no steps");
    expect([...runtimeOfStep(chosen, document, "h").count]).toEqual([6, 6]);
  });

  test("of which the newest attempt alone counts, and which may lack steps", () => {
    const history = filled();
    history.add(trace(3, { epoch: 2, t0Ns: 99_000n }));
    history.wanted.value = { first: 2, last: 900 };
    expect(history.chosen.value).toMatchObject({ step: 3, range: { first: 3, count: 1 } });
    history.wanted.value = { first: 700, last: 900 };
    expect(history.chosen.value).toBeNull();
  });

  test("of too many slices keeps the newest steps", () => {
    const history = new StepHistory(none);
    const many = () => ({
      start: new Uint32Array(250_000),
      duration: new Uint32Array(250_000),
      op: new Uint16Array(250_000),
      thread: new Uint16Array(250_000),
    });
    for (const step of [1, 2, 3, 4]) history.add(trace(step, many()));
    history.wanted.value = { first: 1, last: 4 };
    expect(history.chosen.value?.range).toEqual({ first: 3, count: 2 });
  });

  test("is what was recorded in full last", () => {
    const history = filled();
    expect(newestInFull(history.all())).toEqual({ first: 2, last: 4 });
    history.add(trace(5));
    expect(newestInFull(history.all())).toEqual({ first: 2, last: 4 });
    history.add(trace(6, { inFull: true }));
    expect(newestInFull(history.all())).toBeNull();
    history.add(trace(7, { inFull: true }));
    expect(newestInFull(history.all())).toEqual({ first: 6, last: 7 });
    expect(newestInFull([])).toBeNull();
  });

  test("stands in the address", () => {
    expect([rangeOf("17"), rangeOf("42-17"), rangeOf("x"), rangeOf(null), rangeOf("1-2-3")]).toEqual([
      { first: 17, last: 17 },
      { first: 17, last: 42 },
      null,
      null,
      null,
    ]);
    expect([rangeText(oneStep(17)), rangeText({ first: 17, last: 42 })]).toEqual(["17", "17-42"]);
  });
});

describe("a replayed step", () => {
  const events = decodeFrame(golden("op_events"));
  const used = decodeFrame(golden("graph_used"));
  const hash = (used.body as { hash: string }).hash;
  const of = graph(70_000);
  const whole: Frame = { ...events, flags: 1 };

  test("equals what was live, and its graph's sums are its own", async () => {
    const live = new StepStore();
    live.ingest(hash, whole);
    const raw = new Uint8Array(golden("op_events"));
    raw[4] = 1; // flags: a step that was sampled whole
    const seen: string[] = [];
    const asked: (bigint | null)[] = [];
    const history = new StepHistory((_, after) => {
      asked.push(after);
      return Promise.resolve(after === null ? page(golden("graph_used"), raw.buffer) : new ArrayBuffer(0));
    });
    await history.load([events.stream], 4, (one) => seen.push(one));
    history.wanted.value = oneStep(events.step);
    const [replayed, was] = [history.chosen.value?.traces ?? [], live.newest(() => true)];
    const model = (traces: readonly StepTrace[]) =>
      buildTimeline(
        of,
        traces.map((one) => ({ trace: one, document: of, name: "trainer-0" })),
      );
    expect(model(replayed)).toEqual(model(was));
    expect([seen, asked, history.more.value]).toEqual([[hash], [null, events.seq], false]);
    const chosen = history.chosen.value;
    const sums = chosen === null ? null : runtimeOfStep(chosen, of, hash);
    const durations = [...(replayed[0]?.duration ?? [])];
    expect(sums?.sumNs).toBe(durations.reduce((sum, one) => sum + one, 0));
    expect(sums?.light(1e9)).toBe(false);
    expect(sums?.lit.some((one) => one === 1)).toBe(false);
  });

  test("is fetched of all trainers alike, the one that is behind in time first", async () => {
    const asked: (readonly [number, number])[] = [];
    const history = new StepHistory((stream, after, limitBytes) => {
      asked.push([stream, limitBytes]);
      const raw = new Uint8Array(golden("op_events").slice(0));
      const view = new DataView(raw.buffer);
      const seq = (after ?? 0n) + 1n;
      view.setUint32(8, stream, true);
      view.setBigUint64(16, seq, true);
      view.setBigInt64(24, events.t0Ns + seq * (stream === 1 ? 3000n : 1000n), true);
      return Promise.resolve(page(golden("graph_used"), raw.buffer));
    });
    await history.load([1, 2, 3], 6, () => undefined);
    expect(asked.map(([stream]) => stream)).toEqual([1, 2, 3, 2, 3, 2]);
    expect(asked.reduce((sum, [, bytes]) => sum + bytes, 0)).toBe(6 * (4 << 20));
    expect(history.more.value).toBe(true);
  });
});
