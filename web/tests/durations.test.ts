/** Percentiles of operators' runs from counts in bins, against sorted ones. */
import { expect, test } from "vitest";
import { Durations } from "../src/store/durations";

/** The smallest duration that a share of all does not exceed. */
const exact = (all: readonly number[], share: number): number =>
  [...all].sort((a, b) => a - b)[Math.ceil(share * all.length) - 1] ?? 0;

/** Numbers that look random, the same in each run: a linear congruence. */
function* numbers(seed: number): Generator<number> {
  for (let state = seed; ; ) {
    state = (1103515245 * state + 12345) % 2 ** 31;
    yield state / 2 ** 31;
  }
}

test("percentiles are within 4.5 % of those of the sorted durations", () => {
  for (const seed of [1, 2, 3, 4, 5]) {
    const random = numbers(seed);
    const all = Array.from({ length: 700 }, () => Math.round(Math.exp((random.next().value as number) * 20)));
    const durations = new Durations();
    for (const [i, ns] of all.entries()) durations.add(i % 3, ns);
    const spread = durations.of([0, 1, 2]);
    expect(spread?.runs).toBe(700);
    for (const [found, share] of [
      [spread?.p50, 0.5],
      [spread?.p99, 0.99],
    ] as const) {
      const wanted = exact(all, share);
      expect(Math.abs((found ?? 0) / wanted - 1)).toBeLessThan(0.045);
    }
  }
});

test("durations at the edges of what an event can have are counted", () => {
  const durations = new Durations();
  for (const ns of [0, 0, 2 ** 32 - 1]) durations.add(7, ns);
  const spread = durations.of([7]);
  expect([spread?.runs, spread?.p50]).toEqual([3, 0]);
  expect(spread?.p99).toBeGreaterThan(2 ** 31.9);
});

test("no percentile is longer than the longest run", () => {
  const durations = new Durations();
  for (const ns of [1050, 1060, 1070]) durations.add(1, ns);
  durations.add(2, 1065);
  expect(durations.of([2])?.p99).toBe(1065);
  expect(durations.of([1, 2])?.p99).toBeLessThanOrEqual(1070);
});

test("operators of which no run was added have none", () => {
  const durations = new Durations();
  expect(durations.of([1])).toBeNull();
  durations.add(1, 5);
  expect(durations.of([1, 2])?.runs).toBe(1);
});
