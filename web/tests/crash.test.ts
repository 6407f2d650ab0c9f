/** Which failure is the cause, and what of its traceback is shown. */
import { describe, expect, test } from "vitest";
import { firstFailure, hiddenVariables, lastTraceback } from "../src/store/crash";
import type { Job, Replica } from "../src/types";

function replica(index: number, facts: Partial<Replica>): Replica {
  const none = { exit_code: null, signal: null, reason: "", finished_at: null };
  return { id: `r${index}`, role: "trainer", index, attempt: 2, state: "EXITED", ...none, ...facts } as Replica;
}

const at = (second: number) => `2026-01-01T00:00:0${second}Z`;

describe("the first failure", () => {
  test("is the process of the newest attempt that ended first", () => {
    const replicas = [
      replica(0, { attempt: 1, exit_code: 1, finished_at: at(0) }),
      replica(0, { exit_code: 1, finished_at: at(3) }),
      replica(1, { exit_code: 7, finished_at: at(2) }),
      replica(2, { exit_code: 0, finished_at: at(1) }),
      replica(3, { state: "KILLED", signal: 15, reason: "stopped", finished_at: at(1) }),
    ];
    expect(firstFailure({ attempt: 2, replicas })?.exit_code).toBe(7);
  });

  test("is one that was killed, was lost or reported its own error", () => {
    for (const facts of [{ signal: 9 }, { state: "LOST" as const }, { reason: "failed: ValueError: x" }]) {
      expect(firstFailure({ attempt: 2, replicas: [replica(0, facts)] })?.id).toBe("r0");
    }
    expect(firstFailure({ attempt: 2, replicas: [replica(0, { exit_code: 0 })] })).toBeNull();
  });

  test("of one that was started again in its place only the newest process counts", () => {
    const replicas = [replica(0, { exit_code: 1, finished_at: at(1) }), replica(0, { id: "new", state: "RUNNING" })];
    expect(firstFailure({ attempt: 2, replicas })).toBeNull();
  });
});

const LOG = [
  "step 3",
  "Traceback (most recent call last):",
  '  File "/usr/lib/python3.11/runpy.py", line 198, in _run_module_as_main',
  "    return _run_code(code)",
  '  File "/home/me/train.py", line 41, in main',
  "    exe.run(program)",
  "    ^^^^^^^^^^^^^^^^",
  '  File "/opt/venv/lib/python3.11/site-packages/penstock/exec/run.py", line 9, in run',
  "    step()",
  '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 12, in linear',
  "    return x",
  "RuntimeError: shapes differ",
  "  expected (3, 4)",
  "",
  "bye",
];

describe("a traceback", () => {
  test("is folded to the person's own lines", () => {
    const found = lastTraceback(LOG);
    expect(found?.parts.map((part) => [part.own, part.where, part.frames.length])).toEqual([
      [false, ["runpy"], 1],
      [true, [], 1],
      [false, ["penstock", "torch"], 2],
    ]);
    expect(found?.parts[1]?.frames[0]).toEqual({
      at: "train.py:41 in main",
      code: ["exe.run(program)", "^^^^^^^^^^^^^^^^"],
    });
    expect([found?.line, found?.error, found?.begins]).toEqual([
      "train.py:41",
      "RuntimeError: shapes differ\n  expected (3, 4)",
      1,
    ]);
  });

  test("of several is the last, without a launcher's prefix", () => {
    const second = ["Traceback (most recent call last):", '  File "<string>", line 1', "KeyError: 'b'"];
    const found = lastTraceback([...LOG, ...second.map((line) => `[rank3]: ${line}`)]);
    expect([found?.error, found?.line, found?.begins]).toEqual(["KeyError: 'b'", "<string>:1", LOG.length]);
    expect(lastTraceback(["Killed"])).toBeNull();
  });
});

test("variables whose values are masked are named, since a copy would lack them", () => {
  expect(hiddenVariables({ spec: { env: { TOKEN: "***", MODE: "fast" } } } as unknown as Job)).toEqual(["TOKEN"]);
});
