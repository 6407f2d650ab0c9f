/** The live SSA graph: canvas, its keys and mouse, and the table with the same contents. */

import { untracked, useSignalEffect } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { compact, firm, integer, plural } from "../format";
import type { GraphController } from "../graph/controller";
import { mostBehind, TINTS, type Tint, tintOf } from "../graph/tints";
import { Empty, ErrorCard } from "../parts/basics";
import { setQuery, url } from "../router";
import { isTerminal, type JobStore } from "../store/job";
import { isCommand } from "../store/mode";
import type { GraphRuntime } from "../store/ops";
import { type Behind, behindOf } from "../store/staleness";
import { exchangeOf, hasPservers } from "./exchange";
import { cut, GraphAddress } from "./graphaddress";
import { GraphKeys, linkSelection, toggleSelected, type Ways } from "./graphkeys";
import type { JobParts } from "./job";
import { OperatorTable } from "./operators";
import { PassesButton, PassStrip, StageTable, useStage } from "./passes";

export const tableShown = (): boolean => url.value.searchParams.get("view") === "table";

export function GraphView({ parts }: { parts: JobParts }) {
  const { store, graph } = parts;
  const document = store.drawnDocument.value;
  useStage(store);
  useSignalEffect(() => {
    const shown = store.drawnDocument.value;
    graph.replica.value;
    untracked(() => graph.relayout(shown));
  });
  useSignalEffect(() => {
    store.drawnRuntime.value;
    graph.tint = tintOf(url.value.searchParams.get("colour"));
    if (graph.tint === "staleness") graph.behind = behindOf(exchangeOf(store));
    untracked(() => graph.repaint());
  });
  return (
    <section class="panel" aria-labelledby="graph-title">
      <div class="panel-title">
        <h2 id="graph-title">SSA graph</h2>
        <em class="clip">{document === null ? "" : describe(parts)}</em>
        {document !== null && <GraphTools parts={parts} />}
      </div>
      <PassStrip store={store} />
      {document === null ? (
        <NoGraph store={store} />
      ) : tableShown() && store.stage.value !== null ? (
        <StageTable stage={store.stage.value} />
      ) : tableShown() ? (
        <OperatorTable store={store} graph={graph} />
      ) : (
        <GraphCanvas graph={graph} operators={document.ops.length} />
      )}
      {graph.failure.value !== null && (
        <ErrorCard error={graph.failure.value} retry={() => graph.relayout(store.drawnDocument.value)} />
      )}
    </section>
  );
}

function describe({ store, graph }: JobParts): string {
  const document = store.drawnDocument.value;
  if (document === null) return "";
  graph.layoutVersion.value;
  const opened = graph.expanded.value.size;
  const how = opened === 0 ? "collapsed by module" : `${plural(opened, "module")} expanded`;
  if (graph.busy.value) return `${plural(document.ops.length, "operator")} · laying out…`;
  return `${plural(document.ops.length, "operator")} · ${plural(document.num_replicas, "replica")} · ${document.mode.replace("_", "-")} · ${how}`;
}

function NoGraph({ store }: { store: JobStore }) {
  store.graphVersion.value;
  const job = store.job.value;
  const hash = store.shownHash.value;
  if (hash !== null) {
    const failure = store.documents.failures.value.get(hash);
    if (failure === undefined) return <Empty title="Loading the graph…" />;
    return (
      <div style={{ padding: "var(--s4)" }}>
        <ErrorCard error={failure} retry={() => store.documents.load(hash)} />
        <span class="muted">The graph could not be loaded. The dashboard retries by itself.</span>
      </div>
    );
  }
  if (job !== null && isCommand(job)) {
    return (
      <Empty title="A command has no graph">
        <span>What it reports by penstock.telemetry.log stands under Metrics, what it writes under Logs.</span>
      </Empty>
    );
  }
  if (job !== null && isTerminal(job)) {
    return (
      <Empty title="No graph was reported">
        <span>A job sends its graph when a ParallelExecutor builds it.</span>
      </Empty>
    );
  }
  return (
    <Empty title="The graph appears when a trainer has built it">
      <span>{firm(job?.why ?? "")}</span>
    </Empty>
  );
}

