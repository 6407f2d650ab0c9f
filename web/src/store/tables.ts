/**
 * Sparse tables of parameter servers (core/penstock/protocol/tables.py): each server's part, and what they are together.
 *
 * Reports hold sums since a process began, so a rate is the difference of two of them, of the last ten seconds while the
 * job runs. Plain data; a malformed body is skipped.
 */
import type { Frame } from "../codec";
import type { Job } from "../types";
import { newestOf, SETTLED_MS, WINDOW_MS } from "./exchange";

const MOST_HOT = 16;
const NUMBERS = ["width", "capacity", "rows", "held_bytes", "pulled", "absent", "pushed", "sampled", "missed"] as const;

type Sums = Readonly<Record<(typeof NUMBERS)[number], number>> & {
  readonly hot: readonly (readonly [id: string, pushes: number])[];
};

interface Report {
  readonly atMs: number;
  /** By this page's clock. */
  readonly arrivedMs: number;
  readonly tables: ReadonlyMap<string, Sums>;
}

export interface TablePart {
  readonly pserver: number;
  readonly rows: number;
  readonly bytes: number;
  readonly pushed: number;
}

/** `share`: of all pushed ids of the table, estimated by its server from a sample of the newest. */
export interface HotId {
  readonly id: string;
  readonly share: number;
  readonly pserver: number;
}

export interface TableRow {
  readonly name: string;
  readonly width: number;
  readonly capacity: number;
  readonly rows: number;
  readonly bytes: number;
  /** Share of the looked-up ids that had a row; null before any was looked up. */
  readonly found: number | null;
  /** Ids a second; null where only one report is there. */
  readonly pulledPerS: number | null;
  readonly pushedPerS: number | null;
  /** The largest part over the mean of all. */
  readonly skewRows: number;
  readonly skewPushes: number;
  readonly hot: readonly HotId[];
  readonly parts: readonly TablePart[];
}

interface Part {
  readonly pserver: number;
  readonly now: Sums;
  /** Of the last ten seconds; null where only one report is there. */
  readonly rate: { readonly pulled: number; readonly pushed: number } | null;
}

export class TableStore {
  #tracks = new Map<number, Report[]>();

  ingest(frame: Frame, nowMs: number): void {
    const report = read(frame, nowMs);
    if (report === null) return;
    const track = this.#tracks.get(frame.stream) ?? [];
    track.push(report);
    while ((track[1]?.atMs ?? Number.POSITIVE_INFINITY) < report.atMs - WINDOW_MS) track.shift();
    this.#tracks.set(frame.stream, track);
  }

  /** Tables by name; none while no server of the job has reported any. `over`: the job is, and has no rates. */
  rows(job: Job, over: boolean, nowMs: number): TableRow[] {
    const found = new Map<string, Part[]>();
    for (const replica of newestOf(job.replicas)) {
      const track = this.#tracks.get(replica.stream);
      if (replica.role !== "pserver" || track === undefined) continue;
      for (const [name, part] of partsOf(track, replica.index, over, nowMs))
        found.set(name, [...(found.get(name) ?? []), part]);
    }
    return [...found].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, parts]) => rowOf(name, parts));
  }
}

function partsOf(track: readonly Report[], pserver: number, over: boolean, nowMs: number): [string, Part][] {
  const last = track.at(-1);
  if (last === undefined) return [];
  // Nothing new for a while: the window moves on, by this page's clock, and what is in it becomes less.
  const endMs = last.atMs + Math.max(0, nowMs - last.arrivedMs - SETTLED_MS);
  const first = track.findLast((one) => one.atMs <= endMs - WINDOW_MS) ?? track[0] ?? last;
  const seconds = over || track.length < 2 ? 0 : Math.min(endMs - first.atMs, WINDOW_MS + SETTLED_MS) / 1000;
  return [...last.tables].map(([name, now]) => {
    const before = first.tables.get(name);
    const per = (field: "pulled" | "pushed") => Math.max(0, now[field] - (before?.[field] ?? 0)) / seconds;
    return [name, { pserver, now, rate: seconds > 0 ? { pulled: per("pulled"), pushed: per("pushed") } : null }];
  });
}

function rowOf(name: string, given: readonly Part[]): TableRow {
  const parts = [...given].sort((a, b) => a.pserver - b.pserver);
  const sum = (of: (part: Part) => number) => parts.reduce((total, part) => total + of(part), 0);
  const pushed = sum(({ now }) => now.pushed);
  const pulled = sum(({ now }) => now.pulled);
  const rates = parts.flatMap(({ rate }) => (rate === null ? [] : [rate]));
  const perS = (of: "pulled" | "pushed") =>
    rates.length === 0 ? null : rates.reduce((total, rate) => total + rate[of], 0);
  return {
    name,
    width: Math.max(...parts.map(({ now }) => now.width)),
    capacity: sum(({ now }) => now.capacity),
    rows: sum(({ now }) => now.rows),
    bytes: sum(({ now }) => now.held_bytes),
    found: pulled === 0 ? null : 1 - sum(({ now }) => now.absent) / pulled,
    pulledPerS: perS("pulled"),
    pushedPerS: perS("pushed"),
    skewRows: skewOf(parts.map(({ now }) => now.rows)),
    skewPushes: skewOf(parts.map(({ now }) => now.pushed)),
    hot: parts
      .flatMap((part) => hotOf(part, pushed))
      .sort((a, b) => b.share - a.share)
      .slice(0, MOST_HOT),
    parts: parts.map(({ pserver, now }) => ({ pserver, rows: now.rows, bytes: now.held_bytes, pushed: now.pushed })),
  };
}

/**
 * A server's sample stands for its newest pushes, and so for its share of all. An id that was pushed no more often than
 * its count may be wrong does not stand out.
 */
function hotOf({ pserver, now }: Part, pushed: number): HotId[] {
  const weight = now.pushed / Math.max(1, pushed) / Math.max(1, now.sampled);
  return now.hot
    .filter(([, pushes]) => pushes > now.missed)
    .map(([id, pushes]) => ({ id, share: pushes * weight, pserver }));
}

function skewOf(sizes: readonly number[]): number {
  const sum = sizes.reduce((total, size) => total + size, 0);
  return sum === 0 ? 1 : (Math.max(...sizes) * sizes.length) / sum;
}

function read(frame: Frame, arrivedMs: number): Report | null {
  const { tables } = frame.body as { readonly tables?: unknown };
  if (!Array.isArray(tables)) return null;
  const found = new Map<string, Sums>();
  for (const one of tables as unknown[]) {
    const sums = sumsOf(one);
    if (sums === null) return null;
    found.set(...sums);
  }
  return { atMs: Number(frame.t0Ns / 1_000_000n), arrivedMs, tables: found };
}

function sumsOf(one: unknown): [string, Sums] | null {
  if (typeof one !== "object" || one === null) return null;
  const { name, hot, ...rest } = one as Readonly<Record<string, unknown>>;
  const isHot = (each: unknown) => Array.isArray(each) && typeof each[0] === "string" && Number.isFinite(each[1]);
  if (typeof name !== "string" || !Array.isArray(hot) || !hot.every(isHot)) return null;
  if (!NUMBERS.every((field) => Number.isFinite(rest[field]))) return null;
  return [name, { ...(rest as Record<(typeof NUMBERS)[number], number>), hot: hot as [string, number][] }];
}
