/** What the page gets of a large graph by way of its worker: the real one, with a clone and transfers between. */
import { beforeAll, expect, test, vi } from "vitest";
import { criticalPath } from "../src/graph/critical";
import { makePlan, type PlanRequest } from "../src/graph/plan";
import type { WorkerReply, WorkerRequest } from "../src/graph/worker";
import type { GraphDocument, GraphOp } from "../src/types";

type Remote = typeof import("../src/graph/remote");

let remote: Remote;
const replies: string[] = [];

beforeAll(async () => {
  let take: (event: { data: WorkerRequest }) => void = () => {};
  let page: { onmessage: (event: { data: WorkerReply }) => void } | null = null;
  vi.stubGlobal("addEventListener", (_: string, listener: typeof take) => {
    take = listener;
  });
  vi.stubGlobal("postMessage", (message: WorkerReply, { transfer }: { transfer: Transferable[] }) => {
    replies.push(message.type);
    page?.onmessage({ data: structuredClone(message, { transfer }) });
  });
  await import("../src/graph/worker");
  class Door {
    onmessage: (event: { data: WorkerReply }) => void = () => {};
    constructor() {
      page = this;
    }
    postMessage(request: WorkerRequest, transfer: Transferable[] = []): void {
      take({ data: structuredClone(request, { transfer }) });
    }
  }
  vi.stubGlobal("Worker", Door);
  remote = await import("../src/graph/remote");
});

/** Layers of operators in a row. */
function layers(count: number, each: number): GraphDocument {
  const facts = { source: "", inputs: [], outputs: [], bytes: 0, flops: 0, replica: 0 };
  const ops = Array.from({ length: count * each }, (_, i): GraphOp => {
    const module = `part_${Math.floor(i / each)}.in_${i % 2}`;
    return { name: `op_${i}`, type: "aten.mm.default", kind: "computation", role: "forward", module, ...facts };
  });
  const edges = ops.slice(1).map((_, i): [number, number] => [i, i + 1]);
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, ops, edges, syncs: [], runs_on: [0] } as unknown as GraphDocument;
}

const parsed = (document: GraphDocument) =>
  remote.graphWorker.parse(new TextEncoder().encode(JSON.stringify(document)).buffer as ArrayBuffer);

test("a document is as it was sent, whatever pieces it came in", async () => {
  const document = layers(4, 1500);
  replies.length = 0;
  expect(await parsed(document)).toEqual(document);
  expect(replies.filter((type) => type === "ops").length).toBe(12);
  expect(replies.filter((type) => type === "edges").length).toBe(2);
});

test("groups come one by one, once, and a plan is as one that is made here", async () => {
  const document = await parsed(layers(3, 24));
  const closed: PlanRequest = { replica: "all", expanded: [], place: { aspect: 2, down: false } };
  replies.length = 0;
  const first = await remote.planGraph(document, closed);
  expect(first.groups.length).toBe(6);
  expect(replies).toEqual([...first.groups.map(() => "group"), "plan"]);
  expect(first).toEqual(makePlan(document, closed));
  const open = { ...closed, expanded: first.groups.map((group) => group.id) };
  replies.length = 0;
  const second = await remote.planGraph(document, open);
  expect(replies).toEqual(["plan"]);
  expect(second).toEqual(makePlan(document, open));
  expect(second.groups[0]).toBe(first.groups[0]);
});

test("a critical path is as one that is found here, also where nothing was measured", async () => {
  const document = await parsed(layers(2, 12));
  const means = Float64Array.from(document.ops, (_, i) => i + 1);
  const here = criticalPath(document, means.slice());
  expect(here.chain.length).toBe(24);
  expect(await remote.pathThrough(document, means)).toEqual(here);
  for (let twice = 0; twice < 2; twice++) {
    const none = await remote.pathThrough(document, new Float64Array(document.ops.length).fill(Number.NaN));
    expect(none).toEqual({ chain: new Int32Array(0), ops: new Set(), totalNs: 0 });
  }
});
