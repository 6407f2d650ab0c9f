/**
 * Ranks by steps: how much later each trainer is than the others, and whether in its operators or between its steps.
 *
 * In a synchronous step all trainers end together, so their step times say nothing; what counts is a trainer's *own*
 * time: from the end of a step to the end of the next, without what it waited for servers or for other ranks. Pure.
 */
import type { Series } from "./series";

export const MOST_BINS = 60;
const MOST_ROWS = 2000;
/** Above this share of a turn a trainer counts as late; as in core/penstock/diagnosis/. */
export const NOTICED = 0.12;

/** Wait for all servers, summed up since the process began, at a step. */
export interface Waited {
  readonly step: number;
  readonly waitNs: number;
}

export interface Track {
  readonly stepMs: Series;
  /** Exchange with other ranks, milliseconds of each step. */
  readonly syncMs: Series | undefined;
  /** Empty without servers. */
  readonly waits: readonly Waited[];
}

/** Means of one step, milliseconds. `lateMs`: own time above the median of the others. */
export interface RankCell {
  readonly insideMs: number;
  readonly betweenMs: number;
  readonly waitMs: number;
  readonly lateMs: number;
  readonly cause: "inside" | "between";
}

interface Means {
  readonly inside: number;
  readonly between: number;
  readonly wait: number;
}

export interface RankMap {
  readonly ranks: readonly number[];
  readonly bins: readonly { readonly from: number; readonly to: number }[];
  /** By rank and bin; null where the rank reported no step. */
  readonly cells: readonly (readonly (RankCell | null)[])[];
  /** The same over all bins. */
  readonly totals: readonly (RankCell | null)[];
  /** Of a step and the time to the next, the median of the ranks. */
  readonly turnMs: number;
}

interface Sums {
  steps: number;
  inside: number;
  between: number;
  wait: number;
}

interface Row extends Sums {
  readonly step: number;
}

/** The newest steps of two or more trainers; null where there are fewer, or none of them reported twice. */
export function rankMap(tracks: ReadonlyMap<number, Track>, most = MOST_BINS): RankMap | null {
  const ranks = [...tracks.keys()].sort((a, b) => a - b);
  const rows = ranks.map((rank) => rowsOf(tracks.get(rank)));
  if (ranks.length < 2 || rows.some((one) => one.length === 0)) return null;
  const last = Math.max(...rows.map((one) => one[one.length - 1]?.step ?? 0));
  const width = Math.max(1, ...rows.map(widest));
  const first = last - width * most;
  const sums = rows.map((one) => binned(one, first, width, most));
  const used = Array.from({ length: most }, (_, bin) => bin).filter((bin) =>
    sums.some((one) => one[bin] !== undefined),
  );
  const columns = used.map((bin) => compared(sums.map((one) => one[bin])));
  const totals = compared(sums.map((one) => added(Object.values(one))));
  return {
    ranks,
    bins: used.map((bin) => ({ from: first + bin * width + 1, to: first + (bin + 1) * width })),
    cells: ranks.map((_, rank) => columns.map((column) => column[rank] ?? null)),
    totals,
    turnMs: median(totals.flatMap((one) => (one === null ? [] : [one.insideMs + one.betweenMs + one.waitMs]))),
  };
}

function rowsOf(track: Track | undefined): Row[] {
  if (track === undefined) return [];
  const { step, timeNs, value } = track.stepMs;
  const found: Row[] = [];
  for (let i = Math.max(1, step.length - MOST_ROWS); i < step.length; i++) {
    const [before, now] = [step[i - 1] ?? 0, step[i] ?? 0];
    const steps = now - before;
    const turns = ((timeNs[i] ?? 0) - (timeNs[i - 1] ?? 0)) / 1e6;
    if (steps <= 0 || turns <= 0) continue;
    const inside = Math.min(turns, (value[i] ?? 0) * steps);
    const wait = Math.min(inside, waitedMs(track, before, now, i));
    found.push({ step: now, steps, inside: inside - wait, between: turns - inside, wait });
  }
  return found;
}

