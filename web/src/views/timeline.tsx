/** The timeline of the newest sampled step: canvas, keys, tooltip, and its table twin. */
import { untracked, useSignalEffect } from "@preact/signals";
import type { TargetedKeyboardEvent } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { integer, nanos, percent, plural } from "../format";
import { bucketOf } from "../graph/group";
import { Empty, Head } from "../parts/basics";
import { setQuery, url } from "../router";
import { isTerminal } from "../store/job";
import { clockText } from "../timeline/clocks";
import type { TimelineController } from "../timeline/controller";
import { isExecutor, longestSlices, type TimelineModel } from "../timeline/model";
import type { JobParts } from "./job";
import { Record } from "./record";

export function TimelineView({ parts, wide }: { parts: JobParts; wide?: boolean }) {
  const { store, graph, timeline } = parts;
  useEffect(() => {
    const { searchParams } = url.peek();
    const held = searchParams.get("held");
    timeline.wantedSpan = spanOf(searchParams.get("span"));
    // A page that opens the link, or is loaded again, has other newest steps: it shows the one that was held.
    if (held !== null) setQuery({ held: null, step: searchParams.get("step") ?? held });
    let later: ReturnType<typeof setTimeout> | undefined;
    timeline.onShown = (span, heldStep) => {
      clearTimeout(later);
      later = setTimeout(
        () => setQuery({ span: span?.map(Math.round).join("-") ?? null, held: heldStep?.toString() ?? null }),
        SETTLED_MS,
      );
    };
    if (held === null && searchParams.get("step") === null) timeline.tell(); // it was held before the tab was left
    return () => {
      clearTimeout(later);
      timeline.onShown = () => {};
    };
  }, [timeline]);
  useSignalEffect(() => {
    const pins = pinned();
    untracked(() => timeline.pin(pins));
  });
  useSignalEffect(() => {
    store.stepVersion.value;
    store.nodes.value;
    store.shownDocument.value;
    store.history.chosen.value;
    untracked(() => timeline.refresh());
  });
  useSignalEffect(() => {
    graph.layoutVersion.value;
    graph.criticalVersion.value;
    const some = new Set(graph.selectedOps());
    timeline.selectedOps = some;
    timeline.critical = graph.critical.ops;
    timeline.repaint();
  });
  const model = timeline.model.value;
  return (
    <section class={`panel ${wide ? "wide" : ""}`} aria-labelledby="timeline-title">
      <div class="panel-title">
        <h2 id="timeline-title">Timeline</h2>
        <em class="clip" data-testid="timeline-summary">
          {describe(model, isEvaluation(parts, model), store.history.chosen.value?.range)}
        </em>
        <Tools parts={parts} />
      </div>
      {model.numSlices === 0 ? (
        <NoStep over={store.job.value !== null && isTerminal(store.job.value)} />
      ) : (
        <>
          <Clocks model={model} />
          <TimelineCanvas parts={parts} wide={wide === true} />
          {wide !== true && <SliceTable model={model} />}
        </>
      )}
    </section>
  );
}

/** A zoom stands in the address once it has come to rest. */
const SETTLED_MS = 300;

/** "1200-5600", nanoseconds from the left edge. */
function spanOf(text: string | null): readonly [number, number] | null {
  const [from, to] = (text ?? "").split("-").map(Number);
  return from !== undefined && to !== undefined && from >= 0 && to > from ? [from, to] : null;
}

function NoStep({ over }: { over: boolean }) {
  if (over) return <Empty title="No sampled step was recorded" />;
  return (
    <Empty title="No sampled step yet">
      <span>A trainer sends whole steps now and then; the first appears here.</span>
    </Empty>
  );
}

/** Only steps of a graph without backward and update are there. */
function isEvaluation({ store }: JobParts, model: TimelineModel): boolean {
  const graphs = [...store.ops.graphs.values()];
  const first = model.lanes[0]?.document;
  return first !== undefined && graphs.find((one) => one.document === first)?.trains === false;
}

