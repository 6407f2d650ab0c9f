/** Which rank is late, in which steps, and whether in its operators or between its steps. */
import { describe, expect, test } from "vitest";
import { moved, rankMap, type Track } from "../src/store/ranks";
import { Series } from "../src/store/series";

interface Made {
  readonly inside: (step: number) => number;
  readonly between: (step: number) => number;
  readonly wait: (step: number) => number;
}

/** Steps of a trainer: each waits within it, to a total that is reported every tenth step. */
function track({ inside, between, wait }: Made, steps = 120, by: "servers" | "ranks" = "servers"): Track {
  const [stepMs, syncMs] = [new Series(), new Series()];
  const waits = [{ step: 0, waitNs: 0 }];
  let [time, total] = [1e9, 0];
  for (let step = 1; step <= steps; step++) {
    time += (inside(step) + between(step) + wait(step)) * 1e6;
    total += wait(step) * 1e6;
    const at = { step: [step], time_ns: [time] };
    stepMs.append({ ...at, value: [inside(step) + wait(step)] });
    syncMs.append({ ...at, value: [wait(step)] });
    if (step % 10 === 0) waits.push({ step, waitNs: total });
  }
  return { stepMs, syncMs, waits: by === "servers" ? waits : [] };
}

const early: Made = { inside: () => 10, between: () => 1, wait: () => 20 };
const slow: Made = { inside: () => 30, between: () => 1, wait: () => 0 };

describe("ranks by steps", () => {
  test.each(["servers", "ranks"] as const)("name the one that the others wait for (%s)", (by) => {
    const map = rankMap(new Map([early, slow, early].map((made, rank) => [rank, track(made, 120, by)])));
    expect(map?.totals.map((one) => [Math.round(one?.lateMs ?? -1), Math.round(one?.waitMs ?? -1)])).toEqual([
      [0, 20],
      [20, 0],
      [0, 20],
    ]);
    expect([map?.totals[1]?.cause, Math.round(map?.turnMs ?? 0), map?.bins.length]).toEqual(["inside", 31, 60]);
    expect(map?.bins[59]).toEqual({ from: 120, to: 120 });
  });

  test("tell a slow reader from slow operators, and in which steps it was", () => {
    const late = (step: number) => (step > 90 ? 25 : 1);
    const reader: Made = { inside: () => 10, between: late, wait: () => 20 };
    const other: Made = { inside: () => 10, between: () => 1, wait: (step) => (step > 90 ? 44 : 20) };
    const map = rankMap(
      new Map([
        [0, track(other)],
        [4, track(reader)],
      ]),
    );
    expect(map?.ranks).toEqual([0, 4]);
    const lateAt = (step: number) => map?.cells[1]?.[map.bins.findIndex((bin) => bin.from <= step && step <= bin.to)];
    expect([lateAt(80)?.lateMs, lateAt(110)?.cause]).toEqual([0, "between"]);
    expect(lateAt(110)?.lateMs).toBeCloseTo(24, 5);
  });

  test("are none without a second rank, and a rank that is silent has no cells", () => {
    expect(rankMap(new Map([[0, track(early)]]))).toBeNull();
    const map = rankMap(
      new Map([
        [0, track(early)],
        [1, track(early, 90)],
      ]),
    );
    expect([map?.cells[1]?.at(-1), map?.cells[1]?.[0]?.lateMs]).toEqual([null, 0]);
  });
});

test("keys go from cell to cell and stop at the edges of the map", () => {
  const path = (keys: readonly string[]) =>
    keys.reduce((at, key) => moved(at, key, 3, 60) ?? { rank: -1, bin: -1 }, { rank: 0, bin: 59 });
  expect(path(["ArrowRight"])).toEqual({ rank: 0, bin: 59 });
  expect(path(["ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowDown"])).toEqual({ rank: 1, bin: 57 });
  expect(path(["ArrowDown", "ArrowDown", "ArrowDown", "Home", "ArrowLeft"])).toEqual({ rank: 2, bin: 0 });
  expect(path(["Home", "ArrowRight", "End"])).toEqual({ rank: 0, bin: 59 });
  expect(moved({ rank: 0, bin: 0 }, "x", 3, 60)).toBeNull();
});
