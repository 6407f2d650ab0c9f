/** Rows of a live table stay where they are for long enough to be read. */
import { expect, test } from "vitest";
import { HeldOrder, HOLD_MS } from "../src/store/order";

const row = (id: string, wait: number) => ({ id, wait });
type Row = ReturnType<typeof row>;
const arranged = (order: HeldOrder, rows: readonly Row[], at: number): string =>
  order
    .arrange(
      rows,
      (one) => one.id,
      (a, b) => b.wait - a.wait,
      at,
    )
    .map((one) => one.id)
    .join("");

test("rows keep their places while their numbers change, and are sorted again after a while", () => {
  const order = new HeldOrder();
  expect(arranged(order, [row("a", 1), row("b", 2)], 0)).toBe("ba");
  for (let at = 250; at < HOLD_MS; at += 250) expect(arranged(order, [row("a", 9), row("b", 2)], at)).toBe("ba");
  expect(arranged(order, [row("a", 9), row("b", 2)], HOLD_MS)).toBe("ab");
});

test("a new row comes last until the next sorting, one that is gone leaves no gap", () => {
  const order = new HeldOrder();
  arranged(order, [row("a", 1), row("b", 2)], 0);
  expect(arranged(order, [row("c", 9), row("a", 1)], 100)).toBe("ac");
});
