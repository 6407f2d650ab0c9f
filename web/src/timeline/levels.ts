/**
 * Busy time of a lane in bins of time, at widths that double from level to level, so that painting hours costs pixels
 * and not slices. A slice that crosses bins counts in each with its part: the sums are exact at every level. A slice
 * within another (the body of a control-flow operator) counts beside it.
 *
 * Built once for a lane, in one pass over its slices: at most `BYTES_A_SLICE` bytes each. Lanes of fewer than
 * `LEAST_SLICES` have none; they are painted slice by slice, and so is what is zoomed in to below the finest level.
 */
import { BUCKETS, bucketCodes } from "../graph/group";
import type { Lane } from "./model";

export const LEAST_SLICES = 20_000;
/** Slices of mean duration in a bin of the finest level, where a lane is busy. */
const A_BIN = 16;
/** Bins of the finest level are at most this part of the slices. */
const SLICES_A_BIN = 8;
export const NUM_ROLES = BUCKETS.length;
/** All levels together have twice the bins of the finest, rounded up, of one Float64 a role. */
export const BYTES_A_SLICE = (2 * NUM_ROLES * 8) / SLICES_A_BIN;
/** Bins of the finest level that a slice is as long as, from which it is drawn on its own as well. */
const LONG = 32;

export interface Level {
  readonly binNs: number;
  /** Nanoseconds of each bin in operators of each of `BUCKETS`: bin × role. */
  readonly busyNs: Float64Array;
}

export interface Levels {
  /** Where the first bin begins, in nanoseconds from the timeline's left edge. */
  readonly originNs: number;
  /** Finest first. */
  readonly levels: readonly Level[];
  /** Slices that are long and contain no others, ascending. */
  readonly long: readonly number[];
}

const built = new WeakMap<Float64Array, Levels>();

/** The levels of a lane, null for a short one. O(slices) at the first call for a lane, pinned or not; then O(1). */
export function levelsOf(lane: Lane): Levels | null {
  if (lane.start.length < LEAST_SLICES) return null;
  let found = built.get(lane.start);
  if (found === undefined) {
    found = buildLevels(lane);
    built.set(lane.start, found);
  }
  return found;
}

/** The coarsest level whose bins are no wider than a pixel; null where slices have to be drawn. */
export function levelAt({ levels }: Levels, nsPerPixel: number): Level | null {
  let found: Level | null = null;
  for (const level of levels) if (level.binNs <= nsPerPixel) found = level;
  return found;
}

function buildLevels(lane: Lane): Levels {
  const { start, duration } = lane;
  const originNs = start[0] ?? 0;
  let [endNs, total] = [originNs, 0];
  for (let i = 0; i < start.length; i++) {
    endNs = Math.max(endNs, (start[i] ?? 0) + (duration[i] ?? 0));
    total += duration[i] ?? 0;
  }
  const least = Math.max((A_BIN * total) / start.length, ((endNs - originNs) * SLICES_A_BIN) / start.length, 1);
  const binNs = 2 ** Math.ceil(Math.log2(least));
  const busyNs = new Float64Array((Math.floor((endNs - originNs) / binNs) + 1) * NUM_ROLES);
  const long = fill(lane, originNs, binNs, busyNs);
  const levels: Level[] = [{ binNs, busyNs }];
  for (let last = levels[0]; last !== undefined && last.busyNs.length > NUM_ROLES; last = levels.at(-1)) {
    levels.push(coarser(last));
  }
  return { originNs, levels, long };
}

/** Add each slice to the bins that it lies in, and return those that are long. */
function fill(lane: Lane, originNs: number, binNs: number, busyNs: Float64Array): number[] {
  const { start, duration, op } = lane;
  const codes = bucketCodes(lane.document);
  const long: number[] = [];
  for (let i = 0; i < start.length; i++) {
    const role = codes[op[i] ?? -1] ?? NUM_ROLES;
    if (role >= NUM_ROLES) continue;
    const from = (start[i] ?? 0) - originNs;
    const to = from + (duration[i] ?? 0);
    let bin = Math.floor(from / binNs);
    for (let at = from; at < to; bin++) {
      const end = Math.min(to, (bin + 1) * binNs);
      const place = bin * NUM_ROLES + role;
      busyNs[place] = (busyNs[place] ?? 0) + end - at;
      at = end;
    }
    if (to - from >= LONG * binNs && (start[i + 1] ?? Number.POSITIVE_INFINITY) - originNs >= to) long.push(i);
  }
  return long;
}

function coarser({ binNs, busyNs }: Level): Level {
  const bins = Math.ceil(busyNs.length / NUM_ROLES / 2);
  const sums = new Float64Array(bins * NUM_ROLES);
  for (let i = 0; i < busyNs.length; i++) {
    const bin = Math.floor(i / NUM_ROLES);
    const place = (bin >> 1) * NUM_ROLES + (i % NUM_ROLES);
    sums[place] = (sums[place] ?? 0) + (busyNs[i] ?? 0);
  }
  return { binNs: binNs * 2, busyNs: sums };
}

/** What a pixel shows: the role that takes most of its time, -1 if none does, and the share in which it is busy. */
export interface Column {
  readonly role: number;
  readonly share: number;
}

const IDLE: Column = { role: -1, share: 0 };

/** Of the bins from `first` up to `end`. */
export function columnOf({ binNs, busyNs }: Level, first: number, end: number): Column {
  let [role, most, sum] = [-1, 0, 0];
  for (let one = 0; one < NUM_ROLES; one++) {
    let ns = 0;
    for (let bin = Math.max(0, first); bin < end; bin++) ns += busyNs[bin * NUM_ROLES + one] ?? 0;
    sum += ns;
    if (ns > most) [role, most] = [one, ns];
  }
  return role < 0 ? IDLE : { role, share: Math.min(1, sum / ((end - first) * binNs)) };
}
