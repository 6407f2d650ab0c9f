/**
 * Every sampled step that the page has: those that came live, and those that it fetched from the recording. One of
 * them may be chosen; graph, panel and timeline then show it alone, from the same events as when it was live.
 *
 * Bounded by slices, oldest dropped (they are in the recording still). A step of several trainers is one entry, as is a
 * step of an evaluation that has the same number: which of its traces are drawn is decided where graphs are known.
 */
import { computed, signal } from "@preact/signals";
import { decodeFrame, type Frame } from "../codec";
import { FLAG_WHOLE_STEP, Kind } from "../constants";
import { BUCKETS, type Bucket, bucketCodes } from "../graph/group";
import type { GraphDocument } from "../types";
import { GraphRuntime } from "./ops";
import { joined, oneBehindAnother, type StepTrace, traceOf } from "./steps";

const MAX_SLICES = 3_000_000;
/** Of a small graph every step may be sampled. */
const MAX_STEPS = 4000;
/** Slices of several steps at once: more of them, and the oldest are left out. */
const MOST_AT_ONCE = 600_000;
const PAGE_BYTES = 4 << 20;
const LEAST_PAGE_BYTES = 256 << 10;

/** How far the recording of one stream was fetched. `t0Ns`: of the newest frame, -1 before any. */
interface Cursor {
  afterSeq: bigint | null;
  t0Ns: bigint;
  hash: string;
  done: boolean;
}

export interface Sampled {
  readonly key: string;
  /** Of several steps the last. */
  readonly step: number;
  readonly t0Ns: bigint;
  readonly traces: readonly StepTrace[];
  /** Of several steps that are shown at once: the first, and how many of them are here. */
  readonly range?: { readonly first: number; readonly count: number };
}

/** One step, or all from the first to the last. */
export interface StepRange {
  readonly first: number;
  readonly last: number;
}

export const oneStep = (step: number): StepRange => ({ first: step, last: step });

/** "17" or "17-42", as the address has it; null for what is neither. */
export function rangeOf(text: string | null): StepRange | null {
  const found = /^(\d{1,15})(?:-(\d{1,15}))?$/.exec(text ?? "");
  if (found === null) return null;
  const [a, b] = [Number(found[1]), Number(found[2] ?? found[1])];
  return { first: Math.min(a, b), last: Math.max(a, b) };
}

export const rangeText = ({ first, last }: StepRange): string => (first === last ? `${first}` : `${first}-${last}`);

export interface Bar extends Sampled {
  readonly spanNs: number;
  /** Shares of the time in operators; together 1. */
  readonly compute: number;
  readonly sync: number;
  readonly input: number;
}

/** Frames of a stream, each behind its length: `GET /jobs/{id}/frames`. */
export type FetchFrames = (stream: number, afterSeq: bigint | null, limitBytes: number) => Promise<ArrayBuffer>;

export class StepHistory {
  readonly version = signal(0);
  /** The steps that the address names; null: the newest is shown. */
  readonly wanted = signal<StepRange | null>(null);
  /** Whether the recording may hold steps that the page has not fetched. */
  readonly more = signal(true);
  readonly busy = signal(false);
  readonly chosen = computed<Sampled | null>(() => {
    this.version.value;
    const wanted = this.wanted.value;
    return wanted === null ? null : chosenOf(this.all(), wanted);
  });
  #entries = new Map<string, Sampled>();
  /** The same, in the order of time. */
  #sorted: Sampled[] = [];
  #bars = new Map<string, Bar>();
  /** Answers that were fetched. */
  loads = 0;
  #slices = 0;
  #cursors = new Map<number, Cursor>();

  constructor(
    private readonly fetchFrames: FetchFrames,
    private readonly onWork: (frame: Frame) => void = () => {},
  ) {}

  /** How many steps that are here were recorded in full. */
  inFull(): number {
    return this.#sorted.reduce((sum, one) => sum + Number(isInFull(one)), 0);
  }

  /** Steps in the order of time. */
  all(): readonly Sampled[] {
    return this.#sorted;
  }

