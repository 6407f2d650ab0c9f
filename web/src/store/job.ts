/**
 * Everything the dashboard knows about one job, fed by one subscription; made by the job page and disposed with it.
 *
 * State, metrics and logs arrive as text and are complete; operator frames may be dropped, and `droppedRows`
 * says how many. Signals are published at most four times a second: numbers that change faster cannot be read.
 */
import { batch, computed, signal } from "@preact/signals";
import { ApiError, api } from "../api";
import type { Frame } from "../codec";
import { Kind } from "../constants";
import { throttled } from "../frameloop";
import { loadDocument } from "../graph/remote";
import type { Stage } from "../graph/stages";
import { stream } from "../socket";
import type { EventRow, GraphDocument, Job, NodeRow, ServerMessage } from "../types";
import { CompletenessStore } from "./completeness";
import { DiagnosisStore } from "./diagnosis";
import { ExchangeStore } from "./exchange";
import { GraphLoader } from "./graphs";
import { runtimeOfStep, StepHistory } from "./history";
import { InputStore } from "./input";
import { withFigures } from "./jobs";
import { LogStore } from "./logs";
import { MediaStore } from "./media";
import { GraphRuntime, OpsStore } from "./ops";
import { OtherRuns } from "./runs";
import { SeriesStore } from "./series";
import { endOfFrameMs, StepStore } from "./steps";
import { SyncStore } from "./sync";
import { TableStore } from "./tables";

const PUBLISH_MS = 250;
/** A frame older than this on arrival is history. */
const STALE_MS = 5000;
/** How long after a snapshot kept frames may still come. */
const CATCH_UP_MS = 3000;
/** Earlier graphs that are fetched: as many feed shapes as a trainer keeps (core/penstock/telemetry/outbox.py). */
const MOST_GRAPHS = 16;
const MOST_LAGS = 1000;
const TERMINAL = new Set(["SUCCEEDED", "FAILED", "CANCELLED"]);

interface Parts {
  metrics: boolean;
  logs: boolean;
  ops: boolean;
  sync: boolean;
  step: boolean;
}
const NOTHING: Parts = { metrics: false, logs: false, ops: false, sync: false, step: false };

export const isTerminal = (job: Job): boolean => TERMINAL.has(job.state);

export class JobStore {
  readonly job = signal<Job | null>(null);
  readonly error = signal<ApiError | null>(null);
  readonly nodes = signal<readonly NodeRow[]>([]);
  readonly events = signal<readonly EventRow[]>([]);
  readonly degraded = signal<string | null>(null);
  /** Bumped when the part changed; views read the plain stores below and depend on these. */
  readonly metricsVersion = signal(0);
  readonly logsVersion = signal(0);
  readonly opsVersion = signal(0);
  readonly syncVersion = signal(0);
  readonly stepVersion = signal(0);
  readonly graphVersion = signal(0);
  readonly behindMs = signal<number | null>(null);
  readonly lastFrameMs = signal(Number.NEGATIVE_INFINITY);
  readonly droppedRows = signal(0);
  /** A graph that the person chose; null shows the one that runs most. */
  readonly chosenGraph = signal<string | null>(null);

