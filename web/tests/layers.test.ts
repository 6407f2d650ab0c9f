/** Repeated layers behind one box: what they take, and which of them is the odd one out. */
import { expect, test } from "vitest";
import { layerOf, ODD, spreadOf } from "../src/store/layers";
import { GraphRuntime } from "../src/store/ops";

const modules = Array.from({ length: 12 }, (_, op) => `model.layers.${op % 6}.${op < 6 ? "attn" : "mlp"}`);

function runtime(slow: number): GraphRuntime {
  const made = new GraphRuntime("h");
  made.count = new Float64Array(12).fill(10);
  made.totalNs = Float64Array.from(modules, (_, op) => (op % 6 === slow ? 4000 : 1000));
  return made;
}

test("a layer is what stands up to the number", () => {
  expect(layerOf("model.layers.*.attn.q", "model.layers.17.attn.q")).toBe("model.layers.17");
  expect(layerOf("emb_*", "emb_3")).toBe("emb_3");
  expect(layerOf("tower.fc_0", "tower.fc_0")).toBeNull();
});

test("times are of a layer in one step, and the slowest is named", () => {
  const found = spreadOf(runtime(4), [...modules.keys()], "model.layers.*", modules);
  expect(found).toMatchObject({ count: 6, minNs: 200, medianNs: 200, maxNs: 800, slowest: "model.layers.4" });
  expect((found?.maxNs ?? 0) / (found?.medianNs ?? 1)).toBeGreaterThan(ODD);
  expect(modules[found?.slowestOp ?? -1]).toContain("layers.4");
});

test("one layer alone, and layers that have not run, have no spread", () => {
  expect(spreadOf(runtime(0), [0, 6], "model.layers.*", modules)).toBeNull();
  const idle = new GraphRuntime("h");
  expect(spreadOf(idle, [...modules.keys()], "model.layers.*", modules)).toBeNull();
});
