/** Which jobs are shown by metrics instead of a graph. */
import { describe, expect, test } from "vitest";
import { isCommand, isWithoutGraph } from "../src/store/mode";
import type { Job } from "../src/types";

type Mode = Job["spec"]["mode"];
const job = (mode: Mode, kind: Job["kind"] = "managed") => ({ kind, spec: { mode } });

describe("what stands where the graph would", () => {
  test("charts, from the start, for a command that an agent runs", () => {
    expect(isWithoutGraph(job("command"), null, 0)).toBe(true);
  });

  test("a graph that a command sends all the same is shown", () => {
    expect(isWithoutGraph(job("command"), "hash", 3)).toBe(false);
  });

  test("an attached job is no command, whatever its spec says", () => {
    expect(isCommand(job("command", "attached"))).toBe(false);
    expect(isWithoutGraph(job("command", "attached"), null, 3)).toBe(false);
  });

  test("ranks are shown by metrics once there are some and no graph", () => {
    expect(isWithoutGraph(job("collective"), null, 0)).toBe(false);
    expect(isWithoutGraph(job("collective"), null, 1)).toBe(true);
  });

  test("all other jobs wait for their graph", () => {
    for (const mode of ["local", "pserver"] as const) expect(isWithoutGraph(job(mode), null, 3)).toBe(false);
  });
});
