/** Words and numbers as the dashboard writes them. */
import { expect, test } from "vitest";
import { sentenceAndError, shortType } from "../src/format";

test("a failed job says its sentence and the last line of its log, where a traceback has the error", () => {
  const why =
    "trainer 0 exited with code 1\nTraceback (most recent call last):\n  File x, line 1\nValueError: boom\n\n";
  expect(sentenceAndError(why)).toEqual(["trainer 0 exited with code 1", "ValueError: boom"]);
});

test("a sentence alone has no error", () => {
  expect(sentenceAndError("runs 2 trainers on node 'vm'")).toEqual(["runs 2 trainers on node 'vm'", ""]);
  expect(sentenceAndError("")).toEqual(["", ""]);
});

test("a box has the operator's own name, and a fused product of matrices is a matmul", () => {
  expect(shortType("aten.addmm.default")).toBe("addmm");
  expect(shortType("aten.threshold_backward.default")).toBe("threshold grad");
  expect(shortType("penstock.product.default")).toBe("matmul");
});
