/** What the list of jobs, the nodes and a job's facts add to the numbers: courses, phases, differences. */
import { describe, expect, test } from "vitest";
import { ApiError } from "../src/api";
import { lineOf } from "../src/parts/sparkline";
import { comparison } from "../src/store/differences";
import { compared } from "../src/store/optimes";
import { phasesOf, spanOf } from "../src/store/phases";
import { MOST_POINTS, Trends } from "../src/store/trends";
import type { EventRow, Job, OperatorTimes } from "../src/types";

describe("a sparkline", () => {
  test("goes from edge to edge, and leaves out what is no number", () => {
    expect(lineOf({ at: [0, 5, 7, 10], values: [1, 3, Number.NaN, 2] })).toBe("2.0,16.0 36.0,2.0 70.0,9.0");
  });
  test("keeps to the bounds that it was given", () => {
    expect(lineOf({ at: [0, 1], values: [50, 400], bounds: [0, 100] })).toBe("2.0,9.0 70.0,2.0");
  });
  test("of equal values lies in the middle; of fewer than two is none", () => {
    expect(lineOf({ at: [1, 2], values: [3, 3] })).toBe("2.0,9.0 70.0,9.0");
    expect(lineOf({ at: [1, 2], values: [3, Number.NaN] })).toBe("");
  });
});

/** What the server answers to each question for a job's loss, in its order. */
function asked(answers: Readonly<Record<string, number[] | ApiError>>) {
  const questions: string[] = [];
  let open = 0;
  let most = 0;
  const trends = new Trends(async (jobId) => {
    questions.push(jobId);
    open += 1;
    most = Math.max(most, open);
    await Promise.resolve();
    open -= 1;
    const found = answers[jobId];
    if (found instanceof ApiError) throw found;
    const value = found ?? [];
    return { series: { loss: { step: value.map((_, i) => i), time_ns: value.map((_, i) => i), value } } };
  });
  return { trends, questions, most: () => most };
}
const settled = () => new Promise((done) => setTimeout(done, 0));

describe("the course of the loss", () => {
  test("is asked for once a job, of one job at a time", async () => {
    const { trends, questions, most } = asked({ a: [3, 2], b: [9, 8] });
    for (const id of ["a", "b", "a"]) trends.want(id);
    await settled();
    trends.want("b");
    await settled();
    expect([questions, most()]).toEqual([["a", "b"], 1]);
    expect(trends.of("a")?.loss).toEqual([3, 2]);
  });

  test("is carried on from the stream by newer steps alone, and stays short", async () => {
    const { trends } = asked({ a: [3, 2] });
    trends.carryOn("a", 9, 1);
    trends.want("a");
    await settled();
    trends.carryOn("a", 1, 7);
    trends.carryOn("a", 5, 1.5);
    expect(trends.of("a")).toEqual({ step: [0, 1, 5], loss: [3, 2, 1.5] });
    for (let step = 6; step < 1000; step++) trends.carryOn("a", step, step);
    expect(trends.of("a")?.step.length).toBeLessThanOrEqual(2 * MOST_POINTS);
    expect(trends.of("a")?.loss.at(-1)).toBe(999);
  });

  test("that was refused is asked for again when the row is in view again", async () => {
    const { trends, questions } = asked({ a: new ApiError(503, "no"), b: [1, 2] });
    trends.want("a");
    trends.want("b");
    await settled();
    expect([trends.of("a"), trends.of("b")?.loss]).toEqual([null, [1, 2]]);
    trends.want("a");
    await settled();
    expect(questions).toEqual(["a", "b", "a"]);
  });
});

const at = (second: number) => new Date(second * 1000).toISOString();
const change = (second: number, to: string, more: Partial<EventRow> = {}): EventRow =>
  ({
    id: `${second}`,
    at: at(second),
    kind: "job",
    subject: "j",
    from: null,
    to,
    reason: "",
    detail: "",
    ...more,
  }) as EventRow;