function describe(model: TimelineModel, evaluation: boolean, range?: { readonly first: number }): string {
  if (model.numSlices === 0) return "";
  const { compute, sync, input, idle } = model.shares;
  const several = model.steps.map((step) => integer(step)).join(", ");
  const steps = range === undefined ? `step ${several}` : `steps ${integer(range.first)} to ${several}`;
  return `${evaluation ? "evaluation, " : ""}${steps}${model.inFull ? ", recorded in full" : ""} · ${nanos(model.stepNs)} · of ${plural(model.lanes.filter(isExecutor).length, "thread")}' time: compute ${percent(compute)}, sync ${percent(sync)}, input ${percent(input)}, idle ${percent(idle)}${model.waitedNs > 0 ? ` · waited ${nanos(model.waitedNs)} for data` : ""} · ${plural(model.numSlices, "event")}`;
}

/** By which the lanes of each node were moved onto one clock. */
function Clocks({ model }: { model: TimelineModel }) {
  if (model.clocks.length === 0) return null;
  return (
    <ul class="clocks muted" aria-label="Clocks of the nodes, against the server's" data-testid="clocks">
      {model.clocks.map((clock) => (
        <li key={clock.node}>{clockText(clock)}</li>
      ))}
    </ul>
  );
}

/** Keys of the lanes that stand first, as the address has them. */
const pinned = (): string[] => (url.value.searchParams.get("pin") ?? "").split(",").filter((key) => key !== "");

function togglePin(key: string | null): void {
  if (key === null) return;
  const pins = pinned();
  const next = pins.includes(key) ? pins.filter((one) => one !== key) : [...pins, key];
  setQuery({ pin: next.length === 0 ? null : next.join(",") });
}

function Tools({ parts }: { parts: JobParts }) {
  const { store, timeline } = parts;
  const held = timeline.held.value;
  const newer = timeline.newer.value;
  const measured = timeline.measured.value;
  return (
    <div class="tools">
      <Record store={store} />
      {measured !== null && (
        <span class="muted" role="status" data-testid="measured">
          {measured[0] === measured[1]
            ? `from ${nanos(measured[0])} to …`
            : `${nanos(Math.abs(measured[1] - measured[0]))} from ${nanos(Math.min(...measured))}`}
        </span>
      )}
      {held && newer > 0 && <span class="muted">{plural(newer, "newer step")}</span>}
      <button
        type="button"
        class="btn small"
        aria-pressed={held}
        onClick={() => timeline.hold(!held)}
        data-testid="hold"
      >
        {held ? "Back to live" : "Hold"}
      </button>
      <button type="button" class="btn small" onClick={() => timeline.fit()}>
        Fit
      </button>
    </div>
  );
}

function TimelineCanvas({ parts, wide }: { parts: JobParts; wide: boolean }) {
  const { timeline } = parts;
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const element = canvas.current;
    if (element === null) return;
    const detach = timeline.attach(element);
    const release = listenToMouse(element, timeline);
    return () => {
      release();
      detach();
    };
  }, [timeline]);
  return (
    <div class={`timeline-box ${wide ? "" : "split"}`}>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="application"
        aria-label="Timeline of a sampled step: threads by time. W and S zoom, A and D pan, arrow keys move between slices, M marks one to measure from and to; drag with Shift measures. P pins the lane of the marked slice to the top, as a click on its name does."
        data-testid="timeline"
        onKeyDown={(event) => onKey(event, timeline)}
      />
      <Tip parts={parts} />
    </div>
  );
}

function Tip({ parts }: { parts: JobParts }) {
  const hover = parts.timeline.hover.value;
  const lane = hover === null ? undefined : parts.timeline.model.value.lanes[hover.lane];
  const op = hover === null ? -1 : (lane?.op[hover.slice] ?? -1);
  const found = lane?.document.ops[op];
  if (hover === null || found === undefined || lane === undefined) return null;
  const right = hover.x > innerWidth - 340;
  return (
    <div
      class="tip"
      role="status"
      style={{ left: `${right ? hover.x - 260 : hover.x + 14}px`, top: `${Math.max(0, hover.y - 30)}px` }}
    >
      <b>{found.name}</b> <span class="faint">#{op}</span>
      <div class="muted mono">{found.type}</div>
      <div>
        <i class={`swatch c-${bucketOf(found)}`} />
        {bucketOf(found)} · {nanos(lane.whole?.[hover.slice] ?? lane.duration[hover.slice] ?? 0)} at{" "}
        {nanos(lane.start[hover.slice] ?? 0)}
      </div>
      {found.module !== "" && <div class="muted">{found.module}</div>}
    </div>
  );
}

