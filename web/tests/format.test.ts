/** Words and numbers as the dashboard writes them. */
import { expect, test } from "vitest";
import { bytes, elapsed, firm, millis, nanos, seconds, sentenceAndError, shortType } from "../src/format";

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

/** As it is read: every space alike. */
const plain = (text: string) => text.replaceAll("\u00a0", " ");

test("no line parts a number from its unit", () => {
  const sentence = "7 % of each step waits for pserver-0; `fc_2` is 15.8 ms of it, 3 steps, 1.5 GiB after 2 min 5 s";
  const parts = firm(sentence).split(" ");
  expect(plain(firm(sentence))).toBe(sentence);
  expect(parts).toEqual(expect.arrayContaining(["7\u00a0%", "15.8\u00a0ms", "1.5\u00a0GiB", "2\u00a0min", "5\u00a0s"]));
  expect(parts).toEqual(expect.arrayContaining(["3", "steps,"])); // a count is free to part
  expect([bytes(999), bytes(2e6), nanos(5), nanos(2.5e6), millis(2e6), seconds(7)].join("")).not.toContain(" ");
});

test("a time is rounded before it is divided", () => {
  const written = [59.4, 59.6, 119.7, 3599.6, 86_399.6].map(seconds);
  expect(written.map(plain)).toEqual(["59 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "1 d 0 h"]);
  expect([seconds(75), seconds(3700), seconds(-1)].map(plain)).toEqual(["1 min 15 s", "1 h 1 min", "–"]);
});

test("a while on an axis has what tells it from its neighbours", () => {
  expect([0, 0.5, 42, 185, 7385, 273_600].map(elapsed)).toEqual([
    "0 s",
    "0.5 s",
    "42 s",
    "3:05",
    "2:03:05",
    "3 d 4:00",
  ]);
});