  add(trace: StepTrace): void {
    const key = `${trace.epoch}/${trace.step}`;
    const entry = this.#entries.get(key) ?? { key, step: trace.step, t0Ns: trace.t0Ns, traces: [] };
    if (entry.traces.some((one) => has(one, trace))) return;
    const at = entry.traces.findIndex((one) => one.stream === trace.stream && one.hash === trace.hash);
    const before = entry.traces[at];
    const traces = before === undefined ? [...entry.traces, trace] : entry.traces.with(at, inOrder(before, trace));
    this.#put({ ...entry, t0Ns: trace.t0Ns < entry.t0Ns ? trace.t0Ns : entry.t0Ns, traces });
    this.#slices += trace.op.length;
    while ((this.#slices > MAX_SLICES || this.#sorted.length > MAX_STEPS) && this.#sorted.length > 1)
      this.#dropOldest();
  }

  /** O(1) for the newest step, as nearly all are. */
  #put(entry: Sampled): void {
    if (this.#entries.has(entry.key)) {
      const at = this.#sorted.findLastIndex((one) => one.key === entry.key);
      this.#sorted.splice(at, 1);
    }
    const before = this.#sorted.findLastIndex((one) => one.t0Ns <= entry.t0Ns);
    this.#sorted.splice(before + 1, 0, entry);
    this.#entries.set(entry.key, entry);
    this.#bars.delete(entry.key);
  }

  /** What the strip draws: of each step the traces whose graphs are known and accepted. */
  bars(documentOf: (hash: string) => GraphDocument | null): Bar[] {
    return this.all().flatMap((one) => {
      const known = this.#bars.get(one.key);
      if (known !== undefined) return [known];
      const drawn = one.traces.filter((trace) => documentOf(trace.hash) !== null);
      const bar = barOf(one, drawn, documentOf);
      if (bar === null) return [];
      // Others may be those of a graph whose document comes still.
      if (drawn.length === one.traces.length) this.#bars.set(one.key, bar);
      return [bar];
    });
  }

  /**
   * Fetch more of the recording of these streams, the oldest first, about `pages` pages of bytes. The stream that is
   * behind the others in time goes first, so that a step comes with all of its trainers. Raises ApiError.
   */
  async load(streams: readonly number[], pages: number, onGraph: (hash: string) => void): Promise<void> {
    if (this.busy.value) return;
    this.busy.value = true;
    this.loads += 1;
    const answers = Math.max(pages, streams.length);
    const limitBytes = Math.max(LEAST_PAGE_BYTES, Math.floor((pages * PAGE_BYTES) / answers));
    try {
      for (let page = 0; page < answers; page++) {
        const stream = this.#behind(streams);
        if (stream === undefined) break;
        await this.#page(stream, limitBytes, onGraph);
        this.version.value += 1;
      }
      this.more.value = this.#behind(streams) !== undefined;
    } finally {
      this.busy.value = false;
    }
  }

  /** Of the streams of which there is more, the one that was fetched least far. */
  #behind(streams: readonly number[]): number | undefined {
    const at = (stream: number) => this.#cursors.get(stream)?.t0Ns ?? -1n;
    const open = streams.filter((one) => this.#cursors.get(one)?.done !== true);
    return open.reduce<number | undefined>((a, b) => (a === undefined || at(b) < at(a) ? b : a), undefined);
  }

  async #page(stream: number, limitBytes: number, onGraph: (hash: string) => void): Promise<void> {
    const cursor = this.#cursors.get(stream) ?? { afterSeq: null, t0Ns: -1n, hash: "", done: false };
    this.#cursors.set(stream, cursor);
    const content = await this.fetchFrames(stream, cursor.afterSeq, limitBytes);
    cursor.done = content.byteLength === 0;
    for (const frame of framesIn(content)) {
      cursor.afterSeq = frame.seq;
      if (frame.t0Ns > cursor.t0Ns) cursor.t0Ns = frame.t0Ns;
      if (frame.kind === Kind.GRAPH_USED) {
        cursor.hash = String((frame.body as { readonly hash?: unknown }).hash ?? "");
        onGraph(cursor.hash);
      } else if (frame.kind === Kind.INPUT_EVENTS || frame.kind === Kind.EXCHANGE) {
        this.onWork(frame);
      } else if (cursor.hash !== "" && (frame.flags & FLAG_WHOLE_STEP) !== 0 && frame.count > 0) {
        this.add(traceOf(cursor.hash, frame));
      }
    }
  }

  #dropOldest(): void {
    const oldest = this.#sorted.shift();
    if (oldest === undefined) return;
    this.#entries.delete(oldest.key);
    this.#bars.delete(oldest.key);
    for (const trace of oldest.traces) this.#slices -= trace.op.length;
  }
}

/** The steps of a range, as one; of a run that was started again those of the newest attempt. */
function chosenOf(all: readonly Sampled[], { first, last }: StepRange): Sampled | null {
  const newest = all.findLast((one) => one.step >= first && one.step <= last);
  if (newest === undefined || first === last) return newest ?? null;
  const epoch = epochOf(newest);
  const some = all.filter((one) => one.step >= first && one.step <= last && epochOf(one) === epoch);
  return together(some.slice(-mostThatFit(some)), newest);
}

const epochOf = (one: Sampled): number => one.traces[0]?.epoch ?? 0;

/** How many of the last steps have no more slices together than a canvas takes. */
function mostThatFit(some: readonly Sampled[]): number {
  let slices = 0;
  const from = some.findLastIndex((one) => {
    slices += one.traces.reduce((sum, trace) => sum + trace.op.length, 0);
    return slices > MOST_AT_ONCE;
  });
  return Math.max(1, some.length - 1 - from);
}