function GraphTools({ parts }: { parts: JobParts }) {
  const { store, graph } = parts;
  const document = store.shownDocument.value;
  const table = tableShown();
  store.graphVersion.value;
  const graphs = [...store.ops.graphs.values()].filter((one) => one.document !== null);
  return (
    <div class="tools">
      {graphs.length > 1 && (
        <select
          aria-label="Graph"
          value={store.shownHash.value ?? ""}
          onChange={(event) => {
            store.chosenGraph.value = event.currentTarget.value;
          }}
        >
          {graphs.map((one) => (
            <option key={one.hash} value={one.hash}>
              {graphLabel(store, one)}
            </option>
          ))}
        </select>
      )}
      <ReplicaSelect graph={graph} count={document?.num_replicas ?? 1} />
      <PassesButton store={store} />
      {!table && store.stage.value === null && <TintSelect withServers={hasPservers(store)} />}
      <button type="button" class="btn small" onClick={() => toggleAll(graph)} data-testid="expand-all">
        {graph.expanded.value.size === 0 ? "Expand all" : "Collapse all"}
      </button>
      <button type="button" class="btn small" onClick={() => graph.fit()}>
        Fit
      </button>
      <button
        type="button"
        class="btn small"
        aria-pressed={table}
        onClick={() => setQuery({ view: table ? null : "table" })}
        data-testid="graph-table-toggle"
      >
        Table
      </button>
    </div>
  );
}

/** Program, batch and size; and, where trainers have graphs of their own, whose it is. */
function graphLabel(store: JobStore, graph: GraphRuntime): string {
  const users = [...store.ops.hashOfStream].filter(([, hash]) => hash === graph.hash).map(([stream]) => stream);
  const names = (store.job.value?.replicas ?? [])
    .filter((one) => users.includes(one.stream))
    .map((one) => `${one.role}-${one.index}`);
  const document = graph.document;
  const what = graph.trains === false ? "evaluation" : (document?.program ?? "");
  const size = `${integer(document?.ops.length ?? 0)} ops`;
  return [what, `batch ${document?.batch.join("+")}`, size, ...names].join(" · ");
}

const TINT_LABEL: Readonly<Record<Tint, string>> = {
  role: "colour: role",
  time: "colour: time",
  memory: "colour: memory",
  replica: "colour: replica",
  staleness: "colour: staleness",
};

function TintSelect({ withServers }: { withServers: boolean }) {
  const now = tintOf(url.value.searchParams.get("colour"));
  return (
    <select
      aria-label="What the colour of a box shows"
      value={now}
      onChange={(event) =>
        setQuery({ colour: event.currentTarget.value === "role" ? null : event.currentTarget.value })
      }
      data-testid="tint"
    >
      {TINTS.filter((tint) => tint !== "staleness" || withServers || now === tint).map((tint) => (
        <option key={tint} value={tint}>
          {TINT_LABEL[tint]}
        </option>
      ))}
    </select>
  );
}

const TINT_SAYS: Readonly<Record<Tint, string>> = {
  role: "",
  time: "deeper: more of the step's time · ",
  memory: "deeper: more bytes read and written · ",
  replica: "coloured: of one replica, grey: of several · ",
  staleness: "",
};

function toggleAll(graph: GraphController): void {
  if (graph.expanded.value.size > 0) graph.collapseAll();
  else graph.expandAll();
}

function ReplicaSelect({ graph, count }: { graph: GraphController; count: number }) {
  if (count < 2) return null;
  return (
    <select
      aria-label="Replica"
      value={String(graph.replica.value)}
      onChange={(event) => {
        const value = event.currentTarget.value;
        graph.replica.value = value === "all" ? "all" : Number(value);
      }}
    >
      <option value="all">all replicas</option>
      {Array.from({ length: count }, (_, index) => (
        <option key={index} value={String(index)}>
          replica {index}
        </option>
      ))}
    </select>
  );
}

/** What the canvas shows, or, of a chosen operator, where the keys lead; it is read with the name of the canvas. */
function Hint({ graph, keys }: { graph: GraphController; keys: GraphKeys }) {
  const { store } = graph;
  graph.layoutVersion.value;
  keys.said.value;
  const ways = keys.ways();
  return (
    <span class={ways === null ? "hint" : "hint ways"} id="graph-hint" data-testid="graph-hint">
      {ways === null ? <Colours store={store} /> : <WaysOf ways={ways} />}
    </span>
  );
}

function WaysOf({ ways }: { ways: Ways }) {
  return (
    <>
      <b>{ways.name}</b> · <kbd>←</kbd> {plural(ways.producers, "producer")} · <kbd>→</kbd>{" "}
      {plural(ways.consumers, "consumer")} · <kbd>↑</kbd> <kbd>↓</kbd> {ways.place ?? "the nearest box"} ·{" "}
      <kbd>Shift</kbd> + arrow: the nearest box
    </>
  );
}

function Colours({ store }: { store: JobStore }) {
  if (store.stage.value !== null) return <>− removed, + added, ~ changed by the pass · double-click or Enter expands</>;
  const tint = tintOf(url.value.searchParams.get("colour"));
  if (tint === "staleness") return <StalenessLegend behind={behindOf(exchangeOf(store))} />;
  return (
    <>
      {TINT_SAYS[tint]}
      <span aria-hidden="true">●</span> ran in the last events · <span class="critical">▬</span> critical path ·
      double-click or Enter expands · f fits · ? keys
    </>
  );
}

