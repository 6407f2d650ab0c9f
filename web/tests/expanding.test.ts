/** *Expand all* on a graph whose first layout is still under way in the worker. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { GraphController } from "../src/graph/controller";
import { makePlan, packPlan } from "../src/graph/plan";
import { graphWorker } from "../src/graph/remote";
import type { WorkerReply, WorkerRequest } from "../src/graph/worker";
import { stream } from "../src/socket";
import { JobStore } from "../src/store/job";
import type { GraphDocument, GraphOp } from "../src/types";

// What the session's settings are read from when the module is loaded.
vi.hoisted(() => {
  const nothing = { matches: false, addEventListener: () => {}, getItem: () => null };
  const document = { documentElement: { dataset: {} }, hidden: true };
  Object.assign(globalThis, { matchMedia: () => nothing, localStorage: nothing, document });
});

/** Requests for layouts that the worker has not answered. */
let asked: (() => void)[] = [];

/** Answers as the worker does, a layout when `asked` is called. */
class SlowWorker {
  onmessage: (event: { data: WorkerReply }) => void = () => {};
  #document: GraphDocument | null = null;
  #hasGroups = false;

  postMessage(request: WorkerRequest): void {
    if (request.type === "parse") {
      const { ops, edges, ...head } = JSON.parse(new TextDecoder().decode(request.text)) as GraphDocument;
      this.#document = { ...head, ops, edges };
      this.#hasGroups = false;
      this.onmessage({ data: { type: "head", id: request.id, head } });
      this.onmessage({ data: { type: "ops", id: request.id, ops } });
      this.onmessage({ data: { type: "edges", id: request.id, edges: Int32Array.from(edges.flat()) } });
      this.onmessage({ data: { type: "end", id: request.id } });
    } else if (request.type === "plan") {
      asked.push(() => {
        const packed = packPlan(makePlan(this.#document as GraphDocument, request.request), this.#hasGroups);
        this.#hasGroups = true;
        this.onmessage({ data: { type: "plan", id: request.id, packed, ms: 1 } });
      });
    }
  }
}

beforeEach(() => {
  asked = [];
  vi.stubGlobal("Worker", SlowWorker);
  vi.stubGlobal("requestAnimationFrame", () => 0);
  vi.spyOn(stream, "subscribe").mockReturnValue(() => {});
});
afterEach(() => void vi.unstubAllGlobals());

function chain(): GraphDocument {
  const facts = { source: "", inputs: [], outputs: [], bytes: 0, flops: 0, replica: 0 };
  const ops = Array.from({ length: 24 }, (_, i): GraphOp => {
    const module = i < 12 ? "a" : `b.${i < 18 ? "x" : "y"}`;
    return { name: `op_${i}`, type: "aten.mm.default", kind: "computation", role: "forward", module, ...facts };
  });
  const edges = ops.slice(1).map((_, i): [number, number] => [i, i + 1]);
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, batch: [1], ops, edges, syncs: [] };
}

async function opened(): Promise<GraphController> {
  const document = await graphWorker.parse(new TextEncoder().encode(JSON.stringify(chain())).buffer as ArrayBuffer);
  const graph = new GraphController(new JobStore("j"));
  graph.relayout(document);
  graph.relayout(document); // as when the canvas of a new document is attached
  asked.shift()?.(); // the first answer is superseded
  await Promise.resolve();
  expect(graph.layout).toBeNull();
  return graph;
}

async function answerAll(graph: GraphController): Promise<void> {
  for (let answer = asked.shift(); answer !== undefined; answer = asked.shift()) {
    const before = graph.layoutVersion.value;
    answer();
    await vi.waitFor(() => expect(graph.layoutVersion.value).toBeGreaterThan(before));
  }
  graph.store.dispose();
}

test("all is expanded although it was asked before the first layout came", async () => {
  const graph = await opened();
  graph.expandAll();
  await answerAll(graph);
  expect(graph.layout?.boxes.filter((box) => box.op !== null).length).toBe(24);
  expect(graph.layout?.boxes.filter((box) => box.expanded).map((box) => box.group.module)).toEqual(["a", "b.x", "b.y"]);
});

test("an operator that the address names is selected when its layout comes", async () => {
  const graph = await opened();
  graph.reveal(20);
  await answerAll(graph);
  expect(graph.selectedOps()).toEqual([20]);
  expect(graph.busy.value).toBe(false);
});