  readonly series = new SeriesStore();
  readonly logs = new LogStore();
  readonly sync = new SyncStore();
  readonly exchange = new ExchangeStore();
  readonly tables = new TableStore();
  readonly steps = new StepStore();
  readonly input = new InputStore();
  readonly history = new StepHistory(
    (of, after, limit) => api.frames(this.jobId, of, after, limit, this.#recordedKinds(of)),
    (frame) => (frame.kind === Kind.EXCHANGE ? this.input.nameBlocks(frame) : this.input.ingest(frame)),
  );
  readonly others = new OtherRuns((jobId) => api.metrics(jobId));
  readonly media = new MediaStore(
    () => api.media(this.jobId),
    (id) => api.mediaContent(this.jobId, id),
  );
  readonly diagnosis = new DiagnosisStore(() => api.why(this.jobId));
  readonly completeness = new CompletenessStore(() => api.completeness(this.jobId));
  readonly documents = new GraphLoader(loadDocument, (hash, document) => this.#haveDocument(hash, document));
  readonly ops = new OpsStore((hash) => this.documents.load(hash));

  readonly shownHash = computed(() => {
    this.graphVersion.value;
    return this.chosenGraph.value ?? this.#autoHash();
  });
  readonly shownDocument = computed<GraphDocument | null>(() => {
    this.graphVersion.value;
    const hash = this.shownHash.value;
    return hash === null ? null : (this.ops.graphs.get(hash)?.document ?? null);
  });

  /** Sums of the shown graph: since the page was opened, or of the step that was chosen. */
  readonly shownRuntime = computed<GraphRuntime | undefined>(() => {
    const [hash, document, chosen] = [this.shownHash.value, this.shownDocument.value, this.history.chosen.value];
    if (hash === null) return undefined;
    if (chosen === null || document === null) return this.ops.graphs.get(hash);
    return runtimeOfStep(chosen, document, hash);
  });

  /** The graph before or after a pass, while it is looked at instead of the one that runs; nothing runs in it. */
  readonly stage = signal<Stage | null>(null);
  readonly drawnDocument = computed(() => this.stage.value?.document ?? this.shownDocument.value);
  readonly drawnRuntime = computed<GraphRuntime | undefined>(() => {
    const document = this.stage.value?.document;
    if (document === undefined) return this.shownRuntime.value;
    const still = new GraphRuntime("");
    still.setDocument(document);
    return still;
  });

  /** How long the newest events took to a painted canvas, in ms by the clocks of trainer and browser; for measurements. */
  readonly pixelLagsMs: number[] = [];
  #unpaintedMs: number | null = null;
  #unsubscribe: () => void;
  #gapRows = 0;
  #pending: Parts = { ...NOTHING };
  #behind: number | null = null;
  #publish: () => void;
  #frameListeners = new Set<() => void>();
  #snapshotAt = Number.POSITIVE_INFINITY;
  #overAtSnapshot = false;
  #lastSeq = new Map<number, { readonly epoch: number; readonly seq: bigint }>();
  #leastBehind = new Map<number, number>();
  #disposed = false;

  constructor(readonly jobId: string) {
    this.#publish = throttled(PUBLISH_MS, () => this.#flush());
    this.#unsubscribe = stream.subscribe({
      request: () => ({
        topic: "job",
        job_id: jobId,
        parts: ["state", "metrics", "logs", "ops", "sync"],
        log_offsets: this.logs.offsets(),
      }),
      onMessage: (message) => this.#receive(message),
      onFrame: (frame) => this.#frame(frame),
    });
    void this.#fetchEvents();
    void this.#fetchGraphs();
  }

  dispose(): void {
    this.#disposed = true;
    this.#unsubscribe();
    this.#frameListeners.clear();
    this.documents.dispose();
  }

  /** The document of a graph that trains; null if it does not, or is not there. */
  trainingDocument(hash: string): GraphDocument | null {
    const graph = this.ops.graphs.get(hash);
    return graph?.trains === true ? graph.document : null;
  }

  /** Fetch more of the sampled steps that were recorded, and of what servers did meanwhile. Raises ApiError. */
  async loadHistory(pages: number): Promise<void> {
    const streams = (this.job.value?.replicas ?? []).map((one) => one.stream);
    await this.history.load(streams, pages, (hash) => this.ops.ensure(hash));
  }