function waitedMs(track: Track, before: number, now: number, row: number): number {
  if (track.waits.length > 0) return Math.max(0, waitAt(track.waits, now) - waitAt(track.waits, before)) / 1e6;
  return (track.syncMs?.value[row] ?? 0) * (now - before);
}

/** The sum at a step, between two that were reported in proportion. */
function waitAt(waits: readonly Waited[], step: number): number {
  let [low, high] = [0, waits.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((waits[middle]?.step ?? 0) < step) low = middle + 1;
    else high = middle;
  }
  const [a, b] = [waits[low - 1], waits[low]];
  if (a === undefined || b === undefined) return (a ?? b)?.waitNs ?? 0;
  return a.waitNs + ((b.waitNs - a.waitNs) * (step - a.step)) / (b.step - a.step);
}

const widest = (rows: readonly Row[]): number => {
  const widths = rows
    .slice(-MOST_BINS)
    .map((row) => row.steps)
    .sort((a, b) => a - b);
  return widths[Math.floor(widths.length * 0.9)] ?? 1;
};

function binned(rows: readonly Row[], first: number, width: number, most: number): Record<number, Sums> {
  const found: Record<number, Sums> = {};
  for (const row of rows) {
    const bin = Math.ceil((row.step - first) / width) - 1;
    if (bin >= 0 && bin < most) found[bin] = added([...(found[bin] === undefined ? [] : [found[bin]]), row]);
  }
  return found;
}

function added(all: readonly Sums[]): Sums {
  const sum = (of: (one: Sums) => number) => all.reduce((total, one) => total + of(one), 0);
  return {
    steps: sum((one) => one.steps),
    inside: sum((one) => one.inside),
    between: sum((one) => one.between),
    wait: sum((one) => one.wait),
  };
}

/** What each rank needs of a step beside the others. */
function compared(sums: readonly (Sums | undefined)[]): (RankCell | null)[] {
  const means = sums.map((one): Means | null =>
    one === undefined || one.steps === 0
      ? null
      : { inside: one.inside / one.steps, between: one.between / one.steps, wait: one.wait / one.steps },
  );
  return means.map((mine, rank) => {
    if (mine === null) return null;
    const others = means.flatMap((one, other) => (other === rank || one === null ? [] : [one]));
    const more = (of: (one: Means) => number) => (others.length === 0 ? 0 : of(mine) - median(others.map(of)));
    const [inside, between] = [more((one) => one.inside), more((one) => one.between)];
    return {
      insideMs: mine.inside,
      betweenMs: mine.between,
      waitMs: mine.wait,
      lateMs: Math.max(
        0,
        more((one) => one.inside + one.between),
      ),
      cause: between > inside ? "between" : "inside",
    };
  });
}

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  const upper = sorted[middle] ?? 0;
  return sorted.length % 2 === 1 ? upper : (upper + (sorted[middle - 1] ?? upper)) / 2;
}

/** A cell of the map, by the place of its rank and of its steps. */
export interface At {
  readonly rank: number;
  readonly bin: number;
}

/** Where a key leads from a cell of `ranks` × `bins`; null: the key is none of the map's. */
export function moved({ rank, bin }: At, key: string, ranks: number, bins: number): At | null {
  const to = (one: number, most: number) => Math.max(0, Math.min(most - 1, one));
  if (key === "ArrowLeft") return { rank, bin: to(bin - 1, bins) };
  if (key === "ArrowRight") return { rank, bin: to(bin + 1, bins) };
  if (key === "ArrowUp") return { rank: to(rank - 1, ranks), bin };
  if (key === "ArrowDown") return { rank: to(rank + 1, ranks), bin };
  if (key === "Home") return { rank, bin: 0 };
  if (key === "End") return { rank, bin: to(bins - 1, bins) };
  return null;
}
