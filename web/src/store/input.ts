/**
 * Work beside operators (INPUT_EVENTS): what the data feed of each process did around sampled steps (reads, tensors of
 * batches, waits), and what parameter servers did for their trainers.
 */
import { type Frame, smallColumn } from "../codec";
import { Column, FIRST_READER } from "../constants";

/** Of one process; the oldest go. */
const MOST_FRAMES = 4000;
/** WORK: a thread that trains waits for a batch; it makes the tensors of one. */
const [BATCH, WAIT] = [1, 2] as const;
/** A batch is made as soon as it is there. */
const NEXT_NS = 1e6;
/** A step begins at most so long after its batch is there. */
const NEAR_NS = 100e6;

interface Chunk {
  readonly t0Ns: bigint;
  readonly endNs: bigint;
  readonly frame: Frame;
}

/** Nanoseconds from some time that the asker chose. */
export interface InputEvent {
  readonly start: number;
  readonly end: number;
  readonly work: number;
  readonly thread: number;
}

export const isReader = (thread: number): boolean => thread >= FIRST_READER;

export class InputStore {
  #chunks = new Map<number, Chunk[]>();
  #seen = new Set<string>();
  #blocks = new Map<number, ReadonlyMap<number, string>>();

  /** Returns whether the frame was new: a recorded one may have come live before. */
  ingest(frame: Frame): boolean {
    const key = keyOf(frame);
    if (frame.count === 0 || this.#seen.has(key)) return false;
    this.#seen.add(key);
    const chunks = this.#chunks.get(frame.stream) ?? [];
    this.#chunks.set(frame.stream, chunks);
    chunks.push({ t0Ns: frame.t0Ns, endNs: frame.t0Ns + BigInt(spanOf(frame)), frame });
    const gone = chunks.length > MOST_FRAMES ? chunks.shift() : undefined;
    if (gone !== undefined) this.#seen.delete(keyOf(gone.frame));
    return true;
  }

  /**
   * What belongs to a step of a process that ran from `fromNs` to `toNs`, in nanoseconds from `fromNs`: from the time
   * when the thread that trains began to wait for the step's batch, or to make it.
   */
  ofStep(stream: number, fromNs: bigint, toNs: bigint): InputEvent[] {
    const events = this.#overlapping(stream, fromNs - 60_000_000_000n, toNs, fromNs);
    const begin = beginOf(events);
    return events.filter((one) => one.end > begin);
  }

  /** What a process did between two times of its clock, in nanoseconds from the first, by the begin. */
  between(stream: number, fromNs: bigint, toNs: bigint): InputEvent[] {
    return this.#overlapping(stream, fromNs, toNs, fromNs).filter((one) => one.end > 0);
  }

  /** Take the blocks of a server's lanes from its EXCHANGE frame. */
  nameBlocks(frame: Frame): void {
    const lanes = (frame.body as { readonly lanes?: unknown } | null)?.lanes;
    if (typeof lanes !== "object" || lanes === null) return;
    const named = Object.entries(lanes).filter((one): one is [string, string] => typeof one[1] === "string");
    this.#blocks.set(frame.stream, new Map(named.map(([lane, name]) => [Number(lane), name])));
  }

  /** The block of a server's lane. */
  blockOf(stream: number, lane: number): string | undefined {
    return this.#blocks.get(stream)?.get(lane);
  }

  #overlapping(stream: number, fromNs: bigint, toNs: bigint, originNs: bigint): InputEvent[] {
    const found: InputEvent[] = [];
    const most = Number(toNs - originNs);
    for (const { t0Ns, endNs, frame } of this.#chunks.get(stream) ?? []) {
      if (endNs < fromNs || t0Ns > toNs) continue;
      const shift = Number(t0Ns - originNs);
      const [starts, durations] = [smallColumn(frame, Column.START_NS), smallColumn(frame, Column.DURATION_NS)];
      const [works, threads] = [frame.columns.get(Column.WORK), smallColumn(frame, Column.THREAD)];
      for (let i = 0; i < starts.length; i++) {
        const start = shift + (starts[i] ?? 0);
        const end = start + (durations[i] ?? 0);
        if (start < most) found.push({ start, end, work: Number(works?.[i] ?? 0), thread: threads[i] ?? 0 });
      }
    }
    return found.sort((a, b) => a.start - b.start);
  }
}

const keyOf = (frame: Frame): string => `${frame.stream}/${frame.epoch}/${frame.seq}`;

function spanOf(frame: Frame): number {
  const [starts, durations] = [smallColumn(frame, Column.START_NS), smallColumn(frame, Column.DURATION_NS)];
  let span = 0;
  for (let i = 0; i < starts.length; i++) span = Math.max(span, (starts[i] ?? 0) + (durations[i] ?? 0));
  return span;
}

/** When the input of the step that begins at 0 began, 0 if nothing says so. `events`: by their start. */
function beginOf(events: readonly InputEvent[]): number {
  const mine = events.filter((one) => !isReader(one.thread) && one.start < 0);
  const last = mine.at(-1);
  if (last === undefined || last.end < -NEAR_NS) return 0; // of an earlier step: this one had its batch already
  const before = mine.findLast((one) => one.thread === last.thread && one !== last);
  const waited = last.work === BATCH && before?.work === WAIT && last.start - before.end < NEXT_NS;
  return waited && before !== undefined ? before.start : last.start;
}
