/** Graphs of twenty thousand operators: what would let the page stand still, measured in processor time. */
import { expect, test } from "vitest";
import { criticalPath } from "../src/graph/critical";
import { makePlan, packPlan, unpackPlan } from "../src/graph/plan";
import { GraphRuntime, longestOf, sumOf } from "../src/store/ops";
import type { GraphDocument, GraphOp } from "../src/types";

const N = 20_000;

function chain(modules: number, count = N): GraphDocument {
  const op = (i: number): GraphOp => ({
    name: `op_${i}`,
    type: "aten.mm.default",
    kind: "computation",
    role: "forward",
    replica: 0,
    module: `m${String.fromCharCode(97 + (i % modules))}`,
    source: "",
    inputs: [],
    outputs: [],
    bytes: 0,
    flops: 0,
  });
  const ops = Array.from({ length: count }, (_, i) => op(i));
  const edges = ops.slice(1).map((_, i) => [i, i + 1] as const);
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, batch: [1], ops, edges: edges.map(([a, b]) => [a, b]), syncs: [] };
}

/** Milliseconds of processor time, the best of three. */
function spentMs(work: () => void): number {
  const spent = [1, 2, 3].map(() => {
    const before = process.cpuUsage();
    work();
    const { user, system } = process.cpuUsage(before);
    return (user + system) / 1000;
  });
  return Math.min(...spent);
}

const document = chain(20);
const everything = (of = document) => {
  const { groups } = makePlan(of, { replica: "all", expanded: [], place: { aspect: 1, down: false } });
  return { replica: "all" as const, expanded: groups.map((group) => group.id), place: { aspect: 1, down: false } };
};

test("where the time goes is found in one pass over the operators", () => {
  const runtime = new GraphRuntime("h");
  runtime.setDocument(document);
  document.ops.forEach((_, op) => {
    runtime.totalNs[op] = op;
    runtime.sumNs += op;
  });
  const ops = document.ops.map((_, op) => [op]);
  expect(longestOf(runtime, ops, (one) => one, 3)).toEqual([[N - 1], [N - 2], [N - 3]]);
  expect(sumOf(runtime, [1, 3]).share).toBeCloseTo(4 / ((N * (N - 1)) / 2));
  const work = () => longestOf(runtime, ops, (one) => one, 6).map((one) => sumOf(runtime, one));
  expect(spentMs(work)).toBeLessThan(100);
});

test("all operators expanded are laid out within a second", () => {
  const request = everything();
  expect(spentMs(() => makePlan(document, request))).toBeLessThan(1000);
});

test("a plan is the same behind the worker's door", () => {
  const small = chain(4, 120);
  const plan = makePlan(small, everything(small));
  const back = unpackPlan(small, structuredClone(packPlan(plan)));
  expect(back).toEqual(plan);
  expect(back.layout.boxes.length).toBe(124);
});

test("an expanded graph is about as high as it is wide", () => {
  const { layout } = makePlan(document, everything());
  expect(layout.height / layout.width).toBeLessThan(4);
  expect(layout.width / layout.height).toBeLessThan(40);
});

test("the critical path is found within a frame's time", () => {
  const even = new Float64Array(document.ops.length).fill(1);
  criticalPath(document, even); // the order of the operators is computed once
  expect(spentMs(() => criticalPath(document, even))).toBeLessThan(60);
});
