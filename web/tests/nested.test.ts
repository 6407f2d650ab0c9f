/** A transformer of 44 layers: one layer stands for all of them, and opens as deep as its modules are nested. */
import { describe, expect, test } from "vitest";
import { everyGroup, foldRepeats, groupOps, MAX_GROUPS } from "../src/graph/group";
import { layoutGraph } from "../src/graph/layout";
import { makePlan, packPlan, unpackPlan } from "../src/graph/plan";
import type { GraphDocument, GraphOp } from "../src/types";

const LAYERS = 44;
const INSIDE = ["ln_1", "attn.q", "attn.k", "attn.v", "attn.out", "ln_2", "mlp.up", "mlp.down"];

function transformer(): GraphDocument {
  const ops: GraphOp[] = [];
  const edges: [number, number][] = [];
  const add = (role: GraphOp["role"], module: string) => {
    const name = `op_${ops.length}`;
    const facts = { source: "", inputs: [], outputs: [], bytes: 0, flops: 0, replica: 0, kind: "computation" as const };
    ops.push({ name, type: "aten.addmm.default", role, module, ...facts });
    if (ops.length > 1) edges.push([ops.length - 2, ops.length - 1]);
  };
  add("forward", "embed");
  for (let i = 0; i < LAYERS; i++) {
    for (const part of INSIDE) for (let k = 0; k < 2; k++) add("forward", `model.layers.${i}.${part}`);
  }
  add("loss", "");
  for (let i = LAYERS - 1; i >= 0; i--) for (const part of INSIDE) add("backward", `model.layers.${i}.${part}`);
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, batch: [1], ops, edges, syncs: [] };
}

const document = transformer();
const groups = groupOps(document, "all");
const layers = groups.find((group) => group.bucket === "forward" && group.module.endsWith("*"));

describe("repeated layers", () => {
  test("numbers of repeated siblings are folded at every level", () => {
    const paths = [0, 1, 2, 3, 4].flatMap((i) => [`h.${i}.attn.q`, `h.${i}.mlp`]);
    expect([...new Set(foldRepeats(paths))]).toEqual(["h.*.attn.q", "h.*.mlp"]);
    expect([...new Set(foldRepeats(["h.0.a", "h.1.a", "x"]))]).toEqual(["h.0.a", "h.1.a", "x"]);
  });

  test("forty-four layers are one box that says so", () => {
    expect(layers?.label).toBe("layers ×44");
    expect(groups.length).toBeLessThanOrEqual(MAX_GROUPS);
    expect(groups.flatMap((group) => group.ops).length).toBe(document.ops.length);
  });

  test("a layer opens into its modules, and those into theirs, each operator for all layers", () => {
    expect(layers?.children.map((child) => child.label)).toEqual(["ln_1", "attn", "ln_2", "mlp"]);
    const attn = layers?.children.find((child) => child.label === "attn");
    expect(attn?.members.map((member) => member.name)).toEqual(Array(8).fill("addmm"));
    expect(attn?.members.every((member) => member.ops.length === LAYERS)).toBe(true);
    expect(attn?.children.map((child) => child.label) ?? []).toEqual([]); // eight operators are shown at once
  });
});

describe("nested frames", () => {
  const all = new Set(everyGroup(groups).map((group) => group.id));
  const { boxes, boxOfOp, edges } = layoutGraph(document, groups, all);

  test("every box lies inside the frame around it, beside its siblings", () => {
    for (const [index, box] of boxes.entries()) {
      const frame = boxes[box.parent];
      if (frame === undefined) continue;
      expect([frame.expanded, box.depth]).toEqual([true, frame.depth + 1]);
      expect(box.x >= frame.x && box.x + box.w <= frame.x + frame.w, box.id).toBe(true);
      expect(box.y >= frame.y && box.y + box.h <= frame.y + frame.h, box.id).toBe(true);
      for (const other of boxes.slice(index + 1)) {
        if (other.parent !== box.parent) continue;
        const apart =
          box.x + box.w <= other.x ||
          other.x + other.w <= box.x ||
          box.y + box.h <= other.y ||
          other.y + other.h <= box.y;
        expect(apart, `${box.id} over ${other.id}`).toBe(true);
      }
    }
  });

  test("an operator's box is the innermost, and edges join siblings", () => {
    document.ops.forEach((_, op) => {
      expect(boxes[boxOfOp[op] ?? -1]?.op?.ops).toContain(op);
    });
    for (const edge of edges) expect(boxes[edge.from]?.parent).toBe(boxes[edge.to]?.parent);
  });

  test("a nested plan is the same behind the worker's door", () => {
    const plan = makePlan(document, { replica: "all", expanded: [...all], place: { aspect: 1, down: false } });
    expect(unpackPlan(document, structuredClone(packPlan(plan)))).toEqual(plan);
  });
});
