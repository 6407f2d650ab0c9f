/** `window.__penstock`: what a test may read of a page whose content is on canvases. Read-only, always there. */
import { graphWorker } from "./graph/remote";
import { viewpointText } from "./graph/viewpoint";
import { currentGraph, currentJob, currentTimeline } from "./store/current";
import type { GraphRuntime } from "./store/ops";
import { exchangeOf } from "./views/exchange";

export interface TestHooks {
  graphHash(): string | null;
  /** Operators that were lit in some animation frame since the page loaded, of the shown graph. */
  litOperators(): number[];
  /** Operators that some received frame named, of the shown graph. */
  receivedOperators(): number[];
  paintedSlices(): number;
  /** Lanes of the timeline, and when their first and last slices begin, in ns from its left edge. */
  lanes(): { key: string; firstNs: number; lastNs: number; slices: number }[];
  lossPoints(): number;
  syncRows(): { parameter: string; count: number; bytes: number; timeNs: number; waitNs: number }[];
  /** Cells of the matrix of trainers and parameter servers. */
  exchangeCells(): { trainer: number; pserver: number; bytesPerS: number; waitNs: number; staleness: number }[];
  droppedRows(): number;
  /** Milliseconds from an event's end to the painted graph, newest last, since the last call. */
  takePixelLags(): number[];
  /** Where the graph is looked at from, as the address has it; null: all of it is shown. */
  graphView(): string | null;
  /** What the timeline shows of a step, in ns from its left edge. */
  timelineSpan(): readonly [number, number] | null;
  /** Boxes of the graph's layout, and milliseconds that the newest one took in the worker (NaN: none was large). */
  boxes(): number;
  layoutMs(): number;
}

declare global {
  interface Window {
    readonly __penstock: TestHooks;
  }
}

function shown(): GraphRuntime | undefined {
  const store = currentJob.value;
  const hash = store?.shownHash.value ?? null;
  return hash === null ? undefined : store?.ops.graphs.get(hash);
}

function indices(marks: Uint8Array | undefined): number[] {
  const found: number[] = [];
  marks?.forEach((mark, index) => {
    if (mark === 1) found.push(index);
  });
  return found;
}

function syncRows(): ReturnType<TestHooks["syncRows"]> {
  const store = currentJob.value;
  const graph = shown();
  if (store === null || graph?.document == null) return [];
  return store.sync
    .rows(graph.document, graph.hash)
    .map(({ parameter, count, bytes, timeNs, waitNs }) => ({ parameter, count, bytes, timeNs, waitNs }));
}

function exchangeCells(): ReturnType<TestHooks["exchangeCells"]> {
  const store = currentJob.value;
  const view = store === null ? null : exchangeOf(store);
  return [...(view?.cells.values() ?? [])].map(({ trainer, pserver, bytesPerS, waitNs, staleness }) => ({
    trainer,
    pserver,
    bytesPerS,
    waitNs,
    staleness,
  }));
}

function lanes(): ReturnType<TestHooks["lanes"]> {
  return (currentTimeline.value?.model.value.lanes ?? []).map(({ key, start }) => ({
    key,
    firstNs: start[0] ?? Number.NaN,
    lastNs: start.at(-1) ?? Number.NaN,
    slices: start.length,
  }));
}

function graphView(): string | null {
  const view = currentGraph.value?.view ?? null;
  return view === null ? null : viewpointText(view);
}

export function exposeForTests(): void {
  const hooks: TestHooks = Object.freeze({
    graphHash: () => currentJob.value?.shownHash.value ?? null,
    litOperators: () => indices(shown()?.lit),
    receivedOperators: () => indices(shown()?.received),
    paintedSlices: () => currentTimeline.value?.paintedSlices ?? 0,
    lanes,
    lossPoints: () => currentJob.value?.series.byName.get("loss")?.arrived ?? 0,
    syncRows,
    exchangeCells,
    graphView,
    timelineSpan: () => currentTimeline.value?.shown ?? null,
    boxes: () => currentGraph.value?.layout?.boxes.length ?? 0,
    layoutMs: () => graphWorker.layoutMs,
    takePixelLags: () => currentJob.value?.pixelLagsMs.splice(0) ?? [],
    droppedRows: () => currentJob.value?.droppedRows.value ?? 0,
  });
  Object.defineProperty(window, "__penstock", { value: hooks, writable: false, configurable: false });
}
