/** Other jobs beside a job's curves: each is fetched once, and one that cannot be fetched is not asked for for ever. */
import { expect, test } from "vitest";
import { ApiError } from "../src/api";
import { OtherRuns } from "../src/store/runs";
import type { SeriesSet } from "../src/types";

/** A server that has the jobs of `values`, and notes what it was asked for. */
function server(values: Record<string, number>) {
  const asked: string[] = [];
  const fetchSeries = async (id: string): Promise<{ series: SeriesSet }> => {
    asked.push(id);
    const value = values[id];
    if (value === undefined) throw new ApiError(404, `no job ${id}`);
    return { series: { loss: { step: [1], time_ns: [1], value: [value] } } };
  };
  return { asked, values, runs: new OtherRuns(fetchSeries) };
}

const latest = (runs: OtherRuns) => runs.shown().map(({ name, series }) => [name, series.byName.get("loss")?.latest]);

test("a job that cannot be fetched is asked for once, and its error stays, until others are wanted", async () => {
  const { asked, runs } = server({ here: 3 });
  for (let second = 0; second < 3; second++) {
    runs.name(new Map([["here", `at ${second}`]]));
    await runs.want(["gone", "here"]);
    await runs.refresh(() => true);
    expect([runs.error.value?.message, latest(runs)]).toEqual(["no job gone", [[`at ${second}`, 3]]]);
  }
  expect(asked.filter((id) => id === "gone")).toEqual(["gone"]);
  await runs.want(["here"]);
  expect(runs.error.value).toBeNull();
  await runs.want(["gone"]);
  expect(asked.filter((id) => id === "gone")).toEqual(["gone", "gone"]);
});

test("a job that goes on is fetched again, one that is over is not", async () => {
  const { asked, values, runs } = server({ over: 1, running: 2 });
  await runs.want(["over", "running"]);
  values.running = 5;
  const before = runs.version.value;
  await runs.refresh((id) => id === "running");
  expect([asked, runs.version.value > before]).toEqual([["over", "running", "running"], true]);
  expect(latest(runs)).toEqual([
    ["over", 1],
    ["running", 5],
  ]);
});

test("names alone ask for nothing, and draw again only where one changed", async () => {
  const { asked, runs } = server({ a: 1 });
  await runs.want(["a"]);
  const before = runs.version.value;
  runs.name(new Map([["b", "other"]]));
  expect(runs.version.value).toBe(before);
  runs.name(new Map([["a", "mine"]]));
  expect([runs.version.value, asked, latest(runs)]).toEqual([before + 1, ["a"], [["mine", 1]]]);
});
