import { expect, test } from "vitest";
import { standing } from "../src/store/webhooks";

const healthy = { disabled_at: null, next_at: null, failures: 0, reason: "" };

test("a webhook's state names its last failure", () => {
  expect(standing(healthy)).toBe("enabled");
  const next_at = "2026-01-01T12:00:05+00:00";
  expect(standing({ ...healthy, next_at, failures: 1, reason: "answered with 503" })).toBe(
    "paused until 12:00:05 UTC after 1 failure: answered with 503",
  );
  const reason = "disabled after 12 failures in a row: answered with 500";
  expect(standing({ ...healthy, disabled_at: next_at, failures: 12, reason })).toBe(reason);
});
