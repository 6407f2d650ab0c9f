/** What colours of boxes say besides roles. */
import { expect, test } from "vitest";
import type { Layout } from "../src/graph/layout";
import { replicaColours, tintOf, tintsOf } from "../src/graph/tints";
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

test("an address with another word has roles", () => {
  expect([tintOf(null), tintOf("memory"), tintOf("staleness")]).toEqual(["role", "memory", "role"]);
});
