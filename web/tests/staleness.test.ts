/** How old the parameters are that operators read, from what servers counted by block. */
import { expect, test } from "vitest";
import type { BlockRow, ExchangeView } from "../src/store/exchange";
import { behindAt, behindOf } from "../src/store/staleness";
import type { GraphDocument } from "../src/types";

const row = (block: string, staleness: number, pushes = 10, pserver = 0) =>
  ({ block, staleness, pushes, pserver }) as BlockRow;
const view = (...blocks: BlockRow[]) => ({ blocks }) as unknown as ExchangeView;
const reads = (...names: string[]) => ({ inputs: names.map((name) => ({ name })) });
const document = { ops: [reads("w", "x"), reads("b"), reads("x"), reads("table", "b")] } as unknown as GraphDocument;

test("a parameter in blocks is as old as its oldest block", () => {
  const behind = behindOf(view(row("w.block0", 0.5), row("w.block1", 2, 10, 1), row("b", 0)));
  expect([behind.get("w"), behind.get("b")]).toEqual([2, 0]);
});

test("blocks without a push, of a queue, or without a name say nothing", () => {
  expect(behindOf(view(row("w", 0, 0), row("b", 1, 10, -1), row("", 3))).size).toBe(0);
  expect(behindOf(null).size).toBe(0);
});

test("operators are as far behind as the oldest parameter that they read", () => {
  const behind = behindOf(view(row("w", 0.5), row("b", 0), row("table", 3)));
  expect(behindAt(document, [0], behind)).toBe(0.5);
  expect(behindAt(document, [1], behind)).toBe(0);
  expect(behindAt(document, [0, 1, 3], behind)).toBe(3);
  expect(behindAt(document, [2], behind)).toBeNaN();
  expect(behindAt(document, [], behind)).toBeNaN();
});
