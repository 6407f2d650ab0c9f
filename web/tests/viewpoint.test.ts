/** A shared link shows the same place of a graph, and the keyboard goes along its uses. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { GraphController } from "../src/graph/controller";
import { everyGroup, groupOps } from "../src/graph/group";
import { layoutGraph } from "../src/graph/layout";
import { cameraAt, openedFrom, openedText, viewpointFrom, viewpointOf, viewpointText } from "../src/graph/viewpoint";
import { along, beside, usesOf, type Walked, walkedText } from "../src/graph/walk";
import { stream } from "../src/socket";
import { JobStore } from "../src/store/job";
import type { GraphDocument, GraphOp } from "../src/types";

// What the session's settings are read from when the module is loaded.
vi.hoisted(() => {
  const nothing = { matches: false, addEventListener: () => {}, getItem: () => null };
  const document = { documentElement: { dataset: {} }, hidden: true };
  Object.assign(globalThis, { matchMedia: () => nothing, localStorage: nothing, document });
});
beforeEach(() => {
  vi.stubGlobal(
    "ResizeObserver",
    class {
      observe(): void {}
      disconnect(): void {}
    },
  );
  vi.stubGlobal("devicePixelRatio", 1);
  vi.stubGlobal("requestAnimationFrame", () => 0);
  vi.spyOn(stream, "subscribe").mockReturnValue(() => {});
});
afterEach(() => void vi.unstubAllGlobals());

function canvasOf(clientWidth: number, clientHeight: number): HTMLCanvasElement {
  const nothing = { parentElement: null, getContext: () => null };
  const listening = { addEventListener: () => {}, removeEventListener: () => {} };
  return { clientWidth, clientHeight, ...nothing, ...listening } as unknown as HTMLCanvasElement;
}

/** Modules a to h of four operators each, one after another; c is used by all later ones. */
function towers(): GraphDocument {
  const facts = { source: "", inputs: [], outputs: [], bytes: 0, flops: 0, replica: 0 };
  const ops = Array.from({ length: 32 }, (_, i): GraphOp => {
    const module = `${String.fromCharCode(97 + Math.floor(i / 4))}_tower`;
    return { name: `op_${i}`, type: "aten.mm.default", kind: "computation", role: "forward", module, ...facts };
  });
  const chain = ops.slice(1).map((_, i): [number, number] => [i, i + 1]);
  const skips = [15, 19, 23].map((op): [number, number] => [11, op]);
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, batch: [1], ops, edges: [...chain, ...skips], syncs: [] };
}

test("a viewpoint survives the address within a pixel", () => {
  const document = towers();
  const layout = layoutGraph(document, groupOps(document, "all"), new Set(), { aspect: 1.8, down: false });
  for (const camera of [
    { x: -340.5, y: 77.25, scale: 0.8731 },
    { x: 12, y: -900, scale: 3.999 },
  ]) {
    const there = viewpointFrom(viewpointText(viewpointOf(layout, camera, 1000, 560)));
    if (there === null) throw new Error("it was not read back");
    const back = cameraAt(layout, there, 1000, 560);
    expect(Math.abs(back.scale / camera.scale - 1)).toBeLessThan(1e-3);
    expect(Math.abs(back.x - camera.x)).toBeLessThan(2);
    expect(Math.abs(back.y - camera.y)).toBeLessThan(2);
  }
});

test.each(["", "1,2", "1,2,3,4", "a,b,c", "1,,1", "0.1,0.2,0", "0.1,0.2,-1", "NaN,0,1", "0,0,Infinity"])(
  "%j is no viewpoint",
  (text) => expect(viewpointFrom(text)).toBeNull(),
);