function GraphCanvas({ graph, operators }: { graph: GraphController; operators: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const keys = useMemo(() => new GraphKeys(graph), [graph]);
  const address = useMemo(() => new GraphAddress(graph), [graph]);
  useEffect(() => {
    const element = canvas.current;
    if (element === null) return;
    const unlink = address.attach();
    const detach = graph.attach(element);
    const release = listenToMouse(element, graph);
    return () => {
      release();
      detach();
      unlink();
    };
  }, [graph]);
  return (
    <>
      <Unread address={address} operators={operators} />
      <div class="canvas-box">
        <canvas
          ref={canvas}
          tabIndex={0}
          role="application"
          aria-label="SSA graph. Arrow keys move between boxes; from an operator left goes to what it waits for, right to what waits for it, up and down to the others of these, with Shift to the next box. Enter expands, v shows a table of the same operators."
          aria-describedby="graph-hint"
          data-testid="graph"
          onKeyDown={(event) => keys.onKey(event)}
        />
        <span class="sr" role="status" aria-live="polite" data-testid="graph-says">
          {keys.said.value}
        </span>
        <Hint graph={graph} keys={keys} />
        <LayingOut graph={graph} operators={operators} />
      </div>
    </>
  );
}

/** A link that was cut off, or that is of another graph, shows less than it was to: it says what. */
function Unread({ address, operators }: { address: GraphAddress; operators: number }) {
  const op = url.value.searchParams.get("op");
  const isThere = op === null || url.value.searchParams.has("pass") || (/^\d+$/.test(op) && Number(op) < operators);
  const text = [
    ...address.notes.value,
    ...(isThere ? [] : [`No operator ${cut(op ?? "")} is in this graph of ${integer(operators)}.`]),
  ];
  if (text.length === 0) return null;
  const dismiss = () => {
    address.dismiss();
    if (!isThere) setQuery({ op: null });
  };
  return (
    <div class="banner" role="status" data-testid="address-note">
      <span>{text.join(" ")}</span>
      <button type="button" class="btn small" onClick={dismiss}>
        Dismiss
      </button>
    </div>
  );
}

/** The scale of what the boxes say in numbers too. */
function StalenessLegend({ behind }: { behind: Behind }) {
  return (
    <span class="staleness" data-testid="staleness-legend">
      {behind.size === 0 ? (
        "not measured: no server has counted a push yet"
      ) : (
        <>
          0 <i class="scale-bar" aria-hidden="true" /> {compact(mostBehind(behind))} updates by other trainers since its
          parameters were pulled · <i class="grey-box" aria-hidden="true" /> reads none, or not measured
        </>
      )}
    </span>
  );
}

/** Instead of an empty canvas, or of what another graph left on it. A later layout leaves the one before in its place. */
function LayingOut({ graph, operators }: { graph: GraphController; operators: number }) {
  graph.layoutVersion.value;
  if (!graph.busy.value || graph.layout !== null) return null;
  return (
    <div class="laying-out" role="status" data-testid="laying-out">
      <b>Laying out {plural(operators, "operator")}…</b>
      <span>The table shows them already.</span>
    </div>
  );
}

function listenToMouse(canvas: HTMLCanvasElement, graph: GraphController): () => void {
  let drag: { x: number; y: number; moved: boolean } | null = null;
  const at = (event: MouseEvent) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top] as const;
  };
  const handlers = {
    wheel: (event: WheelEvent) => {
      // On a narrow page the graph is part of what scrolls.
      if (graph.layout?.down === true && !event.ctrlKey) return;
      event.preventDefault();
      graph.zoom(Math.exp(-event.deltaY * 0.0015), ...at(event));
    },
    pointerdown: (event: PointerEvent) => {
      drag = { x: event.clientX, y: event.clientY, moved: false };
      graph.hold();
      canvas.setPointerCapture(event.pointerId);
    },
    pointermove: (event: PointerEvent) => {
      if (drag === null) {
        graph.hover(graph.at(...at(event)));
        return;
      }
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      graph.pan(dx, dy);
      drag = { x: event.clientX, y: event.clientY, moved: true };
    },
    pointerup: (event: PointerEvent) => {
      const click = drag !== null && !drag.moved;
      drag = null;
      if (!click) return;
      graph.select(graph.at(...at(event)));
      linkSelection(graph);
    },
    pointercancel: () => {
      drag = null;
    },
    dblclick: () => toggleSelected(graph),
    pointerleave: () => graph.hover(-1),
  };
  const entries = Object.entries(handlers) as [string, EventListener][];
  for (const [name, handler] of entries) canvas.addEventListener(name, handler, { passive: false });
  return () => {
    for (const [name, handler] of entries) canvas.removeEventListener(name, handler);
  };
}
