/** A controller whose canvas is replaced: the new one may be attached before the old one is taken away. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { GraphController } from "../src/graph/controller";
import { stream } from "../src/socket";
import { JobStore } from "../src/store/job";
import { TimelineController } from "../src/timeline/controller";

// What the session's settings are read from when the module is loaded.
vi.hoisted(() => {
  const nothing = { matches: false, addEventListener: () => {}, getItem: () => null };
  const document = { documentElement: { dataset: {} }, hidden: true };
  Object.assign(globalThis, { matchMedia: () => nothing, localStorage: nothing, document });
});

/** Elements that an observer which is not disconnected watches. */
const observed = new Map<object, Set<object>>();
let frames: (() => void)[] = [];

class Observer {
  observe(element: object): void {
    observed.set(this, new Set([element]));
  }
  disconnect(): void {
    observed.delete(this);
  }
}

/** What an element that is listened to has, and `fire`. */
function listening() {
  const handlers = new Map<string, () => void>();
  return {
    addEventListener: (name: string, handler: () => void) => handlers.set(name, handler),
    removeEventListener: (name: string) => handlers.delete(name),
    fire: (name: string) => handlers.get(name)?.(),
  };
}

/** A canvas, and how often something was painted on it. */
function canvas() {
  const counts = { contexts: 0 };
  const element = {
    ...listening(),
    clientWidth: 800,
    clientHeight: 600,
    width: 0,
    height: 0,
    parentElement: null,
    style: {},
    getContext: () => {
      counts.contexts += 1;
      return null;
    },
  } as unknown as HTMLCanvasElement;
  return { element, counts };
}

function paint(): void {
  const due = frames;
  frames = [];
  for (const frame of due) frame();
}

beforeEach(() => {
  observed.clear();
  frames = [];
  vi.stubGlobal("ResizeObserver", Observer);
  vi.stubGlobal("devicePixelRatio", 1);
  vi.stubGlobal("requestAnimationFrame", (frame: () => void) => frames.push(frame));
});
afterEach(() => void vi.unstubAllGlobals());

test.each([
  ["graph", (store: JobStore) => new GraphController(store)],
  ["timeline", (store: JobStore) => new TimelineController(store)],
])("the %s goes on on the new canvas when the old one is taken away, and when its pixels are", (_name, make) => {
  vi.spyOn(stream, "subscribe").mockReturnValue(() => {});
  const store = new JobStore("j");
  const controller = make(store);
  const [before, after] = [canvas(), canvas()];
  const detachBefore = controller.attach(before.element);
  const detachAfter = controller.attach(after.element);
  detachBefore();
  const watched = [...observed.values()].flatMap((elements) => [...elements]);
  expect(watched).toEqual([after.element]);
  paint();
  const painted = after.counts.contexts;
  controller.repaint();
  paint();
  expect(after.counts.contexts).toBeGreaterThan(painted);
  expect(before.counts.contexts).toBe(0);
  // The browser took the pixels away, and gives an empty canvas back.
  const kept = after.counts.contexts;
  (after.element as unknown as ReturnType<typeof listening>).fire("contextrestored");
  paint();
  expect(after.counts.contexts).toBeGreaterThan(kept);
  detachAfter();
  expect(observed.size).toBe(0);
  store.dispose();
});
