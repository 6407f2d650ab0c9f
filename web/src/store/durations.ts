/**
 * How long the runs of each operator took, as counts in bins, eight to a factor of two: sums of them are those of all
 * runs, and a percentile is the middle of its bin, or the longest run if that is less: at most 4.5 % from the true one. 1 kB for each operator that ran.
 */
const PER_OCTAVE = 8;
/** Durations are u32, in nanoseconds; bin 0 holds 0. */
const BINS = 32 * PER_OCTAVE + 1;

const binOf = (ns: number): number => (ns < 1 ? 0 : 1 + Math.min(BINS - 2, Math.floor(Math.log2(ns) * PER_OCTAVE)));
const middleOf = (bin: number): number => (bin === 0 ? 0 : 2 ** ((bin - 0.5) / PER_OCTAVE));

export interface Spread {
  readonly runs: number;
  readonly p50: number;
  readonly p99: number;
}

export class Durations {
  #bins = new Map<number, Uint32Array>();
  #longest = new Map<number, number>();

  add(op: number, ns: number): void {
    let bins = this.#bins.get(op);
    if (bins === undefined) {
      bins = new Uint32Array(BINS);
      this.#bins.set(op, bins);
    }
    const bin = binOf(ns);
    bins[bin] = (bins[bin] ?? 0) + 1;
    if (ns > (this.#longest.get(op) ?? -1)) this.#longest.set(op, ns);
  }

  /** Of the runs of some operators together; null if none of them was added. */
  of(ops: readonly number[]): Spread | null {
    const each = ops.flatMap((op) => this.#bins.get(op) ?? []);
    const [only] = each;
    if (only === undefined) return null;
    const all = each.length === 1 ? only : Uint32Array.from(only, (_, bin) => sum(each.map((one) => one[bin] ?? 0)));
    const runs = sum(all);
    const longest = Math.max(...ops.map((op) => this.#longest.get(op) ?? 0));
    const of = (share: number) => Math.min(longest, percentile(all, runs * share));
    return { runs, p50: of(0.5), p99: of(0.99) };
  }
}

const sum = (values: Iterable<number>): number => {
  let total = 0;
  for (const value of values) total += value;
  return total;
};

/** The duration that `wanted` runs do not exceed. */
function percentile(bins: Uint32Array, wanted: number): number {
  let passed = 0;
  const bin = bins.findIndex((count) => {
    passed += count;
    return passed >= Math.ceil(wanted) && passed > 0;
  });
  return middleOf(Math.max(0, bin));
}
