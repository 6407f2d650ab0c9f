/** A selected operator marks what it waits for and what waits for it. */
import { expect, test } from "vitest";
import { everyGroup, groupOps } from "../src/graph/group";
import { layoutGraph } from "../src/graph/layout";
import { opOfBox, usedBoxes, usesIn } from "../src/graph/uses";
import { usesOf } from "../src/graph/walk";
import type { GraphDocument, GraphOp } from "../src/types";

const facts = { source: "", inputs: [], outputs: [], bytes: 0, flops: 0 };
const head = { version: 1 as const, program: "p", num_replicas: 2, num_threads: 1, batch: [1], syncs: [] };

function op(name: string, module: string, replica: number, kind = "computation"): GraphOp {
  return { name, type: "aten.mm.default", kind, role: "forward", module, replica, ...facts } as GraphOp;
}

/** In each of two replicas mm → relu → tanh, with mm used by tanh too; one exchange of both tanhs. */
function replicated(): GraphDocument {
  const one = (replica: number) => [
    op("mm", "a_tower", replica),
    op("relu", "a_tower", replica),
    op("tanh", "b_tower", replica),
  ];
  const ops = [...one(0), ...one(1), op("sum", "c_tower", -1, "all_reduce")];
  const edges: [number, number][] = [0, 3].flatMap((at): [number, number][] => [
    [at, at + 1],
    [at + 1, at + 2],
    [at, at + 2],
    [at + 2, 6],
  ]);
  return { ...head, mode: "local", ops, edges };
}

test("an exchange has the operator of all replicas as one producer", () => {
  const document = replicated();
  expect(usesOf(document, 6, "producers", () => true)).toEqual([2]);
  expect(usesOf(document, 6, "producers", (one) => one > 2)).toEqual([5]);
  expect(usesOf(document, 0, "consumers", () => true)).toEqual([1, 2]);
});

test("two operators of one name in a replica are two producers", () => {
  const one = replicated();
  const document = { ...one, ops: one.ops.with(1, op("mm", "a_tower", 0)) };
  expect(usesOf(document, 2, "producers", () => true)).toEqual([0, 1]);
});

test("boxes around a chosen operator are marked, across modules", () => {
  const document = replicated();
  const groups = groupOps(document, "all");
  const open = new Set(everyGroup(groups).map((group) => group.id));
  const layout = layoutGraph(document, groups, open);
  const box = (one: number) => layout.boxOfOp[one] ?? -1;
  expect(opOfBox(layout, box(0))).toBe(0);
  expect(usesIn(document, layout, 0)).toEqual({ producers: [], consumers: [1, 2] });
  expect(usedBoxes(document, layout, box(0)).consumers).toEqual(new Set([box(1), box(2)]));
  expect(usedBoxes(document, layout, box(2)).producers).toEqual(new Set([box(0), box(1)]));
  expect(usedBoxes(document, layout, box(0)).producers).toEqual(new Set());
});

test("a module of several operators, and no box, have no uses to mark", () => {
  const document = replicated();
  const layout = layoutGraph(document, groupOps(document, "all"), new Set());
  const module = layout.boxOfOp[0] ?? -1;
  expect(opOfBox(layout, -1)).toBeNull();
  expect(layout.boxes[module]?.group.ops).toEqual([0, 1, 3, 4]);
  expect(opOfBox(layout, module)).toBeNull();
  expect(usedBoxes(document, layout, -1)).toEqual({ producers: new Set(), consumers: new Set() });
});
