/** What the header says of a job's restarts: nothing where none are allowed, else what is left, and why it waits. */
import { expect, test } from "vitest";
import { clock } from "../src/format";
import { attemptWords } from "../src/store/attempts";
import type { Job } from "../src/types";

const job = (more: Partial<Job>) =>
  ({
    attempt: 3,
    epoch: 3,

    started_at: null,
    restarts: 0,
    restarts_left: 0,
    restarts_left_by_class: {},
    next_attempt_at: null,
    ...more,
  }) as unknown as Job;

test("a job that may not be started again says nothing of restarts", () => {
  expect(attemptWords(job({}))).toEqual(["attempt 3", "epoch 3"]);
});

test("restarts are shown with those that are allowed", () => {
  expect(attemptWords(job({ restarts: 2, restarts_left: 3 }))).toContain("2 of 5 restarts used");
});

test("restarts that a class has for itself count as well", () => {
  const left = { user: 1, infra: 4 };
  expect(attemptWords(job({ restarts: 2, restarts_left_by_class: left }))).toContain("2 of 7 restarts used");
});

test("a job in its pause says until when", () => {
  const at = "2026-01-01T10:00:04.000000Z";
  expect(attemptWords(job({ restarts: 1, next_attempt_at: at }))).toContain(`next attempt not before ${clock(at)}`);
});
