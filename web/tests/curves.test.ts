/** Charts of several trainers: one scale, values at the crosshair, the best, and the last step. */
import { expect, test } from "vitest";
import { bestOf, curvesOf, joined, newestStep, splitName, valueAt } from "../src/store/curves";
import { SeriesStore } from "../src/store/series";

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
    [7, null, 8],
    [null, 5, null],
    [3, null, null],
  ]);
});

test("one trainer alone needs no name", () => {
  expect(curvesOf(store({ loss: [[1, 7]] })).get("loss")?.[0]?.who).toBe("");
});

test("the value at a crosshair is that of the newest point at or before its step", () => {
  const series = store({
    loss: [
      [10, 4],
      [20, 3],
    ],
  }).byName.get("loss");
  if (series === undefined) throw new Error("no series");
  expect([9, 10, 19, 20, 99].map((step) => valueAt(series, step))).toEqual([Number.NaN, 4, 4, 3, 3]);
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
