/** The part that all views show: steps in the address, times of logs that belong to them. */
import { describe, expect, test } from "vitest";
import { brushOf, timesOf, zoomFields, zoomOf } from "../src/store/brush";
import { SeriesStore } from "../src/store/series";

const address = (text: string) => new URLSearchParams(text);

describe("a brush", () => {
  test("is a range of steps; one step is none", () => {
    expect(brushOf(address("step=120-160"))).toEqual({ first: 120, last: 160 });
    expect([brushOf(address("step=120")), brushOf(address("")), brushOf(address("step=x-9"))]).toEqual([
      null,
      null,
      null,
    ]);
  });

  test("zooms charts by step, and a time those by time", () => {
    const both = address("step=120-160&zoom=1.5..80");
    expect([zoomOf(both, "step"), zoomOf(both, "time")]).toEqual([
      [120, 160],
      [1.5, 80],
    ]);
    for (const text of ["zoom=80..1", "zoom=x..2", "zoom=3", ""]) expect(zoomOf(address(text), "time")).toBeNull();
  });

  test("that a chart made is what it shows after", () => {
    for (const [axis, from, to] of [
      ["time", 0.123456789, 7200.5],
      ["step", 3.4, 17.6],
      ["step", 8.1, 8.4],
      ["step", -2, 5],
    ] as const) {
      const fields = Object.entries(zoomFields(axis, from, to)).filter(([, value]) => value !== null);
      const [a, b] = zoomOf(address(new URLSearchParams(fields as [string, string][]).toString()), axis) ?? [0, 0];
      expect(b).toBeGreaterThan(a);
      expect(Math.abs(a - Math.max(0, from))).toBeLessThan(0.6);
      expect(Math.abs(b - to)).toBeLessThan(1);
    }
  });
});

test("a series that counts epochs, and a trainer that is behind, hide no lines", () => {
  const series = new SeriesStore();
  const ns = (ms: number) => ms * 1e6;
  const of = (at: number[]) => ({ step: [1, 2, 3], time_ns: at.map(ns), value: [1, 1, 1] });
  series.append({ step_ms: of([100, 200, 300]), "step_ms.trainer1": of([150, 250, 350]), auc: of([0, 5000, 9000]) });
  expect(timesOf(series, { first: 2, last: 3 })).toEqual([100, 1350]);
});

test("lines of steps come from the end of the step before until a second after the last", () => {
  const series = new SeriesStore();
  const ns = (ms: number) => ms * 1e6;
  series.append({ loss: { step: [1, 2, 3, 4], time_ns: [ns(100), ns(200), ns(300), ns(400)], value: [1, 1, 1, 1] } });
  expect(timesOf(series, { first: 2, last: 3 })).toEqual([100, 1300]);
  expect(timesOf(series, { first: 1, last: 9 })).toEqual([Number.NEGATIVE_INFINITY, 1400]);
  expect(timesOf(series, { first: 7, last: 9 })).toBeNull();
});