  /** Of a trainer its steps and data feed; of a server its work and the names of the blocks. */
  #recordedKinds(stream: number): readonly number[] {
    const replica = this.job.value?.replicas.find((one) => one.stream === stream);
    if (replica?.role === "pserver") return [Kind.EXCHANGE, Kind.INPUT_EVENTS];
    return [Kind.OP_EVENTS, Kind.GRAPH_USED, Kind.INPUT_EVENTS];
  }

  /** Call `listener` for every operator frame that arrived, so that a canvas can ask for an animation frame. */
  onFrame(listener: () => void): () => void {
    this.#frameListeners.add(listener);
    return () => this.#frameListeners.delete(listener);
  }

  /** A canvas shows all that came: count how old the oldest of it is. */
  painted(): void {
    if (this.#unpaintedMs === null) return;
    this.pixelLagsMs.push(Date.now() - this.#unpaintedMs);
    if (this.pixelLagsMs.length > MOST_LAGS) this.pixelLagsMs.shift();
    this.#unpaintedMs = null;
  }

  #autoHash(): string | null {
    return this.ops.busiest()?.hash ?? null;
  }

  #receive(message: ServerMessage): void {
    switch (message.type) {
      case "snapshot":
        if ("job" in message) this.#snapshot(message);
        return;
      case "job":
        this.job.value = message.job;
        return;
      case "figures":
        if (this.job.value !== null) {
          this.job.value = withFigures(this.job.value, message.jobs[this.job.value.id]);
        }
        return;
      case "metrics":
        this.series.append(message.series);
        this.#note("metrics");
        return;
      case "media":
        this.media.changed();
        return;
      case "log":
        this.logs.of(message.replica_id).append(message.offset, message.text, message.times);
        this.#note("logs");
        return;
      case "graph":
        this.ops.use(message.stream, message.hash);
        return;
      case "gap":
        this.#gap(message.dropped);
        return;
      case "degraded":
        this.degraded.value = message.reason;
        return;
      case "event":
        this.#addEvents([message.event]);
        return;
      case "nodes":
        this.nodes.value = message.nodes;
        return;
      case "conditions":
      case "unavailable":
        return; // of the server and of the connection: never of a job
      default:
        // A newer server may send more than this dashboard knows; what it knows stays right without it.
        message satisfies never;
    }
  }

  #snapshot(message: Extract<ServerMessage, { type: "snapshot"; job: Job }>): void {
    this.#snapshotAt = performance.now();
    this.#overAtSnapshot = isTerminal(message.job);
    batch(() => {
      this.error.value = null;
      this.degraded.value = null;
      this.job.value = message.job;
      this.nodes.value = message.nodes ?? [];
      this.series.restart(message.metrics ?? {});
      this.#note("metrics");
      for (const use of message.graphs ?? []) this.ops.use(use.stream, use.hash);
    });
  }

  #frame(frame: Frame): void {
    const replica = this.job.value?.replicas.find((one) => one.stream === frame.stream);
    if (replica === undefined && this.ops.of(frame.stream) === undefined) return;
    if (this.#seen(frame)) return;
    const now = performance.now();
    const behindMs = Date.now() - endOfFrameMs(frame);
    const mode = this.#fresh(frame, behindMs, now) ? "live" : "replay";
    switch (frame.kind) {
      case Kind.OP_EVENTS:
      case Kind.OP_SUMS:
        this.#opFrame(frame, now, mode, Date.now() - behindMs);
        break;
      case Kind.SYNC:
        this.#syncFrame(frame, now);
        break;
      case Kind.INPUT_EVENTS:
        if (this.input.ingest(frame)) this.#note("step");
        break;
      case Kind.EXCHANGE:
        this.tables.ingest(frame, performance.now());
        this.input.nameBlocks(frame);
        if (this.exchange.ingest(frame, now)) this.#note("sync");
        break;
      case Kind.GAP:
        this.#gap(frame.body as Readonly<Record<string, unknown>>);
        break;
      default:
        break;
    }
    if (mode === "live") this.#measure(frame, behindMs, now);
  }

  /** After a reconnect the server sends what it kept once more; a frame counts once. */
  #seen(frame: Frame): boolean {
    const last = this.#lastSeq.get(frame.stream);
    if (last !== undefined && last.epoch === frame.epoch && frame.seq <= last.seq) return true;
    this.#lastSeq.set(frame.stream, { epoch: frame.epoch, seq: frame.seq });
    return false;
  }

  /**
   * Whether a frame reports something that just happened. The server first sends what it kept, so that a page that
   * opens now is not empty; that counts in every sum, and lights nothing. A trainer whose clock is off by more
   * than the limit is recognised by all of its frames being so, once the kept ones have passed.
   */
  #fresh(frame: Frame, behindMs: number, now: number): boolean {
    if (this.#overAtSnapshot) return false;
    const settled = now - this.#snapshotAt > CATCH_UP_MS;
    const least = this.#leastBehind.get(frame.stream) ?? Number.POSITIVE_INFINITY;
    if (settled && behindMs < least) this.#leastBehind.set(frame.stream, behindMs);
    const skew = this.#leastBehind.get(frame.stream) ?? 0;
    return Math.abs(behindMs - (Math.abs(skew) > STALE_MS ? skew : 0)) < STALE_MS;
  }

  #opFrame(frame: Frame, now: number, mode: "live" | "replay", endedMs: number): void {
    const graph = this.ops.ingest(frame, now, mode);
    if (graph === undefined) return;
    this.#note("ops");
    if (mode === "live" && graph.hash === this.shownHash.value) this.#unpaintedMs ??= endedMs;
    if (frame.kind === Kind.OP_EVENTS) {
      const trace = this.steps.ingest(graph.hash, frame);
      if (trace !== null) this.history.add(trace);
      this.#note("step");
    }
    for (const listener of this.#frameListeners) listener();
  }

  #syncFrame(frame: Frame, now: number): void {
    const graph = this.ops.of(frame.stream);
    if (graph === undefined) return;
    this.sync.ingest(graph.hash, frame, now);
    this.#note("sync");
  }

  #measure(frame: Frame, behindMs: number, now: number): void {
    this.lastFrameMs.value = now;
    if (frame.kind !== Kind.OP_EVENTS && frame.kind !== Kind.OP_SUMS) return;
    const behind = Math.max(0, behindMs);
    // A moving mean: one late frame should show, a hundred prompt ones should outweigh it.
    this.#behind = this.#behind === null ? behind : this.#behind * 0.8 + behind * 0.2;
  }

  /**
   * Only what is reported counts. A hole in the numbers of the frames that come here proves nothing: METRICS, LOG and
   * others are numbered in the same row, and only the server sees all of them.
   */
  #gap(dropped: Readonly<Record<string, unknown>>): void {
    for (const rows of Object.values(dropped)) {
      if (typeof rows === "number" && rows > 0 && Number.isFinite(rows)) this.#gapRows += rows;
    }
    this.#note("ops");
  }

  #note(part: keyof Parts): void {
    this.#pending[part] = true;
    this.#publish();
  }

  #flush(): void {
    const due = this.#pending;
    this.#pending = { ...NOTHING };
    batch(() => {
      if (due.metrics) this.metricsVersion.value += 1;
      if (due.logs) this.logsVersion.value += 1;
      if (due.sync) this.syncVersion.value += 1;
      if (due.step) {
        this.stepVersion.value += 1;
        // The step that the address names may have come.
        if (this.history.wanted.value !== null && this.history.chosen.value === null) this.history.version.value += 1;
      }
      if (due.ops) {
        this.opsVersion.value += 1;
        if (this.#autoHash() !== this.shownHash.value) this.graphVersion.value += 1;
      }
      this.behindMs.value = this.#behind;
      this.droppedRows.value = this.#gapRows + this.ops.lostRows;
    });
  }

  #haveDocument(hash: string, document: GraphDocument): void {
    this.ops.ensure(hash).setDocument(document);
    this.#note("ops");
    this.#note("step");
    // A large graph has sums of many waiting frames to make: what is rendered of it is another task.
    setTimeout(() => {
      if (this.#disposed) return;
      this.graphVersion.value += 1;
      for (const listener of this.#frameListeners) listener();
    });
  }

  async #fetchEvents(): Promise<void> {
    try {
      const page = await api.events(this.jobId);
      if (!this.#disposed) this.#addEvents(page.items);
    } catch (error) {
      this.#fail(error);
    }
  }

  /** Graphs that the job used before: the one that trains may have run last before what the stream still holds. */
  async #fetchGraphs(): Promise<void> {
    try {
      const { items } = await api.graphs(this.jobId);
      if (this.#disposed) return;
      for (const hash of new Set(items.map((one) => one.hash).slice(-MOST_GRAPHS))) this.ops.ensure(hash);
    } catch (error) {
      // The stream names the graphs of what runs now; without the earlier ones the page shows those.
      if (!(error instanceof ApiError)) throw error;
    }
  }

  #addEvents(more: readonly EventRow[]): void {
    const byId = new Map(this.events.value.map((event) => [event.id, event]));
    for (const event of more) byId.set(event.id, event);
    this.events.value = [...byId.values()].sort((a, b) => (a.at < b.at ? 1 : -1));
  }

  #fail(error: unknown): void {
    if (!(error instanceof ApiError)) throw error;
    // A subscription to what does not exist would cost the connection again and again.
    if (error.status === 404 && this.job.value === null) this.#unsubscribe();
    this.error.value = error;
  }
}
