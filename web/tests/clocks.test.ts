/** Processes of several nodes on one clock, and lanes that are pinned. */
import { describe, expect, test } from "vitest";
import { clocksOf, clockText } from "../src/timeline/clocks";
import { buildTimeline, type Traced } from "../src/timeline/model";
import type { GraphDocument, NodeRow, Replica } from "../src/types";

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

const node = (id: string, host: string, offset: number | null, error = 0.4): NodeRow =>
  ({ id, name: id, host, clock: offset === null ? null : { offset_ms: offset, error_ms: error } }) as NodeRow;
const replica = (stream: number, node_id: string): Replica => ({ stream, node_id }) as Replica;

/** A step that begins at `atNs` of the server's clock, on a node whose clock is ahead by `aheadNs`. */
function traced(stream: number, atNs: bigint, aheadNs: bigint, clock: Traced["clock"]): Traced {
  const columns = { start: Uint32Array.of(0), duration: Uint32Array.of(500), op: Uint16Array.of(0) };
  const head = { stream, epoch: 1, hash: "h", step: 7, t0Ns: atNs + aheadNs, inFull: false };
  const trace = { ...head, ...columns, thread: Uint16Array.of(0) };
  return { trace, document, name: `trainer-${stream}`, clock: clock ?? null };
}

describe("clocks", () => {
  test("what began at one time begins at one place, whatever the clocks of the nodes", () => {
    const clocks = clocksOf([replica(0, "a"), replica(1, "b")], [node("a", "ha", -1.25), node("b", "hb", 3.2)]);
    const began = 1_796_000_000_000_000_000n;
    const model = buildTimeline(document, [
      traced(0, began, -1_250_000n, clocks.get(0)),
      traced(1, began, 3_200_000n, clocks.get(1)),
    ]);
    expect(model.lanes.map((lane) => lane.start[0])).toEqual([0, 0]);
    expect(model.spanNs).toBe(500);
    expect(model.clocks.map(clockText).map((text) => text.replace(/\s/g, " "))).toEqual([
      "clock of a: −1.25 ms ± 400 µs",
      "clock of b: +3.20 ms ± 400 µs",
    ]);
    const uncorrected = buildTimeline(document, [
      traced(0, began, -1_250_000n, null),
      traced(1, began, 3_200_000n, null),
    ]);
    expect(uncorrected.lanes.map((lane) => lane.start[0])).toEqual([0, 4_450_000]);
  });

  test("processes of one machine have one clock, which nothing corrects", () => {
    const clocks = clocksOf([replica(0, "a"), replica(1, "b")], [node("a", "h", 0.1), node("b", "h", -0.2)]);
    expect(clocks.size).toBe(0);
  });

  test("nodes of one host share the better estimate, and one without an estimate is left as it is", () => {
    const nodes = [node("a", "h1", 5, 2), node("b", "h1", 4, 0.5), node("c", "h2", null)];
    const clocks = clocksOf([replica(0, "a"), replica(1, "b"), replica(2, "c")], nodes);
    expect([...clocks].map(([stream, one]) => [stream, one.offsetMs])).toEqual([
      [0, 4],
      [1, 4],
    ]);
  });
});

describe("pinned lanes", () => {
  const steps = [0, 1, 2].map((stream) => traced(stream, 1000n, 0n, null));
  test("stand first, in the order of their pins", () => {
    const { lanes } = buildTimeline(document, steps, ["trainer-2.0", "trainer-1.0", "gone.4"]);
    expect(lanes.map((lane) => [lane.key, lane.pinned])).toEqual([
      ["trainer-2.0", true],
      ["trainer-1.0", true],
      ["trainer-0.0", false],
    ]);
  });
});
