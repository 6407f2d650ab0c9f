/** What one looks at on the timeline stays while more of the chosen steps come from the recording. */
import { signal } from "@preact/signals";
import { beforeEach, expect, test, vi } from "vitest";
import { StepHistory } from "../src/store/history";
import { InputStore } from "../src/store/input";
import type { JobStore } from "../src/store/job";
import type { StepTrace } from "../src/store/steps";
import { TimelineController } from "../src/timeline/controller";
import type { GraphDocument } from "../src/types";

vi.hoisted(() => {
  const nothing = { matches: false, addEventListener: () => {}, getItem: () => null };
  const document = { documentElement: { dataset: {} }, hidden: true };
  Object.assign(globalThis, { matchMedia: () => nothing, localStorage: nothing, document });
});
beforeEach(() => void vi.stubGlobal("requestAnimationFrame", () => 0));

const op = { name: "fc", type: "mul", kind: "compute", role: "forward", replica: 0, module: "", source: "" };
const facts = { inputs: [], outputs: [], bytes: 0, flops: 0 };
const document = {
  version: 1,
  program: "p",
  mode: "local",
  num_replicas: 1,
  num_threads: 1,
  batch: [1],
  ops: [{ ...op, ...facts }],
  edges: [],
  syncs: [],
} as unknown as GraphDocument;

/** A step of 100 ns that begins at 1000 times its number. */
function trace(step: number, more: Partial<StepTrace> = {}): StepTrace {
  return {
    hash: "h",
    stream: 1,
    epoch: 1,
    step,
    t0Ns: BigInt(step * 1000),
    start: Uint32Array.from([0]),
    duration: Uint32Array.from([100]),
    op: Uint16Array.from([0]),
    thread: Uint16Array.from([0]),
    inFull: true,
    ...more,
  } as StepTrace;
}

function opened(first: number, last: number) {
  const history = new StepHistory(() => Promise.reject(new Error("nothing is fetched")));
  history.wanted.value = { first, last };
  const store = {
    history,
    shownHash: signal("h"),
    shownDocument: signal(document),
    chosenGraph: signal(null),
    job: signal(null),
    nodes: signal([]),
    input: new InputStore(),
    steps: { steps: 0, newest: () => [] },
    ops: { graphs: new Map([["h", { hash: "h", document, trains: true }]]) },
  } as unknown as JobStore;
  const timeline = new TimelineController(store);
  const come = (...traces: StepTrace[]) => {
    for (const one of traces) history.add(one);
    history.version.value += 1;
    timeline.refresh();
  };
  return { history, timeline, come };
}

/** What is shown, by the clock. */
function byClock({ shown, model }: TimelineController): number[] {
  return shown.map((at) => Math.round(Number(model.value.beginNs) + at));
}

test("a zoom stays while steps before and after come, as does what is measured", () => {
  const { timeline, come } = opened(1, 9);
  come(trace(4), trace(5));
  expect(byClock(timeline)).toEqual([4000, 5100]);
  timeline.zoom(2);
  timeline.measure(timeline.left, timeline.left + 10);
  const [seen, measured] = [byClock(timeline), timeline.measured.value?.map((at) => at + 4000)];
  come(trace(2), trace(8));
  expect(timeline.model.value.spanNs).toBe(6100);
  expect(byClock(timeline)).toEqual(seen);
  expect(timeline.measured.value?.map((at) => at + 2000)).toEqual(measured);
});

test("without a zoom all of it is shown again", () => {
  const { timeline, come } = opened(1, 9);
  come(trace(4), trace(5));
  come(trace(2));
  expect(byClock(timeline)).toEqual([2000, 5100]);
});

test("a test pass whose steps have the same numbers is not drawn beside training", () => {
  const { timeline, come } = opened(4, 5);
  const test = { hash: "test", document, trains: false };
  (timeline.store.ops.graphs as unknown as Map<string, object>).set("test", test);
  come(trace(4), trace(5), trace(4, { hash: "test", t0Ns: 80_000n }));
  expect(byClock(timeline)).toEqual([4000, 5100]);
});

test("other steps, or those of another attempt, are shown whole", () => {
  const { history, timeline, come } = opened(1, 9);
  come(trace(4), trace(5));
  timeline.zoom(2);
  history.wanted.value = { first: 5, last: 6 };
  come(trace(6));
  expect(byClock(timeline)).toEqual([5000, 6100]);
  timeline.zoom(2);
  come(trace(5, { epoch: 2, t0Ns: 90_000n }));
  expect(byClock(timeline)).toEqual([90_000, 90_100]);
});

test("a step that is held live is reported with its number, and let go again", () => {
  const { history, timeline } = opened(1, 9);
  history.wanted.value = null;
  (timeline.store.steps as unknown as { newest: () => StepTrace[] }).newest = () => [
    trace(7, { duration: Uint32Array.from([1000]) }),
  ];
  timeline.refresh("force");
  const reported = vi.fn();
  timeline.onShown = reported;
  timeline.zoom(2);
  expect(reported).toHaveBeenLastCalledWith([250, 750], 7);
  timeline.hold(false);
  expect(reported).toHaveBeenLastCalledWith(null, null);
  timeline.hold(true);
  expect(reported).toHaveBeenLastCalledWith(null, 7);
});