describe("a job's phases", () => {
  const events = [
    change(70, "FAILED"),
    change(60, "RUNNING"),
    change(0, "QUEUED"),
    change(10, "STARTING"),
    change(11, "RUNNING", { kind: "replica" }),
    change(12, "RUNNING"),
    change(40, "RECOVERING", { reason: "lost" }),
    change(50, "STARTING"),
  ];
  test("are in the order of time, each with its attempt; its end is none", () => {
    const found = phasesOf({ attempt: 2, finished_at: at(70) } as Job, events, 99_000);
    expect(found.map((one) => [one.state, one.attempt, (one.toMs - one.fromMs) / 1000])).toEqual([
      ["QUEUED", 0, 10],
      ["STARTING", 1, 2],
      ["RUNNING", 1, 28],
      ["RECOVERING", 1, 10],
      ["STARTING", 2, 10],
      ["RUNNING", 2, 10],
    ]);
    expect([spanOf(found), found[3]?.reason]).toEqual([70_000, "lost"]);
  });
  test("go on until now while it runs", () => {
    const found = phasesOf(
      { attempt: 1, finished_at: null } as Job,
      [change(3, "STARTING"), change(5, "RUNNING")],
      9000,
    );
    expect(found.map((one) => [one.state, one.toMs])).toEqual([
      ["STARTING", 5000],
      ["RUNNING", 9000],
    ]);
  });
  test("that began at one moment are in the order of their events", () => {
    const job = { attempt: 1, finished_at: null } as Job;
    const found = phasesOf(job, [change(3, "RUNNING", { id: "b" }), change(3, "CREATED", { id: "a" })], 9000);
    expect(found.map((one) => [one.state, one.toMs - one.fromMs])).toEqual([
      ["CREATED", 0],
      ["RUNNING", 6000],
    ]);
  });
  test("of a job without events take no time", () => {
    expect(spanOf(phasesOf({ attempt: 0, finished_at: null } as Job, [], 9000))).toBe(0);
  });
});

describe("settings that differ", () => {
  const job = (spec: object): Job => ({ spec }) as unknown as Job;
  test("are those whose values are not all the same", () => {
    const one = job({
      name: "a",
      env: { CPU_NUM: "2" },
      trainers: { count: 1, cpus: 2 },
      entrypoint: ["python", "a.py"],
    });
    const two = job({
      name: "b",
      env: {},
      trainers: { count: 4, cpus: 2 },
      entrypoint: ["python", "a.py"],
      priority: 3,
    });
    expect(comparison([one, two]).found).toEqual([
      { setting: "env.CPU_NUM", values: ["2", null] },
      { setting: "trainers.count", values: ["1", "4"] },
      { setting: "priority", values: [null, "3"] },
    ]);
  });
  test("of equal jobs are none", () => {
    expect(comparison([job({ name: "a", env: {} }), job({ name: "b", env: {} })]).found).toEqual([]);
  });
});

describe("times of operators of several jobs", () => {
  const times = (...operators: [name: string, count: number, total_ns: number][]): OperatorTimes =>
    ({ operators: operators.map(([name, count, total_ns]) => ({ name, role: "forward", count, total_ns })) }) as never;
  test("are those of a step, replicas added up, largest difference first", () => {
    const here = times(["fc", 10, 1000], ["fc", 20, 4000], ["relu", 10, 100], ["mean", 10, 50]);
    const there = times(["fc", 5, 1000], ["relu", 10, 400], ["softmax", 10, 70]);
    expect(compared([here, there]).map((one) => [one.name, one.stepNs])).toEqual([
      ["fc", [300, 200]],
      ["relu", [10, 40]],
      ["softmax", [null, 7]],
      ["mean", [5, null]],
    ]);
  });
  test("of jobs that recorded nothing are none", () => {
    expect(compared([times(), times()])).toEqual([]);
  });
});