function together(some: readonly Sampled[], newest: Sampled): Sampled {
  const parts = new Map<string, StepTrace[]>();
  for (const trace of some.flatMap((one) => one.traces)) {
    const key = `${trace.stream}/${trace.hash}`;
    parts.set(key, [...(parts.get(key) ?? []), trace]);
  }
  const first = some[0] ?? newest;
  const traces = [...parts.values()].map((of) => ({ ...oneBehindAnother(of), step: newest.step }));
  const range = { first: first.step, count: some.length };
  return { key: `${first.key}-${newest.key}`, step: newest.step, t0Ns: first.t0Ns, traces, range };
}

/** The newest steps that were recorded in full, one after another; null if fewer than two are here. */
export function newestInFull(all: readonly Sampled[]): StepRange | null {
  const last = all.findLastIndex(isInFull);
  const before = all.findLastIndex((one, at) => at < last && (!isInFull(one) || one.step >= (all[last]?.step ?? 0)));
  const [a, b] = [all[before + 1], all[last]];
  return a === undefined || b === undefined || a.step >= b.step ? null : { first: a.step, last: b.step };
}

export const isInFull = (one: Sampled): boolean => one.traces.some((trace) => trace.inFull);

/** Whether the events that `trace` begins with are in `one` already. */
const has = (one: StepTrace, trace: StepTrace): boolean =>
  one.stream === trace.stream &&
  one.hash === trace.hash &&
  trace.t0Ns >= one.t0Ns &&
  Number(trace.t0Ns - one.t0Ns) <= (one.start[one.start.length - 1] ?? 0);

const inOrder = (a: StepTrace, b: StepTrace): StepTrace => (a.t0Ns <= b.t0Ns ? joined(a, b) : joined(b, a));

function framesIn(content: ArrayBuffer) {
  const view = new DataView(content);
  const frames = [];
  for (let at = 0; at + 4 <= content.byteLength; ) {
    const size = view.getUint32(at, true);
    frames.push(decodeFrame(content.slice(at + 4, at + 4 + size)));
    at += 4 + size;
  }
  return frames;
}

function barOf(
  one: Sampled,
  drawn: readonly StepTrace[],
  documentOf: (hash: string) => GraphDocument | null,
): Bar | null {
  const spent = new Float64Array(BUCKETS.length);
  const [first] = drawn;
  if (first === undefined) return null;
  const t0Ns = drawn.reduce((least, trace) => (trace.t0Ns < least ? trace.t0Ns : least), first.t0Ns);
  let end = 0;
  for (const trace of drawn) {
    const document = documentOf(trace.hash);
    if (document === null) continue;
    end = Math.max(end, Number(trace.t0Ns - t0Ns) + spendOf(trace, bucketCodes(document), spent));
  }
  const of = (bucket: Bucket) => spent[BUCKETS.indexOf(bucket)] ?? 0;
  const all = Math.max(
    1,
    spent.reduce((sum, ns) => sum + ns, 0),
  );
  const [sync, input] = [of("communication") / all, of("input") / all];
  return { ...one, spanNs: end, compute: end === 0 ? 0 : Math.max(0, 1 - sync - input), sync, input };
}

/** Add what a trace spent in each bucket; return when it ended, from its first event. */
function spendOf(trace: StepTrace, codes: Uint8Array, spent: Float64Array): number {
  const { op, start, duration } = trace;
  let end = 0;
  for (let i = 0; i < op.length; i++) {
    const ns = duration[i] ?? 0;
    end = Math.max(end, (start[i] ?? 0) + ns);
    const code = codes[op[i] ?? codes.length];
    if (code !== undefined) spent[code] = (spent[code] ?? 0) + ns;
  }
  return end;
}

/** Sums of one step alone, in place of those since the page was opened. It lights nothing: it ran in the past. */
export function runtimeOfStep(one: Sampled, document: GraphDocument, hash: string): GraphRuntime {
  const runtime = new GraphRuntime(hash);
  runtime.setDocument(document);
  for (const trace of one.traces) {
    if (trace.hash !== hash) continue;
    for (let i = 0; i < trace.op.length; i++) {
      const op = trace.op[i] ?? 0;
      if (op >= document.ops.length) continue;
      const spent = trace.duration[i] ?? 0;
      runtime.received[op] = 1;
      runtime.durations.add(op, trace.duration[i] ?? 0);
      runtime.count[op] = (runtime.count[op] ?? 0) + 1;
      runtime.totalNs[op] = (runtime.totalNs[op] ?? 0) + spent;
      runtime.maxNs[op] = Math.max(runtime.maxNs[op] ?? 0, spent);
      runtime.sumNs += spent;
    }
  }
  // Views compute anew when this number changes; that of a live graph is whole.
  runtime.rows = one.step + 0.5 / (one.range?.count ?? 1);
  return runtime;
}

/** The step before or after the chosen one (null: the newest is shown); null: go back to live. */
export function neighbour(bars: readonly Sampled[], chosen: StepRange | null, by: -1 | 1): number | null {
  const from = chosen === null ? null : by < 0 ? chosen.first : chosen.last;
  const at = from === null ? bars.length - 1 : bars.findLastIndex((one) => one.step === from);
  const next = at + by;
  if (next >= bars.length) return null;
  return bars[Math.max(0, next)]?.step ?? null;
}
