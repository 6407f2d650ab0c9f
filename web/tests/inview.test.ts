/** Wherever a person moves a graph, zooms into it or expands it: some box is on the canvas, and never a stale one. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { fitCamera, withBoxInView } from "../src/graph/camera";
import { GraphController } from "../src/graph/controller";
import { everyGroup, groupOps } from "../src/graph/group";
import { type Layout, layoutGraph } from "../src/graph/layout";
import { type Camera, isDrawn, isOpen } from "../src/graph/scene";
import { stream } from "../src/socket";
import { JobStore } from "../src/store/job";
import type { GraphDocument, GraphOp } from "../src/types";

// What the session's settings are read from when the module is loaded.
vi.hoisted(() => {
  const nothing = { matches: false, addEventListener: () => {}, getItem: () => null };
  const document = { documentElement: { dataset: {} }, hidden: true };
  Object.assign(globalThis, { matchMedia: () => nothing, localStorage: nothing, document });
});

const [W, H] = [1000, 560];
const canvas = {
  clientWidth: W,
  clientHeight: H,
  parentElement: null,
  getContext: () => null,
  addEventListener: () => {},
  removeEventListener: () => {},
} as unknown as HTMLCanvasElement;

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

/** Modules of very different sizes, forward, backward and updates: columns of different heights, bands with gaps. */
function uneven(): GraphDocument {
  const facts = { source: "", inputs: [], outputs: [], bytes: 0, flops: 0, replica: 0 };
  const modules = Array.from({ length: 24 }, (_, i) => `${String.fromCharCode(97 + i)}_block`);
  const ops = (["forward", "backward", "optimize"] as const).flatMap((role) =>
    modules.flatMap((module, m) =>
      Array.from({ length: 2 + ((m * 7) % 31) }, (_, i): GraphOp => {
        const name = `${role}_${module}_${i}`;
        return { name, type: "aten.mm.default", kind: "computation", role, module, ...facts };
      }),
    ),
  );
  const edges = ops.slice(1).map((_, i): [number, number] => [i, i + 1]);
  const head = { version: 1 as const, program: "p", mode: "local" as const, num_replicas: 1, num_threads: 1 };
  return { ...head, batch: [1], ops, edges, syncs: [] };
}

/** Boxes on the canvas that are not merely the inside of an open frame. */
function seen(layout: Layout, { x, y, scale }: Camera): number {
  return layout.boxes.filter((box) => {
    if (!isDrawn(box, scale) || isOpen(box, scale)) return false;
    const [left, top] = [box.x * scale + x, box.y * scale + y];
    return left < W && left + box.w * scale > 0 && top < H && top + box.h * scale > 0;
  }).length;
}

function expandedLayout(): Layout {
  const document = uneven();
  const groups = groupOps(document, "all");
  return layoutGraph(document, groups, new Set(everyGroup(groups).map((one) => one.id)), {
    aspect: W / H,
    down: false,
  });
}

/** A grid of points over the canvas at which a box is hit. */
function hits(graph: GraphController): number {
  let found = 0;
  for (let x = 2; x < W; x += 12) {
    for (let y = 2; y < H; y += 12) {
      const box = graph.layout?.boxes[graph.at(x, y)];
      if (box !== undefined && !box.expanded) found += 1;
    }
  }
  return found;
}

function opened(): GraphController {
  const graph = new GraphController(new JobStore("j"));
  graph.attach(canvas);
  graph.relayout(uneven());
  return graph;
}

test("a graph has places larger than a canvas without any box", () => {
  // What this file is about: were there none, its other tests would show nothing.
  const layout = expandedLayout();
  const fitted = fitCamera(layout, W, H);
  const zoomed = { scale: 4, x: fitted.x * 4 + W, y: fitted.y * 4 + H * 2 };
  expect(seen(layout, zoomed)).toBe(0);
});

test.each([0.02, 0.2, 0.7, 2, 4])("a camera at scale %d always has a box in view", (scale) => {
  const layout = expandedLayout();
  for (let i = -6; i <= 16; i++) {
    for (let j = -6; j <= 16; j++) {
      const wished = { scale, x: -layout.width * scale * (i / 10), y: -layout.height * scale * (j / 10) };
      const camera = withBoxInView(layout, wished, W, H);
      expect(seen(layout, camera)).toBeGreaterThan(0);
      if (seen(layout, wished) === 0) expect(camera).not.toEqual(wished);
    }
  }
});

test("collapsed from deep inside, the graph is still there", () => {
  const graph = opened();
  graph.expandAll();
  for (let i = 0; i < 12; i++) graph.zoom(1.8, W - 40, H - 60);
  graph.hold();
  graph.pan(-4000, -3000);
  expect(hits(graph)).toBeGreaterThan(0);
  graph.setExpanded(new Set());
  expect(hits(graph)).toBeGreaterThan(0);
});

test("expanded after it was moved, all of the graph is seen", () => {
  const graph = opened();
  graph.hold();
  graph.pan(W * 3, H * 3);
  expect(hits(graph)).toBeGreaterThan(0);
  graph.expandAll();
  const layout = graph.layout as Layout;
  const last = layout.boxes.length - 1;
  graph.select(last);
  const before = hits(graph);
  graph.fit();
  expect(hits(graph)).toBe(before);
});

test("a drag gets across a place without boxes", () => {
  const graph = opened();
  graph.expandAll();
  for (let i = 0; i < 12; i++) graph.zoom(1.8, W / 2, H / 2);
  const layout = graph.layout as Layout;
  graph.hold();
  const passed = new Set<string | undefined>();
  const through = layout.height * 4;
  for (let at = 0; at < through; at += 300) {
    graph.pan(0, -300);
    for (let x = 2; x < W; x += 90)
      for (let y = 2; y < H; y += 60) passed.add(layout.boxes[graph.at(x, y)]?.group.bucket);
  }
  expect(passed).toContain("backward");
  expect(passed).toContain("optimize");
});

test("a box that is opened stays where it is on the screen", () => {
  const graph = opened();
  const box = graph.layout?.boxes[1];
  if (box === undefined) throw new Error("no box");
  graph.zoom(1.5, W / 2, H / 2);
  const cornerOf = () => {
    for (let x = 0; x < W; x += 2) {
      for (let y = 0; y < H; y += 2) if (graph.layout?.boxes[graph.at(x, y)]?.id === box.id) return [x, y];
    }
    return null;
  };
  const before = cornerOf();
  expect(before).not.toBeNull();
  graph.toggle(box.id);
  expect(graph.expanded.value.has(box.id)).toBe(true);
  expect(cornerOf()).toEqual(before);
});
