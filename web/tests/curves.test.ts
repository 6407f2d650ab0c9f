/** Charts of several trainers: one scale, values at the crosshair, the best, and the last step. */
import { expect, test } from "vitest";
import {
  aboveZero,
  bestOf,
  curvesOf,
  gapsOf,
  joined,
  newestStep,
  smoothed,
  splitName,
  valueAt,
} from "../src/store/curves";
import { Series, SeriesStore } from "../src/store/series";

function store(set: Record<string, [number, number][]>): SeriesStore {
  const made = new SeriesStore();
  for (const [name, points] of Object.entries(set)) {
    const step = points.map(([at]) => at);
    made.append({ [name]: { step, time_ns: step.map((at) => at * 1000), value: points.map(([, value]) => value) } });
  }
  return made;
}

test("the name of a series says whose it is", () => {
  expect(splitName("loss")).toEqual({ base: "loss", who: "" });
  expect(splitName("loss.trainer12")).toEqual({ base: "loss", who: "trainer 12" });
  expect(splitName("auc/valid.v2")).toEqual({ base: "auc/valid.v2", who: "" });
});

test("trainers have one chart, in their order, with values where each has them", () => {
  const found = curvesOf(
    store({
      "loss.trainer10": [[1, 3]],
      "loss.trainer2": [[2, 5]],
      loss: [
        [1, 7],
        [3, 8],
      ],
    }),
  );
  const curves = found.get("loss") ?? [];
  expect(curves.map((curve) => curve.who)).toEqual(["trainer 0", "trainer 2", "trainer 10"]);
  expect(joined(curves)).toEqual([
    [1, 2, 3],
    [7, undefined, 8],
    [undefined, 5, undefined],
    [3, undefined, undefined],
  ]);
});

test("another job's curve stands behind those of this one, by its name", () => {
  const other = { id: "j2", name: "before", series: store({ loss: [[1, 9]], other: [[1, 1]] }) };
  const found = curvesOf(store({ loss: [[1, 7]] }), [other]);
  expect([...found.keys()]).toEqual(["loss"]);
  expect(found.get("loss")?.map((curve) => [curve.who, curve.series.latest])).toEqual([
    ["this job", 7],
    ["before", 9],
  ]);
});

test("each curve of a chart has a key of its own", () => {
  const other = (id: string) => ({ id, name: "the same", series: store({ loss: [[1, 9]] }) });
  const curves = curvesOf(store({ loss: [[1, 7]], "loss.trainer1": [[1, 7]] }), [other("j2"), other("j3")]).get("loss");
  expect(new Set(curves?.map((curve) => curve.key)).size).toBe(4);
});

test("a pause of a process is a gap in its curve", () => {
  const series = new Series();
  const second = 1e9;
  series.append({ step: [1, 2, 3, 4], time_ns: [1, 2, 3, 63].map((at) => at * second), value: [5, 5, 4, 4] });
  const curve = { key: "loss", name: "loss", who: "", series, originNs: second };
  expect(gapsOf(curve, "step")).toEqual([3.5]);
  expect(joined([curve])).toEqual([
    [1, 2, 3, 3.5, 4],
    [5, 5, 4, null, 4],
  ]);
  expect(joined([curve], "time")).toEqual([
    [0, 1, 2, 32, 62],
    [5, 5, 4, null, 4],
  ]);
});

test("by time each job's curves begin at its own first point", () => {
  const late = new SeriesStore();
  late.append({ loss: { step: [1, 2], time_ns: [70e9, 80e9], value: [9, 8] } });
  const mine = new SeriesStore();
  mine.append({ step_ms: { step: [1], time_ns: [2e9], value: [1] } });
  mine.append({ loss: { step: [1, 2], time_ns: [4e9, 12e9], value: [7, 6] } });
  const curves = curvesOf(mine, [{ id: "j2", name: "before", series: late }]).get("loss") ?? [];
  expect(joined(curves, "time")).toEqual([
    [0, 2, 10],
    [undefined, 7, 6],
    [9, undefined, 8],
  ]);
  expect(curves.map((curve) => [0, 2, 9, 10].map((at) => valueAt(curve, at, "time")))).toEqual([
    [Number.NaN, 7, 7, 6],
    [9, 9, 9, 8],
  ]);
});

test("by time a process that began again goes on to the right", () => {
  const series = new Series();
  series.append({ step: [1, 2, 1, 2], time_ns: [1e9, 2e9, 9e9, 10e9], value: [4, 3, 4, 2] });
  const curve = { key: "loss", name: "loss", who: "", series, originNs: 1e9 };
  expect(joined([curve], "step")).toEqual([
    [1, 2],
    [4, 2],
  ]);
  expect(joined([curve], "time")[0]).toEqual([0, 1, 8, 9]);
});

test("smoothing begins at the first value and keeps gaps; a log axis has none below zero", () => {
  expect(
    smoothed([4, undefined, 4, null, 4], 0.9).map((one) => (one == null ? one : Math.round(one * 1e6) / 1e6)),
  ).toEqual([4, undefined, 4, null, 4]);
  const [, second] = smoothed([0, 10], 0.5);
  expect(second).toBeCloseTo(10 / 1.5, 6);
  expect(aboveZero([1, 0, -2, null, undefined])).toEqual([1, null, null, null, undefined]);
});

test("one trainer alone needs no name", () => {
  expect(curvesOf(store({ loss: [[1, 7]] })).get("loss")?.[0]?.who).toBe("");
});

test("the value at a crosshair is that of the newest point at or before its step", () => {
  const points: [number, number][] = [
    [10, 4],
    [20, 3],
  ];
  const [curve] = curvesOf(store({ loss: points })).get("loss") ?? [];
  if (curve === undefined) throw new Error("no curve");
  expect([9, 10, 19, 20, 99].map((step) => valueAt(curve, step))).toEqual([Number.NaN, 4, 4, 3, 3]);
});

test("the best of a score is named with its step; a loss has none", () => {
  const made = store({
    test_auc: [
      [300, 0.77],
      [600, 0.791],
      [900, 0.788],
    ],
    loss: [[1, 0.2]],
  });
  const of = (name: string) => {
    const series = made.byName.get(name);
    return series === undefined ? null : bestOf(name, series);
  };
  expect(of("test_auc")).toEqual({ value: 0.791, step: 600 });
  expect(of("loss")).toBeNull();
});

test("the last step is the one that the progress counts, where metrics are thinned", () => {
  expect(newestStep(6060, 6059)).toBe(6060);
  expect(newestStep(null, 41)).toBe(41);
});
