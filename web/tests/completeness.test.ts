/** What became of telemetry: asked for while the job runs and until its last counts are there; every term, with its reasons. */
import { expect, test } from "vitest";
import { ApiError } from "../src/api";
import { ASK_MS, CompletenessStore, terms, unexplained } from "../src/store/completeness";
import type { CountedRows, TelemetryCompleteness } from "../src/types";

const rows = (changes: Partial<CountedRows> = {}): CountedRows => ({
  kind: "OP_EVENTS",
  produced: 100,
  shown: 60,
  sampled_out: 30,
  dropped: [{ reason: "agent_buffer_full", text: "beyond the agent's buffer", rows: 10 }],
  expired: [],
  pending: 0,
  unexplained: 0,
  ...changes,
});

const answer = (unknown: readonly (string | null)[] = []): TelemetryCompleteness => ({
  job_id: "j",
  holds: true,
  sentence: "",
  notes: [],
  rows: [rows()],
  processes: unknown.map((unknown_since, index) => ({
    replica_id: `${index}`,
    role: "trainer",
    index,
    attempt: 1,
    stream: index,
    reported_at: unknown_since,
    unknown_since,
    rows: [],
  })),
});

function asked(given: TelemetryCompleteness | null) {
  let count = 0;
  const store = new CompletenessStore(async () => {
    count += 1;
    if (given === null) throw new ApiError(404, "an older server");
    return given;
  });
  return { store, count: () => count };
}

test("a running job is asked about every five seconds, one that had ended before once", async () => {
  const { store, count } = asked(answer());
  await store.tick(0, true);
  await store.tick(ASK_MS - 1, true);
  expect(count()).toBe(1);
  await store.tick(ASK_MS, true);
  expect(count()).toBe(2);
  const ended = asked(answer());
  await ended.store.tick(0, false);
  await ended.store.tick(9 * ASK_MS, false);
  expect(ended.count()).toBe(1);
});

test("of a job that ends, answers are asked for until they stay", async () => {
  const late = { ...answer(), holds: false, rows: [rows({ shown: 50, unexplained: 10 })] };
  const answers = [answer(), late, answer(), answer(), late];
  const store = new CompletenessStore(async () => answers.shift() ?? answer());
  await store.tick(0, true);
  await store.tick(ASK_MS, false);
  expect(store.found.value?.holds).toBe(false);
  for (let turn = 2; turn < 9; turn++) await store.tick(turn * ASK_MS, false);
  expect([store.found.value?.holds, answers.length]).toEqual([true, 1]);
});

test("counts of a job that had ended and that do not add up are asked for again", async () => {
  const late = { ...answer(), holds: false };
  const answers = [late, answer(), answer(), late];
  const store = new CompletenessStore(async () => answers.shift() ?? answer());
  for (let turn = 0; turn < 9; turn++) await store.tick(turn * ASK_MS, false);
  expect([store.found.value?.holds, answers.length]).toEqual([true, 1]);
});

test("an older server without counts leaves the page as it is", async () => {
  const { store } = asked(null);
  await store.tick(0, true);
  expect([store.found.value, store.dropped.value, store.unknownSince.value]).toEqual([null, 0, null]);
});

test("dropped rows add up, and the newest time since which something is unknown counts", async () => {
  const { store } = asked(answer([null, "2026-11-27T15:11:27Z", "2026-11-27T15:10:00Z"]));
  await store.tick(0, true);
  expect(store.dropped.value).toBe(10);
  expect(store.unknownSince.value).toBe("2026-11-27T15:11:27Z");
});

test("the terms of the equation add up to what was produced, rare ones only where they are", () => {
  const sum = (of: CountedRows) => terms(of).reduce((all, term) => all + term.rows, 0);
  expect(terms(rows()).map((term) => term.name)).toEqual(["shown", "sampled out", "dropped"]);
  expect(terms(rows())[2]?.why).toBe("10 beyond the agent's buffer");
  const old = rows({ shown: 0, expired: [{ reason: "retention", text: "older than the retention", rows: 60 }] });
  expect(terms(old).map((term) => term.name)).toContain("removed by retention");
  expect([sum(rows()), sum(old)]).toEqual([100, 100]);
});

test("what the equation lacks has words", () => {
  expect(unexplained(rows())).toBe("");
  expect(unexplained(rows({ unexplained: 7 }))).toBe("7 unaccounted for");
  expect(unexplained(rows({ unexplained: -3 }))).toBe("3 shown and never counted");
});
