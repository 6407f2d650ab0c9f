import { expect, test } from "vitest";
import { ApiError } from "../src/api";
import { isPassing } from "../src/store/refusals";

const refused = (status: number, code: string | null) => isPassing(new ApiError(status, "no", null, code));

test("asking again is offered where it may help", () => {
  expect(refused(409, "connection_lost")).toBe(true);
  expect(refused(409, "agent_silent")).toBe(true);
  expect(refused(429, "too_many_stacks")).toBe(true);
  expect(refused(0, null)).toBe(true);
  expect(refused(503, null)).toBe(true);
});

test("and not where something has to be done first", () => {
  for (const code of ["agent_too_old", "no_stacks", "replica_attached", "replica_not_running", null]) {
    expect(refused(409, code)).toBe(false);
  }
  expect(refused(403, "forbidden")).toBe(false);
});