function onKey(event: TargetedKeyboardEvent<HTMLCanvasElement>, timeline: TimelineController): void {
  if (event.key === "ArrowRight") timeline.stepSlice(1, 0);
  else if (event.key === "ArrowLeft") timeline.stepSlice(-1, 0);
  else if (event.key === "ArrowUp") timeline.stepSlice(0, -1);
  else if (event.key === "ArrowDown") timeline.stepSlice(0, 1);
  else if (event.key === "Enter") selectHovered(timeline);
  else if (event.key === "m") timeline.mark();
  else if (event.key === "p") pinHovered(timeline);
  else return;
  event.preventDefault();
}

function pinHovered(timeline: TimelineController): void {
  togglePin(timeline.model.value.lanes[timeline.hover.value?.lane ?? -1]?.key ?? null);
}

function selectHovered(timeline: TimelineController): void {
  const op = timeline.opAt(timeline.hover.value);
  setQuery({ op: op < 0 ? null : String(op) });
}

function listenToMouse(canvas: HTMLCanvasElement, timeline: TimelineController): () => void {
  let drag: { x: number; moved: boolean; from: number | null } | null = null;
  const at = (event: MouseEvent) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top] as const;
  };
  const handlers = {
    wheel: (event: WheelEvent) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.pan(-event.deltaX);
      else timeline.zoom(Math.exp(-event.deltaY * 0.002), at(event)[0]);
    },
    pointerdown: (event: PointerEvent) => {
      drag = { x: event.clientX, moved: false, from: event.shiftKey ? at(event)[0] : null };
      canvas.setPointerCapture(event.pointerId);
    },
    pointermove: (event: PointerEvent) => {
      if (drag === null) {
        timeline.point(...at(event));
        const isLabel = timeline.labelAt(...at(event)) !== null;
        canvas.style.cursor = isLabel ? "pointer" : "";
        canvas.title = isLabel ? "Click to pin this lane to the top, or to let it go" : "";
        return;
      }
      const dx = event.clientX - drag.x;
      if (!drag.moved && Math.abs(dx) < 4) return;
      if (drag.from === null) timeline.pan(dx);
      else timeline.measure(drag.from, at(event)[0]);
      drag = { ...drag, x: event.clientX, moved: true };
    },
    pointerup: (event: PointerEvent) => {
      const click = drag !== null && !drag.moved;
      drag = null;
      if (!click) return;
      const label = timeline.labelAt(...at(event));
      if (label !== null) {
        togglePin(label);
        return;
      }
      timeline.point(...at(event));
      selectHovered(timeline);
    },
    pointerleave: () => timeline.leave(),
  };
  const entries = Object.entries(handlers) as [string, EventListener][];
  for (const [name, handler] of entries) canvas.addEventListener(name, handler, { passive: false });
  return () => {
    for (const [name, handler] of entries) canvas.removeEventListener(name, handler);
  };
}

const MAX_ROWS = 400;

function SliceTable({ model }: { model: TimelineModel }) {
  const rows = useMemo(() => longestSlices(model, MAX_ROWS), [model]);
  return (
    <div
      class="scroll"
      tabIndex={0}
      role="region"
      aria-label="Events of the step, longest first"
      data-testid="slice-table"
    >
      <table>
        <Head
          columns={[
            "Operator",
            ["Duration ▾", "num"],
            ["Start", "num"],
            ["Role", "tiny-hide"],
            ["Thread", "tiny-hide"],
          ]}
        />
        <tbody>
          {rows.map(({ lane, index }) => {
            const op = lane.document.ops[lane.op[index] ?? -1];
            return (
              <tr key={`${lane.label}${index}`}>
                <td>{op?.name ?? lane.op[index]}</td>
                <td class="num">{nanos(lane.duration[index] ?? 0)}</td>
                <td class="num">{nanos(lane.start[index] ?? 0)}</td>
                <td class="tiny-hide">{op === undefined ? "" : bucketOf(op)}</td>
                <td class="tiny-hide">{lane.label}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}
