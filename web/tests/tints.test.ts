/** What colours of boxes say besides roles. */
import { expect, test } from "vitest";
import type { Layout } from "../src/graph/layout";
import { mostBehind, replicaColours, tintOf, tintsOf, tintsOfPass } from "../src/graph/tints";
import type { Palette } from "../src/palette";
import type { GraphDocument } from "../src/types";

const palette = {
  accent: "#a",
  muted: "#m",
  bucket: { forward: "#f", backward: "#b", optimize: "#o", communication: "#c", input: "#i" },
} as unknown as Palette;
const document = {
  ops: [
    { replica: 0, bytes: 100 },
    { replica: 1, bytes: 300 },
    { replica: 1, bytes: 100 },
    { replica: -1, bytes: 0 },
  ],
} as unknown as GraphDocument;
/** A frame that is open, with two operators inside it, and a module. */
const layout = {
  boxes: [
    { group: { bucket: "forward", ops: [0, 1, 2] }, op: null, expanded: true },
    { group: { bucket: "forward", ops: [0, 1, 2] }, op: { ops: [0] }, expanded: false },
    { group: { bucket: "forward", ops: [0, 1, 2] }, op: { ops: [1, 2] }, expanded: false },
    { group: { bucket: "optimize", ops: [3] }, op: null, expanded: false },
  ],
} as unknown as Layout;

test("roles have their colours, and the strength of their time", () => {
  expect(tintsOf("role", layout, document, palette)).toEqual({
    tint: "role",
    colours: ["#f", "#f", "#f", "#o"],
    strength: null,
  });
  expect(tintsOf("time", layout, document, palette)).toMatchObject({
    colours: ["#a", "#a", "#a", "#a"],
    strength: null,
  });
});

test("memory is against the largest box that is not open", () => {
  expect([...(tintsOf("memory", layout, document, palette).strength ?? [])]).toEqual([1, 0.25, 1, 0]);
});

test("a replica colours what is its alone", () => {
  const { colours, strength } = tintsOf("replica", layout, document, palette);
  const [first, second] = replicaColours(palette);
  expect(colours).toEqual(["#m", first, second, "#m"]);
  expect([...(strength ?? [])]).toEqual([0, 0.5, 0.5, 0]);
});

test("staleness is against the oldest parameter, and grey where none was counted", () => {
  const reading = {
    ops: [["w.block1", "x"], ["w.block1", "table"], ["x"], []].map((names) => ({
      inputs: names.map((name) => ({ name })),
    })),
  } as unknown as GraphDocument;
  const behind = new Map([
    ["w.block1", 1],
    ["table", 4],
  ]);
  const { colours, strength, notes } = tintsOf("staleness", layout, reading, palette, behind);
  expect(colours).toEqual(["#c", "#c", "#c", "#m"]);
  expect([...(strength ?? [])]).toEqual([1, 0.25, 1, 0]);
  expect(notes).toEqual(["4.00", "1.00", "4.00", ""]);
  expect(tintsOf("staleness", layout, reading, palette).notes).toEqual(["", "", "", ""]);
  expect([mostBehind(behind), mostBehind(new Map([["w", 0.2]])), mostBehind(new Map())]).toEqual([4, 1, 1]);
});

test("a box has the colour and the number of what a pass does in it", () => {
  const painted = { ...palette, bad: "#bad" } as Palette;
  const { colours, strength, notes } = tintsOfPass(layout, Uint8Array.from([1, 0, 0, 2]), painted);
  expect(colours).toEqual(["#bad", "#bad", "#m", "#o"]);
  expect([...(strength ?? [])]).toEqual([1 / 3, 1, 0, 1]);
  expect(notes).toEqual(["−1", "−1", "", "+1"]);
});

test("an address with another word has roles", () => {
  expect([tintOf(null), tintOf("memory"), tintOf("age")]).toEqual(["role", "memory", "role"]);
});
