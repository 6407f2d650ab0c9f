/** Graphs before and after passes, from a document that was made by hand. */
import { expect, test } from "vitest";
import { markOf, numberOf, passesOf, stageOf, unpacked } from "../src/graph/stages";
import type { GraphDocument, GraphOp } from "../src/types";

const op = (name: string, replica: number, type: string): GraphOp => ({
  name,
  replica,
  type,
  kind: "computation",
  role: "forward",
  module: "m_1",
  source: "a.py:1",
  inputs: [],
  outputs: [],
  bytes: 0,
  flops: 0,
});

/**
 * Built: copy_0, copy_1 → sum on two replicas. The first pass removes the copies, whose readers then take their place
 * (sum becomes fused_sum); the second adds an operator `end` for both replicas.
 */
const document = {
  ops: [
    op("sum", 0, "penstock.fused_sum.default"),
    op("sum", 1, "penstock.fused_sum.default"),
    op("end", -1, "aten.add.Tensor"),
  ],
  edges: [
    [0, 2],
    [1, 2],
  ],
  syncs: [{ parameter: "w", ops: [2, 0] }],
  passes: {
    ran: [
      {
        name: "fuse",
        title: "sums without copies",
        removed: 4,
        added: [],
        changed: [0, 1, 2],
        edges_removed: [3, 0, 1, 1, 2, 5, 0, 1, 1, 2],
        edges_added: [],
      },
      {
        name: "finish",
        title: "one end",
        removed: 0,
        added: [2, 0, 1],
        changed: [],
        edges_removed: [],
        edges_added: [0, 2, 1, 0, 2],
      },
    ],
    unchanged: ["nothing to do"],
    texts: ["aten.clone.default", "computation", "forward", "m_", "a.py:1", "copy_", "aten.sum.default"],
    removed: {
      type: [0, 0, 2],
      kind: [1, 0, 2],
      role: [2, 0, 2],
      module: [3, 0, 2],
      module_number: [1, 0, 2],
      source: [4, 0, 2],
      name: [5, 0, 2],
      name_number: [0, 1, 2],
      first: [0, 0, 2],
      count: [2, 0, 2],
    },
    was: {
      type: [6, 0, 2],
      kind: [1, 0, 2],
      role: [2, 0, 2],
      module: [3, 0, 2],
      module_number: [1, 0, 2],
      source: [4, 0, 2],
    },
  },
} as unknown as GraphDocument;

const named = (one: GraphOp) => `${one.name}#${one.replica} ${one.type} ${one.module}`;
const drawn = (stage: ReturnType<typeof stageOf>) => ({
  ops: stage?.document.ops.map(named),
  edges: stage?.document.edges
    .map(
      ([from, to]) =>
        `${stage.document.ops[from]?.name}#${stage.document.ops[from]?.replica} ${stage.document.ops[to]?.name}`,
    )
    .sort(),
  marks: [...(stage?.marks ?? [])],
});

test("columns are arithmetic sequences", () => {
  expect(unpacked([7, 2, 3, 4, 0, 1])).toEqual([7, 9, 11, 4]);
  expect(unpacked([3, 0, 1, 1, 2], 2)).toEqual([3, 0, 4, 1]);
  expect(unpacked([])).toEqual([]);
});

test("before the first pass the graph is as it was built", () => {
  expect(drawn(stageOf(document, 0, "before"))).toEqual({
    ops: [
      "sum#0 aten.sum.default m_1",
      "sum#1 aten.sum.default m_1",
      "copy_0#0 aten.clone.default m_1",
      "copy_0#1 aten.clone.default m_1",
      "copy_1#0 aten.clone.default m_1",
      "copy_1#1 aten.clone.default m_1",
    ],
    edges: ["copy_0#0 sum", "copy_0#1 sum", "copy_1#0 sum", "copy_1#1 sum"],
    marks: [3, 3, 1, 1, 1, 1],
  });
});

test("after a pass is before the next, under other marks", () => {
  const [after, before] = [drawn(stageOf(document, 0, "after")), drawn(stageOf(document, 1, "before"))];
  expect(after.ops).toEqual(["sum#0 penstock.fused_sum.default m_1", "sum#1 penstock.fused_sum.default m_1"]);
  expect([after.ops, after.edges]).toEqual([before.ops, before.edges]);
  expect([after.marks, before.marks]).toEqual([
    [3, 3],
    [0, 0],
  ]);
});

test("after the last pass is the graph that runs", () => {
  const stage = stageOf(document, 1, "after");
  expect(stage?.document.ops).toEqual(document.ops);
  expect(stage?.document.edges).toEqual(document.edges);
  expect([...(stage?.marks ?? [])]).toEqual([0, 0, 2]);
});

test("an exchange of a stage has the operators that are there", () => {
  expect(stageOf(document, 0, "before")?.document.syncs[0]?.ops).toEqual([0]);
});

test("passes say how many operators of which type they touched", () => {
  const [first, second] = passesOf(document);
  expect(first).toMatchObject({
    before: 6,
    after: 2,
    removed: [{ type: "clone", count: 4 }],
    changed: [{ type: "sum → fused_sum", count: 2 }],
    edgesRemoved: 4,
    edgesAdded: 0,
  });
  expect(second).toMatchObject({ before: 2, after: 3, added: [{ type: "add", count: 1 }], edgesAdded: 2 });
  expect(first && numberOf(first)).toEqual({ removed: 4, added: 0, changed: 2 });
});

test("a document without passes has none, and no stage", () => {
  const old = { ...document, passes: null };
  expect(passesOf(old)).toEqual([]);
  expect(stageOf(old, 0, "before")).toBeNull();
  expect(passesOf({ ...document, passes: undefined } as unknown as GraphDocument)).toEqual([]);
  expect(stageOf(document, 2, "after")).toBeNull();
});

test("a box has the mark of what is touched in it", () => {
  const marks = Uint8Array.from([0, 1, 1, 3]);
  expect(markOf(marks, [0])).toEqual({ mark: "same", part: 0 });
  expect(markOf(marks, [0, 1, 2])).toEqual({ mark: "removed", part: 2 / 3 });
  expect(markOf(marks, [1, 3])).toEqual({ mark: "changed", part: 1 });
});
