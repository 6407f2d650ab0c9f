/** One job: header, tabs, and the view that the address names. Owns the job's store and controllers. */
import { untracked, useSignalEffect } from "@preact/signals";
import type { TargetedKeyboardEvent } from "preact";
import { useEffect, useMemo } from "preact/hooks";
import { GraphController } from "../graph/controller";
import { BUCKETS } from "../graph/group";
import { Empty, ErrorCard, Link } from "../parts/basics";
import { later, PanelFrame } from "../parts/later";
import { jobHref, linkedOp, navigate, route, TABS, type Tab, url } from "../router";
import { currentGraph, currentJob, currentTimeline } from "../store/current";
import { JobStore } from "../store/job";
import { isCommand, isWithoutGraph } from "../store/mode";
import { TimelineController } from "../timeline/controller";
import { CompletenessMark } from "./completeness";
import { CrashCard } from "./crash";
import { ConfigView, EventsView } from "./facts";
import { GraphView } from "./graph";
import { JobHeader } from "./header";
import { LogsView } from "./logs";
import { MetricsView } from "./metrics";
import { SidePanel } from "./side";
import { StepStrip } from "./strip";
import { SyncView } from "./sync";
import { TimelineView } from "./timeline";

const AdviceView = later<{ store: JobStore }>(async () => (await import("./advice")).AdviceView, PanelFrame);

/** A tab of the same job, with the steps that were chosen: all views show the same part. */
function tabHref(jobId: string, tab: Tab): string {
  const step = url.value.searchParams.get("step");
  const href = jobHref(jobId, tab);
  return step === null ? href : `${href}${href.includes("?") ? "&" : "?"}step=${encodeURIComponent(step)}`;
}

export interface JobParts {
  readonly store: JobStore;
  readonly graph: GraphController;
  readonly timeline: TimelineController;
}

export function JobPage({ jobId }: { jobId: string }) {
  const parts = useMemo<JobParts>(() => {
    const store = new JobStore(jobId);
    return { store, graph: new GraphController(store), timeline: new TimelineController(store) };
  }, [jobId]);
  useEffect(() => {
    currentJob.value = parts.store;
    currentGraph.value = parts.graph;
    currentTimeline.value = parts.timeline;
    return () => {
      parts.store.dispose();
      currentJob.value = null;
      currentGraph.value = null;
      currentTimeline.value = null;
    };
  }, [parts]);
  // One selection for graph, timeline and side panel: the operator in the address.
  useSignalEffect(() => {
    const [op, document] = [linkedOp.value, parts.store.shownDocument.value];
    if (op !== null && document !== null && parts.store.stage.value === null) untracked(() => parts.graph.reveal(op));
  });
  const { store } = parts;
  if (store.job.value === null) {
    return (
      <main class="page" id="main" aria-busy={store.error.value === null}>
        {store.error.value === null ? <Empty title="Loading the job…" /> : <Missing jobId={jobId} store={store} />}
      </main>
    );
  }
  return (
    <>
      <JobHeader job={store.job.value} store={store} />
      <CompletenessMark store={store} />
      {store.degraded.value !== null && (
        <div class="banner" role="status">
          The server slowed this dashboard's event stream down: {store.degraded.value}
        </div>
      )}
      {currentTab() === "overview" && <CrashCard job={store.job.value} store={store} />}
      <Tabs jobId={jobId} store={store} />
      <TabBody parts={parts} />
    </>
  );
}

function Missing({ jobId, store }: { jobId: string; store: JobStore }) {
  return (
    <>
      {store.error.value !== null && <ErrorCard error={store.error.value} />}
      <Empty title="This job cannot be shown">
        <span class="mono">{jobId}</span>
        <Link href="/" class="btn">
          Go to jobs
        </Link>
      </Empty>
    </>
  );
}

function currentTab(): Tab {
  return route.value.page === "job" ? route.value.tab : "overview";
}

