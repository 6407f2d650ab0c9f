/** The newest step that was sampled whole, per stream and graph: what the timeline draws. */
import { type Frame, smallColumn } from "../codec";
import { Column, FLAG_IN_FULL, FLAG_WHOLE_STEP } from "../constants";

export interface StepTrace {
  readonly stream: number;
  readonly epoch: number;
  readonly hash: string;
  readonly step: number;
  readonly t0Ns: bigint;
  /** Of a while in which every step was recorded, not of a sample. */
  readonly inFull: boolean;
  /** Nanoseconds from `t0Ns`. */
  readonly start: Uint16Array | Uint32Array | Float64Array;
  readonly duration: Uint16Array | Uint32Array;
  readonly op: Uint16Array | Uint32Array;
  readonly thread: Uint16Array | Uint32Array;
}

export interface LastOp {
  readonly hash: string;
  readonly step: number;
  readonly t0Ns: bigint;
  readonly op: number;
}

/** A step of more slices, or of more seconds, than one frame holds comes in several, in the order of time. */
export function joined(first: StepTrace, then: StepTrace): StepTrace {
  const later = Number(then.t0Ns - first.t0Ns);
  const start = new Float64Array(first.start.length + then.start.length);
  start.set(first.start);
  for (let i = 0; i < then.start.length; i++) start[first.start.length + i] = (then.start[i] ?? 0) + later;
  return {
    ...first,
    start,
    duration: oneBehindTheOther(first.duration, then.duration),
    op: oneBehindTheOther(first.op, then.op),
    thread: oneBehindTheOther(first.thread, then.thread),
  };
}

/** Traces of one process and graph, in the order of time, as one. O(slices). */
export function oneBehindAnother(traces: readonly StepTrace[]): StepTrace {
  const [first] = traces;
  if (first === undefined) throw new Error("no trace");
  const size = traces.reduce((sum, one) => sum + one.op.length, 0);
  const start = new Float64Array(size);
  const [duration, op, thread] = [new Uint32Array(size), new Uint32Array(size), new Uint32Array(size)];
  let at = 0;
  for (const one of traces) {
    const later = Number(one.t0Ns - first.t0Ns);
    for (let i = 0; i < one.op.length; i++) start[at + i] = (one.start[i] ?? 0) + later;
    duration.set(one.duration, at);
    op.set(one.op, at);
    thread.set(one.thread, at);
    at += one.op.length;
  }
  return { ...first, start, duration, op, thread };
}

function oneBehindTheOther(first: Uint16Array | Uint32Array, then: Uint16Array | Uint32Array): Uint32Array {
  const both = new Uint32Array(first.length + then.length);
  both.set(first);
  both.set(then, first.length);
  return both;
}

export const traceOf = (hash: string, frame: Frame): StepTrace => ({
  stream: frame.stream,
  epoch: frame.epoch,
  hash,
  step: frame.step,
  t0Ns: frame.t0Ns,
  inFull: (frame.flags & FLAG_IN_FULL) !== 0,
  start: smallColumn(frame, Column.START_NS),
  duration: smallColumn(frame, Column.DURATION_NS),
  op: smallColumn(frame, Column.OP),
  thread: smallColumn(frame, Column.THREAD),
});

export class StepStore {
  #traces = new Map<string, StepTrace>();
  #last = new Map<number, LastOp>();
  /** Steps received, so that a held timeline can say how many newer ones there are. */
  steps = 0;

  /** Returns what the frame holds of a whole step, null if it is not of one. */
  ingest(hash: string, frame: Frame): StepTrace | null {
    if (frame.count === 0) return null;
    this.#noteLast(hash, frame);
    if ((frame.flags & FLAG_WHOLE_STEP) === 0) return null;
    const trace = traceOf(hash, frame);
    const key = `${frame.stream}/${hash}`;
    const before = this.#traces.get(key);
    const goesOn = before?.step === trace.step && before.epoch === trace.epoch && before.t0Ns <= trace.t0Ns;
    this.#traces.set(key, goesOn ? joined(before, trace) : trace);
    if (!goesOn) this.steps += 1;
    return trace;
  }

  /** What a stream ran last, in a step that was sampled whole or broke off. */
  lastOf(stream: number): LastOp | undefined {
    return this.#last.get(stream);
  }

  #noteLast(hash: string, frame: Frame): void {
    const before = this.#last.get(frame.stream);
    const ops = smallColumn(frame, Column.OP);
    if (before !== undefined && before.t0Ns > frame.t0Ns) return;
    this.#last.set(frame.stream, { hash, step: frame.step, t0Ns: frame.t0Ns, op: ops[ops.length - 1] ?? 0 });
  }

  /**
   * The newest step of each stream, by stream: of a graph that trains, whatever its hash, else of one that evaluates.
   * `trains`: null while the document is not there.
   */
  newest(trains: (hash: string) => boolean | null): StepTrace[] {
    const found = new Map<number, StepTrace>();
    const rank = (trace: StepTrace) => Number(trains(trace.hash) ?? -1);
    for (const trace of this.#traces.values()) {
      if (trains(trace.hash) === null) continue;
      const other = found.get(trace.stream);
      const better = other === undefined || rank(trace) > rank(other);
      if (better || (rank(trace) === rank(other) && trace.t0Ns > other.t0Ns)) found.set(trace.stream, trace);
    }
    // A test pass of one trainer is not shown beside the training of others.
    const all = [...found.values()];
    const some = all.filter((trace) => rank(trace) === 1);
    return (some.length > 0 ? some : all).sort((a, b) => a.stream - b.stream);
  }
}

/** When the last event of a frame ended, in Unix milliseconds: what "behind" is measured from. */
export function endOfFrameMs(frame: Frame): number {
  const t0Ms = Number(frame.t0Ns / 1000n) / 1000;
  const start = smallColumn(frame, Column.START_NS);
  const duration = smallColumn(frame, Column.DURATION_NS);
  let last = 0;
  for (let i = 0; i < start.length; i++) last = Math.max(last, (start[i] ?? 0) + (duration[i] ?? 0));
  return t0Ms + last / 1e6;
}
