/**
 * The exchange with parameter servers (core/penstock/protocol/exchange.py): a matrix of trainers and pservers, and blocks.
 *
 * Frames hold sums since a process began, so a rate is the difference of two of them: of the last ten seconds while the
 * job runs, of the whole run when it is over (or when only one frame came yet). Plain data; a malformed body is skipped.
 */
import type { Frame } from "../codec";
import type { Job, Replica } from "../types";
import type { Waited } from "./ranks";

export const WINDOW_MS = 10_000;
/** Frames come twice a second while something changes; later than this nothing did. */
export const SETTLED_MS = 1500;
const MOST_WAITS = 2000;
const FIELDS = 7;
const [CALLS, SENT, RECEIVED, WAIT, RETRIES, STALENESS, MERGES] = [0, 1, 2, 3, 4, 5, 6] as const;

type Sums = readonly number[];
type Rows = ReadonlyMap<string, ReadonlyMap<string, Sums>>;

interface Sample {
  readonly atMs: number;
  readonly arrivedMs: number;
  readonly step: number;
  readonly peers: readonly string[];
  readonly rows: Rows;
}

/** What one process did of each (peer, block) in `spanS` seconds and `steps` steps, `counted` by it or estimated. */
interface Delta {
  readonly spanS: number;
  readonly steps: number;
  readonly counted: boolean;
  readonly rows: Rows;
}

export interface Amounts {
  readonly bytesPerS: number;
  /** Nanoseconds of each step; of each exchange if no trainer counts steps. */
  readonly waitNs: number;
  /** Updates by others that a gradient did not know of, mean. */
  readonly staleness: number;
  /** Gradients that it is the mean of. */
  readonly pushes: number;
  readonly calls: number;
  readonly retries: number;
  readonly merges: number;
  readonly joined: number;
}

export interface BlockAmounts extends Amounts {
  readonly block: string;
}

export interface Cell extends Amounts {
  readonly trainer: number;
  readonly pserver: number;
  readonly sentPerS: number;
  readonly receivedPerS: number;
  readonly blocks: readonly BlockAmounts[];
}

/** `pserver` -1: in the trainer, before anything is sent. */
export interface BlockRow extends BlockAmounts {
  readonly pserver: number;
}

/** `waitNs`: for all servers, and in its own queues, as in `Amounts`. `stepNs`: null if it counts no steps. */
export interface TrainerTime {
  readonly waitNs: number;
  readonly stepNs: number | null;
}

export interface ExchangeView {
  readonly trainers: readonly number[];
  readonly times: ReadonlyMap<number, TrainerTime>;
  readonly pservers: readonly { readonly index: number; readonly endpoint: string }[];
  readonly cells: ReadonlyMap<string, Cell>;
  readonly blocks: readonly BlockRow[];
  readonly perStep: boolean;
  readonly whole: boolean;
}

export const cellKey = (trainer: number, pserver: number): string => `${trainer},${pserver}`;

export class ExchangeStore {
  #tracks = new Map<number, Sample[]>();
  #waits = new Map<number, Waited[]>();

  /** Returns whether the frame was understood. */
  ingest(frame: Frame, nowMs: number): boolean {
    const sample = read(frame, nowMs);
    if (sample === null) return false;
    const track = this.#tracks.get(frame.stream) ?? [];
    track.push(sample);
    while ((track[1]?.atMs ?? Number.POSITIVE_INFINITY) < sample.atMs - WINDOW_MS) track.shift();
    this.#tracks.set(frame.stream, track);
    this.#noteWait(frame.stream, sample);
    return true;
  }

  /** What a process waited for servers since it began, at steps that it had finished; the newest `MOST_WAITS`. */
  waits(stream: number): readonly Waited[] {
    return this.#waits.get(stream) ?? [];
  }