/** Views of a sampled step. */
const OF_STEP: readonly Tab[] = ["overview", "graph", "timeline"];
/** Views of a graph: a command without one has none of them. */
const OF_GRAPH: readonly Tab[] = ["graph", "timeline", "sync", "advice"];

function Tabs({ jobId, store }: { jobId: string; store: JobStore }) {
  const tab = currentTab();
  const job = store.job.value;
  const hasGraph = store.shownHash.value !== null || job === null || !isCommand(job);
  const shown = TABS.filter(([id]) => hasGraph || id === tab || !OF_GRAPH.includes(id));
  return (
    <nav class="tabs" aria-label="Views and colours">
      <div class="tablist" role="tablist" aria-label="Views of the job" onKeyDown={(event) => moveTab(event, jobId)}>
        {shown.map(([id, label]) => (
          <Link
            key={id}
            role="tab"
            href={tabHref(jobId, id)}
            aria-selected={id === tab}
            tabIndex={id === tab ? 0 : -1}
            id={`tab-${id}`}
            aria-controls="view"
            data-testid={`tab-${id}`}
          >
            {label}
          </Link>
        ))}
      </div>
      {hasGraph && <Legend />}
    </nav>
  );
}

/** Arrow keys, Home and End move between tabs, and open what they move to. */
function moveTab(event: TargetedKeyboardEvent<HTMLElement>, jobId: string): void {
  const tabs = [...event.currentTarget.querySelectorAll<HTMLElement>("[role=tab]")];
  const at = tabs.findIndex((one) => one.getAttribute("aria-selected") === "true");
  const to: Readonly<Record<string, number>> = {
    ArrowRight: (at + 1) % tabs.length,
    ArrowLeft: (at + tabs.length - 1) % tabs.length,
    Home: 0,
    End: tabs.length - 1,
  };
  const next = tabs[to[event.key] ?? -1];
  if (next === undefined) return;
  event.preventDefault();
  next.focus();
  const id = TABS.find(([one]) => next.id === `tab-${one}`)?.[0];
  if (id !== undefined) navigate(tabHref(jobId, id));
}

function Legend() {
  return (
    <div class="legend" role="note" aria-label="Colours of operator roles">
      {BUCKETS.map((bucket) => (
        <span key={bucket}>
          <i class={`swatch c-${bucket}`} />
          {bucket}
        </span>
      ))}
    </div>
  );
}

function TabBody({ parts }: { parts: JobParts }) {
  const tab = currentTab();
  const layout = tab === "overview" || tab === "graph" ? tab : "single";
  return (
    <main class="work-frame" id="main">
      {OF_STEP.includes(tab) && <StepStrip store={parts.store} />}
      <div class={`work ${layout}`} id="view" role="tabpanel" aria-labelledby={`tab-${tab}`}>
        <View tab={tab} parts={parts} />
      </div>
    </main>
  );
}

function View({ tab, parts }: { tab: Tab; parts: JobParts }) {
  const { store } = parts;
  switch (tab) {
    case "overview":
      store.metricsVersion.value;
      if (isWithoutGraph(store.job.value, store.shownHash.value, store.series.byName.size)) {
        return (
          <>
            <MetricsView store={store} />
            <SidePanel parts={parts} what="all" />
          </>
        );
      }
      return (
        <>
          <GraphView parts={parts} />
          <SidePanel parts={parts} what="all" />
          <TimelineView parts={parts} wide />
        </>
      );
    case "graph":
      return (
        <>
          <GraphView parts={parts} />
          <SidePanel parts={parts} what="operator" />
        </>
      );
    case "timeline":
      return <TimelineView parts={parts} />;
    case "sync":
      return <SyncView store={store} />;
    case "metrics":
      return <MetricsView store={store} />;
    case "advice":
      return <AdviceView store={store} />;
    case "logs":
      return <LogsView store={store} />;
    case "events":
      return <EventsView store={store} />;
    case "config":
      return <ConfigView store={store} />;
  }
}
