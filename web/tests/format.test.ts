/** Words and numbers as the dashboard writes them. */
import { expect, test } from "vitest";
import { seconds, sentenceAndError, shortType } from "../src/format";

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

test("a time is rounded before it is divided", () => {
  const written = [59.4, 59.6, 119.7, 3599.6, 86_399.6].map(seconds);
  expect(written).toEqual(["59 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "1 d 0 h"]);
  expect([seconds(75), seconds(3700), seconds(-1)]).toEqual(["1 min 15 s", "1 h 1 min", "–"]);
});