  #noteWait(stream: number, { step, rows }: Sample): void {
    let waitNs = 0;
    for (const blocks of rows.values()) for (const sums of blocks.values()) waitNs += sums[WAIT] ?? 0;
    const waits = this.#waits.get(stream) ?? [];
    if (step <= (waits[waits.length - 1]?.step ?? -1)) waits.pop();
    waits.push({ step, waitNs });
    if (waits.length > MOST_WAITS) waits.shift();
    this.#waits.set(stream, waits);
  }

  /**
   * Null while no process of the job has reported an exchange. While it runs, of several processes of one role and index
   * the newest one's amounts; of a job that is over the sums of all, as `penstock exchange` prints them.
   */
  view(job: Job, over: boolean, nowMs: number): ExchangeView | null {
    const shown = (over ? job.replicas : newestOf(job.replicas)).filter((one) => this.#tracks.has(one.stream));
    if (shown.length === 0) return null;
    const pservers = this.#servers(job, shown);
    const at = new Map(pservers.map((one) => [one.endpoint, one.index]));
    const parts = new Parts();
    let perStep = false;
    let whole = over;
    for (const replica of shown) {
      const track = this.#tracks.get(replica.stream) ?? [];
      const delta = difference(track, Date.parse(replica.started_at ?? job.created_at), over, nowMs);
      whole ||= track.length === 1 && replica.role === "trainer";
      if (replica.role === "trainer") perStep ||= delta.counted;
      parts.add(replica, delta, at);
    }
    return { ...parts.finish(), pservers, perStep, whole };
  }

  #servers(job: Job, shown: readonly Replica[]): { index: number; endpoint: string }[] {
    const known = newestOf(job.replicas).filter((one) => one.role === "pserver" && one.endpoint !== null);
    const found = known.map((one) => ({ index: one.index, endpoint: one.endpoint ?? "" }));
    const peers = shown
      .filter((one) => one.role === "trainer")
      .flatMap((one) => this.#tracks.get(one.stream)?.at(-1)?.peers ?? []);
    for (const peer of peers) {
      if (peer === "" || found.some((one) => one.endpoint === peer)) continue;
      found.push({ index: Math.max(-1, ...found.map((one) => one.index)) + 1, endpoint: peer });
    }
    return found.sort((a, b) => a.index - b.index);
  }
}

/** Of several processes of one role and index the newest is the one that runs. */
export function newestOf(replicas: readonly Replica[]): Replica[] {
  const found = new Map<string, Replica>();
  for (const one of replicas) {
    const key = `${one.role} ${one.index}`;
    if ((found.get(key)?.stream ?? -1) < one.stream) found.set(key, one);
  }
  return [...found.values()];
}

/** How long a trainer's processes counted, together. */
interface Time {
  spanS: number;
  steps: number;
  counted: boolean;
}

interface Tally {
  readonly trainer: Float64Array;
  readonly server: Float64Array;
  readonly time: Time;
}

/** Differences of all processes, gathered by (trainer, pserver, block), each quantity from the process that counts it. */
class Parts {
  #tallies = new Map<string, Map<string, Tally>>();
  #times = new Map<number, Time>();
  #trainers = new Set<number>();

  add(replica: Replica, delta: Delta, at: ReadonlyMap<string, number>): void {
    if (replica.role === "trainer") {
      this.#trainers.add(replica.index);
      const time = this.#time(replica.index);
      time.spanS += delta.spanS;
      time.steps += delta.steps;
      time.counted ||= delta.counted;
    }
    for (const [peer, blocks] of delta.rows) {
      const pair = pairOf(replica, peer, at);
      if (pair === null) continue;
      for (const [block, sums] of blocks) count(this.#tally(pair, block), replica, sums);
    }
  }

  #time(trainer: number): Time {
    const time = this.#times.get(trainer) ?? { spanS: 0, steps: 0, counted: false };
    this.#times.set(trainer, time);
    return time;
  }

