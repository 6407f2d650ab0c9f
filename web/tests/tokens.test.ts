import { expect, test } from "vitest";
import { grantOf, powers } from "../src/store/tokens";

test("a role without projects is for all of them", () => {
  expect(grantOf("runner", " ")).toEqual({ role: "runner" });
  expect(grantOf("viewer", "vision, ctr,")).toEqual({ projects: { vision: "viewer", ctr: "viewer" } });
});

test("what a token may is said by project", () => {
  expect(powers({ scopes: ["read", "submit"], projects: { vision: "runner", ctr: "viewer" } })).toBe(
    "ctr: viewer, vision: runner",
  );
  expect(powers({ scopes: ["admin"], projects: null })).toBe("admin in all projects");
});
