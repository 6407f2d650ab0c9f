/** Jobs beside each other: which are wanted, whose answers are shown, and what the comparison leaves out. */
import { describe, expect, test } from "vitest";
import { ApiError } from "../src/api";
import { checkpointsOf, duration } from "../src/store/checkpoints";
import { comparison, remarks } from "../src/store/differences";
import { answeredFor, readTimes } from "../src/store/optimesread";
import { MOST_RUNS, wantedOf } from "../src/store/runs";
import { Series } from "../src/store/series";
import type { Job, OperatorTimes } from "../src/types";

const timesOf = (id: string): OperatorTimes => ({ job_id: id, operators: [] }) as unknown as OperatorTimes;
const unaborted = () => new AbortController().signal;

describe("the jobs of the address", () => {
  test("are each wanted once", () => {
    expect(wantedOf("b,,c,b")).toEqual(["b", "c"]);
    expect(wantedOf(null)).toEqual([]);
  });
  test("are no more than the charts show", () => {
    const ids = Array.from({ length: MOST_RUNS + 5 }, (_, index) => `job${index}`);
    expect(wantedOf(ids.join())).toEqual(ids.slice(0, MOST_RUNS));
  });
});

describe("times of operators", () => {
  test("are read one job after the other", async () => {
    const log: string[] = [];
    await readTimes(
      ["a", "b"],
      async (id) => {
        log.push(`${id} asked`);
        await Promise.resolve();
        log.push(`${id} answered`);
        return timesOf(id);
      },
      unaborted(),
    );
    expect(log).toEqual(["a asked", "a answered", "b asked", "b answered"]);
  });
  test("of jobs that are no longer wanted are not shown", async () => {
    const read = await readTimes(["a", "b"], async (id) => timesOf(id), unaborted());
    expect(answeredFor(read, ["a", "c"])).toBeNull();
    expect(answeredFor(read, ["a", "b"])?.jobs.map(({ id }) => id)).toEqual(["a", "b"]);
    expect(answeredFor(null, ["a"])).toBeNull();
  });
  test("are nothing once the reading is aborted, and no further job is asked", async () => {
    const reading = new AbortController();
    const asked: string[] = [];
    const answer = async (id: string) => {
      asked.push(id);
      reading.abort();
      return timesOf(id);
    };
    expect(await readTimes(["a", "b"], answer, reading.signal)).toBeNull();
    expect(asked).toEqual(["a"]);
  });
  test("of one job that is refused leave those of the others", async () => {
    const gone = new ApiError(404, "no job b");
    const answer = async (id: string) => (id === "b" ? Promise.reject(gone) : timesOf(id));
    const answered = answeredFor(await readTimes(["a", "b", "c"], answer, unaborted()), ["a", "b", "c"]);
    expect(answered?.jobs.map(({ id, times }) => [id, times.job_id])).toEqual([
      ["a", "a"],
      ["c", "c"],
    ]);
    expect(answered?.refused).toEqual([{ id: "b", error: gone }]);
  });
  test("raise what is no answer of the API", async () => {
    await expect(readTimes(["a"], () => Promise.reject(new TypeError("bug")), unaborted())).rejects.toThrow("bug");
  });
});

describe("a comparison of settings", () => {
  const job = (env: Record<string, string>): Job => ({ spec: { env } }) as unknown as Job;
  test("does not compare hidden values", () => {
    const both = comparison([job({ KEY: "***" }), job({ KEY: "***" })]);
    expect(both).toEqual({ found: [], hidden: ["env.KEY"] });
    expect(comparison([job({ KEY: "***" }), job({ KEY: "shown" })])).toEqual({ found: [], hidden: ["env.KEY"] });
    expect(remarks(2, both, [])).toEqual([
      "No difference in the settings whose values are shown.",
      "Hidden values are not compared: env.KEY.",
    ]);
  });
  test("finds a hidden value that only one job has", () => {
    expect(comparison([job({ KEY: "***" }), job({})])).toEqual({
      found: [{ setting: "env.KEY", values: ["***", null] }],
      hidden: [],
    });
  });
  test("names the jobs whose settings it does not have", () => {
    const none = { found: [], hidden: [] };
    const left = "Settings are not compared of jobs outside the loaded list: 1a2b3c4d.";
    expect(remarks(1, none, ["1a2b3c4d"])).toEqual([left]);
    expect(remarks(2, none, ["1a2b3c4d"])).toEqual(["The loaded jobs have the same settings.", left]);
    expect(remarks(2, none, [])).toEqual(["The jobs have the same settings."]);
  });
  test("names no more than a few", () => {
    const hidden = Array.from({ length: 10 }, (_, index) => `env.V${index}`);
    expect(remarks(2, { found: [], hidden }, [])[1]).toMatch(/env\.V7 and 2 more\.$/);
  });
});

test("a checkpoint whose time is not among the points has a dash", () => {
  const series = (time_ns: number[], value: number[]) => {
    const made = new Series();
    made.append({ step: value.map((_, index) => index), time_ns, value });
    return made;
  };
  const rows = checkpointsOf(series([1, 2], [10, 20]), series([2], [0.25]));
  expect(rows.map(({ step, tookS }) => [step, duration(tookS)])).toEqual([
    [10, "–"],
    [20, "0.25\u00a0s"],
  ]);
});