  #tally(pair: readonly [number, number], block: string): Tally {
    const key = cellKey(...pair);
    const blocks = this.#tallies.get(key) ?? new Map<string, Tally>();
    this.#tallies.set(key, blocks);
    const made = { trainer: new Float64Array(FIELDS), server: new Float64Array(FIELDS) };
    const tally = blocks.get(block) ?? { ...made, time: this.#time(pair[0]) };
    blocks.set(block, tally);
    return tally;
  }

  finish(): Pick<ExchangeView, "trainers" | "times" | "cells" | "blocks"> {
    const cells = new Map<string, Cell>();
    const rows = new Map<string, Tally[]>();
    for (const [key, blocks] of this.#tallies) {
      const [trainer = 0, pserver = 0] = key.split(",").map(Number);
      for (const [block, tally] of blocks) {
        const row = `${pserver},${block}`;
        rows.set(row, [...(rows.get(row) ?? []), tally]);
      }
      if (pserver < 0) continue;
      const amounts = [...blocks].map(([block, tally]) => ({ block, ...amountsOf([tally]) }));
      cells.set(key, { trainer, pserver, ...amountsOf([...blocks.values()], true), blocks: amounts, ...ways(blocks) });
    }
    const blocks = [...rows].map(([key, tallies]) => {
      const comma = key.indexOf(",");
      return { pserver: Number(key.slice(0, comma)), block: key.slice(comma + 1), ...amountsOf(tallies) };
    });
    const trainers = [...this.#trainers].sort((a, b) => a - b);
    const times = new Map(trainers.map((trainer) => [trainer, this.#trainerTime(trainer)] as const));
    return { trainers, times, cells, blocks };
  }

  #trainerTime(trainer: number): TrainerTime {
    const { spanS, steps, counted } = this.#time(trainer);
    const mine = [...this.#tallies].filter(([key]) => Number(key.split(",")[0]) === trainer);
    const { waitNs } = amountsOf(
      mine.flatMap(([, blocks]) => [...blocks.values()]),
      true,
    );
    return { waitNs, stepNs: counted ? per(spanS * 1e9, steps) : null };
  }
}

function pairOf(replica: Replica, peer: string, at: ReadonlyMap<string, number>): [number, number] | null {
  if (replica.role === "trainer") {
    const pserver = peer === "" ? -1 : at.get(peer);
    return pserver === undefined ? null : [replica.index, pserver];
  }
  const trainer = /^trainer (\d{1,6})$/.exec(peer)?.[1];
  return trainer === undefined ? null : [Number(trainer), replica.index];
}

function count(tally: Tally, replica: Replica, sums: Sums): void {
  const into = replica.role === "trainer" ? tally.trainer : tally.server;
  sums.forEach((sum, field) => {
    into[field] = of(into, field) + sum;
  });
}

const of = (sums: Float64Array, field: number): number => sums[field] ?? 0;

/**
 * Amounts of several tallies together. `oneTrainer`: they are blocks of one trainer, whose waits add up to its step;
 * else one block of several trainers, whose waits are averaged.
 */
function amountsOf(tallies: readonly Tally[], oneTrainer = false): Amounts {
  const total = { bytesPerS: 0, waitNs: 0, calls: 0, retries: 0, merges: 0, joined: 0 };
  let stale = 0;
  let pushes = 0;
  for (const tally of tallies) {
    const { trainer, server } = tally;
    const { spanS, steps } = tally.time;
    const missed = Math.max(of(trainer, STALENESS), of(server, STALENESS));
    total.bytesPerS += per(of(trainer, SENT) + of(trainer, RECEIVED), spanS);
    total.waitNs += per(of(trainer, WAIT), steps);
    total.calls += of(trainer, CALLS);
    total.retries += of(trainer, RETRIES);
    total.merges += of(trainer, MERGES);
    total.joined += of(server, MERGES);
    stale += missed;
    // Only blocks that are pushed can be stale.
    if (missed > 0 || of(trainer, SENT) > 0) pushes += pushesOf(trainer, steps);
  }
  const share = oneTrainer ? 1 : Math.max(1, tallies.length);
  return { ...total, waitNs: total.waitNs / share, staleness: per(stale, pushes), pushes };
}

/** A push and a pull are two calls. A step pushes a block once at most; GEO, and queues that merge, less often. */
function pushesOf(trainer: Float64Array, steps: number): number {
  const calls = of(trainer, CALLS) / (of(trainer, RECEIVED) > 0 ? 2 : 1);
  return calls > 0 ? Math.min(steps, calls) : steps;
}

const per = (sum: number, count: number): number => (count > 0 ? sum / count : 0);

function ways(blocks: ReadonlyMap<string, Tally>): Pick<Cell, "sentPerS" | "receivedPerS"> {
  const all = [...blocks.values()];
  const rate = (field: number) => all.reduce((sum, one) => sum + per(of(one.trainer, field), one.time.spanS), 0);
  return { sentPerS: rate(SENT), receivedPerS: rate(RECEIVED) };
}

function difference(track: readonly Sample[], startedMs: number, over: boolean, nowMs: number): Delta {
  const last = track.at(-1);
  if (last === undefined) return deltaOf(0, 0, new Map());
  if (over || track.length === 1) return deltaOf(Math.max(0, (last.atMs - startedMs) / 1000), last.step, last.rows);
  // Nothing new for a while: the window moves on, by this page's clock, and what is in it becomes less.
  const silentMs = Math.max(0, nowMs - last.arrivedMs - SETTLED_MS);
  const endMs = last.atMs + silentMs;
  const first = track.findLast((one) => one.atMs <= endMs - WINDOW_MS) ?? track[0] ?? last;
  const rows = new Map<string, Map<string, Sums>>();
  for (const [peer, blocks] of last.rows) {
    const before = first.rows.get(peer);
    const less = ([block, sums]: readonly [string, Sums]) =>
      [block, sums.map((sum, i) => Math.max(0, sum - (before?.get(block)?.[i] ?? 0)))] as const;
    rows.set(peer, new Map([...blocks].map(less)));
  }
  return deltaOf(Math.min(endMs - first.atMs, WINDOW_MS + SETTLED_MS) / 1000, last.step - first.step, rows);
}

function deltaOf(spanS: number, steps: number, rows: Rows): Delta {
  return steps > 0 ? { spanS, steps, counted: true, rows } : { spanS, steps: exchanges(rows), counted: false, rows };
}

/** How often the block that moved most often moved: sent and fetched are two calls of one exchange. */
function exchanges(rows: Rows): number {
  let most = 0;
  for (const blocks of rows.values()) {
    for (const sums of blocks.values()) {
      const bothWays = (sums[SENT] ?? 0) > 0 && (sums[RECEIVED] ?? 0) > 0;
      most = Math.max(most, (sums[CALLS] ?? 0) / (bothWays ? 2 : 1));
    }
  }
  return most;
}

const isTexts = (value: unknown): value is string[] =>
  Array.isArray(value) && value.every((text) => typeof text === "string");

function read(frame: Frame, arrivedMs: number): Sample | null {
  const { peers, blocks, rows } = frame.body as Readonly<Record<string, unknown>>;
  if (!isTexts(peers) || !isTexts(blocks) || !Array.isArray(rows)) return null;
  const found = new Map<string, Map<string, Sums>>();
  for (const row of rows as unknown[]) {
    if (!Array.isArray(row) || row.length !== 2 + FIELDS || !row.every((one) => Number.isFinite(one))) return null;
    const [peerAt, blockAt, ...sums] = row as number[];
    const peer = peers[peerAt ?? -1];
    const block = blocks[blockAt ?? -1];
    if (peer === undefined || block === undefined) return null;
    const ofPeer = found.get(peer) ?? new Map<string, Sums>();
    ofPeer.set(block, sums);
    found.set(peer, ofPeer);
  }
  return { atMs: Number(frame.t0Ns / 1_000_000n), arrivedMs, step: frame.step, peers, rows: found };
}