test("a wider window shows the same place in its middle", () => {
  const first = new GraphController(new JobStore("j"));
  first.relayout(towers());
  first.attach(canvasOf(1000, 560));
  first.zoom(2, 300, 200);
  const view = first.view;
  if (view === null) throw new Error("a zoomed graph is not fitted");
  const second = new GraphController(new JobStore("j"));
  second.wantedView = viewpointFrom(viewpointText(view));
  second.relayout(towers());
  second.attach(canvasOf(1400, 700));
  const found = second.view;
  expect(found?.zoom).toBeCloseTo(view.zoom, 3);
  expect(found?.x).toBeCloseTo(view.x, 3);
  expect(found?.y).toBeCloseTo(view.y, 3);
});

test("what one looks at is reported when it changes, and not before the address is shown", () => {
  const graph = new GraphController(new JobStore("j"));
  const reported = vi.fn();
  graph.onLooked = reported;
  graph.wantedView = { x: 0.5, y: 0.5, zoom: 1.5 };
  graph.relayout(towers());
  expect(reported).not.toHaveBeenCalled();
  graph.attach(canvasOf(1000, 560));
  expect(graph.view?.zoom).toBe(1.5);
  reported.mockClear();
  graph.pan(10, 0);
  expect(reported).toHaveBeenCalledTimes(1);
  graph.fit();
  expect(reported).toHaveBeenCalledTimes(2);
  expect(graph.view).toBeNull();
});

test("an operator in the address does not move what the address looks at", () => {
  const graph = new GraphController(new JobStore("j"));
  graph.wantedView = { x: 0.5, y: 0.5, zoom: 0.6 };
  graph.reveal(30);
  graph.relayout(towers());
  graph.attach(canvasOf(1000, 560));
  expect(graph.selectedOps()).toEqual([30]);
  expect(graph.view?.zoom).toBe(0.6);
});

test("opened modules are named, all of them by a word", () => {
  const groups = groupOps(towers(), "all");
  const ids = everyGroup(groups).map((group) => group.id);
  const two = new Set(ids.slice(0, 2));
  expect(openedFrom(openedText(two, groups))).toEqual([...two]);
  expect(openedText(new Set(ids), groups)).toBe("all");
  expect(openedText(new Set(), groups)).toBeNull();
  expect(openedFrom("[1,")).toBeNull();
  expect(openedFrom("7")).toBeNull();
  expect(openedFrom(null)).toEqual([]);
});

test("uses are the operators on the other side of an edge, each once", () => {
  const document = towers();
  const all = () => true;
  expect(usesOf(document, 11, "consumers", all)).toEqual([12, 15, 19, 23]);
  expect(usesOf(document, 15, "producers", all)).toEqual([11, 14]);
  expect(usesOf({ ...document, edges: [...document.edges, [11, 12]] }, 11, "consumers", all)).toHaveLength(4);
  expect(usesOf(document, 11, "consumers", (op) => op !== 15)).toEqual([12, 19, 23]);
});

test("a walk goes along uses, beside them, and back", () => {
  const document = towers();
  const all = () => true;
  const first = along(document, 11, "consumers", all, null);
  expect(walkedText(document, first)).toBe("op_12, forward of d_tower; consumer 1 of 4 of op_11");
  const next = beside(document, first.op, 1, all, first) as Walked;
  expect([next.op, next.at]).toEqual([15, 1]);
  expect(beside(document, next.op, -1, all, next)?.op).toBe(12);
  expect(beside(document, first.op, -1, all, first)?.op).toBe(23);
  const back = along(document, next.op, "producers", all, next);
  expect([back.op, back.count]).toEqual([11, 2]);
  expect(beside(document, 7, 1, all, next)).toBeNull(); // another is selected now
});

test("a walk stays where there is no way on, and says so", () => {
  const document = towers();
  const end = along(document, 31, "consumers", () => true, null);
  expect([end.op, end.count]).toEqual([31, 0]);
  expect(walkedText(document, end)).toBe("op_31 has no consumer");
  const begin = along(document, 0, "producers", () => true, null);
  expect(walkedText(document, begin)).toBe("op_0 has no producer");
});
