/** What the header says of the findings, and how often it asks for them. */
import { expect, test } from "vitest";
import { ApiError } from "../src/api";
import {
  ASK_MS,
  DiagnosisStore,
  evidenceHref,
  findingsOf,
  partsOf,
  SILENT_MS,
  saysWhy,
  shownFindings,
} from "../src/store/diagnosis";
import type { Diagnosis, Finding, Job } from "../src/types";

const finding = (cause: string, share: number): Finding => ({
  cause,
  sentence: cause,
  share,
  ms: 1,
  place: "",
  tab: "graph",
  op: null,
  graph: null,
  query: {},
});

test("a healthy job has one sentence, a slow one a second if it is worth it", () => {
  const causes = (...list: Finding[]) => shownFindings(list).map((one) => one.cause);
  expect(causes()).toEqual([]);
  expect(causes(finding("healthy", 0.97), finding("input", 0.09))).toEqual(["healthy"]);
  expect(causes(finding("server", 0.5), finding("input", 0.09), finding("idle", 0.08))).toEqual(["server", "input"]);
  expect(causes(finding("server", 0.5), finding("input", 0.02))).toEqual(["server"]);
});

test("an unreachable node is named before what its last steps show", () => {
  const job = (...states: string[]) =>
    ({ state: "RUNNING", attempt: 2, replicas: states.map((state) => ({ state, attempt: 2 })) }) as unknown as Job;
  const stalled = [finding("stalled", 1)];
  expect(saysWhy(job("RUNNING", "RUNNING"), stalled)).toBe(false);
  expect(findingsOf(job("RUNNING", "RUNNING"), stalled)).toEqual(stalled);
  expect(saysWhy(job("RUNNING", "UNKNOWN"), stalled)).toBe(true);
  expect(findingsOf(job("RUNNING", "UNKNOWN"), [...stalled, finding("input", 0.3)])).toEqual([finding("input", 0.3)]);
  const before = { ...job("UNKNOWN"), attempt: 3 };
  expect(saysWhy(before, stalled)).toBe(false);
  expect(saysWhy(before, [])).toBe(true);
  expect(saysWhy({ ...before, state: "FAILED" }, stalled)).toBe(true);
});

test("a finding leads to what shows it: metric, lane, step and operator", () => {
  const at = "/jobs/j?tab=sync";
  expect(evidenceHref(at, finding("idle", 0.3))).toBe(at);
  expect(evidenceHref(at, { ...finding("server", 0.3), query: { metric: "wait" } })).toBe(`${at}&metric=wait`);
  expect(evidenceHref("/jobs/j", { ...finding("healthy", 0.9), op: 3 })).toBe("/jobs/j?op=3");
  const lane = { ...finding("trainer", 0.3), op: 4, query: { pin: "trainer-1.0", step: "417" } };
  expect(evidenceHref("/jobs/j?tab=timeline", lane)).toBe("/jobs/j?tab=timeline&pin=trainer-1.0&step=417&op=4");
});

test("names in a sentence are set apart", () => {
  expect(partsOf("`a 2 ms` is 2 ms of it").map((part) => [part.text, part.isName])).toEqual([
    ["", false],
    ["a 2 ms", true],
    [" is 2\u00a0ms of it", false],
  ]);
});

/** A store whose server answers, or fails. */
function asked(fails = false) {
  let count = 0;
  const answer: Diagnosis = { job_id: "j", attempt: 1, over: false, findings: [finding("input", 0.3)] };
  const store = new DiagnosisStore(async () => {
    count += 1;
    if (fails) throw new ApiError(503, "away");
    return answer;
  });
  return { store, count: () => count };
}

test("it is asked again when steps came, and at most every two seconds", async () => {
  const { store, count } = asked();
  await store.tick(0, 1, false);
  await store.tick(ASK_MS - 1, 2, false);
  expect(count()).toBe(1);
  await store.tick(ASK_MS, 2, false);
  await store.tick(2 * ASK_MS, 2, false);
  expect(count()).toBe(2);
});

test("it is asked when expected steps do not come, and once more when none are expected", async () => {
  const { store, count } = asked();
  await store.tick(0, 1, true);
  await store.tick(SILENT_MS, 1, true);
  expect(count()).toBe(2);
  await store.tick(3 * SILENT_MS, 1, false);
  expect(count()).toBe(3);
  await store.tick(9 * SILENT_MS, 1, false);
  expect(count()).toBe(3);
});

test("a job that is over is asked of until the server answers", async () => {
  const answers = [[finding("stalled", 1)], null, [finding("input", 0.3)], []];
  const store = new DiagnosisStore(async () => {
    const findings = answers.shift() ?? null;
    if (findings === null) throw new ApiError(503, "away");
    return { job_id: "j", attempt: 1, over: true, findings };
  });
  await store.tick(0, 1, true);
  await store.tick(ASK_MS, 1, false);
  expect(store.findings.value[0]?.cause).toBe("stalled");
  await store.tick(2 * ASK_MS, 1, false);
  expect(store.findings.value[0]?.cause).toBe("input");
  await store.tick(3 * ASK_MS, 1, false);
  expect(answers).toHaveLength(1);
});

test("what was said stays when the server does not answer", async () => {
  const { store } = asked(true);
  store.findings.value = [finding("server", 0.4)];
  await store.tick(0, 1, true);
  expect(store.findings.value).toHaveLength(1);
});
