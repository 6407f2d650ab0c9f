/** How the repeated layers behind one box differ: their times, and the odd one out. Pure. */
import type { GraphRuntime } from "./ops";

export interface Spread {
  readonly count: number;
  /** Nanoseconds of a layer in one step. */
  readonly minNs: number;
  readonly medianNs: number;
  readonly maxNs: number;
  /** The slowest layer's module and its first operator. */
  readonly slowest: string;
  readonly slowestOp: number;
}

/** Above this many times the median a layer is the odd one out. */
export const ODD = 1.5;

/** "model.layers.*.attn" and "model.layers.17.attn.q" → "model.layers.17". Null: nothing is repeated. */
export function layerOf(folded: string, path: string): string | null {
  const parts = folded.split(".");
  const at = parts.findIndex((part) => part.includes("*"));
  return at < 0
    ? null
    : path
        .split(".")
        .slice(0, at + 1)
        .join(".");
}

/** `folded`: the module of the box; `modules`: that of each operator. Null if it is of one layer, or nothing has run. */
export function spreadOf(
  runtime: GraphRuntime,
  ops: readonly number[],
  folded: string,
  modules: readonly string[],
): Spread | null {
  const layers = new Map<string, { ns: number; op: number }>();
  for (const op of ops) {
    const layer = layerOf(folded, modules[op] ?? "");
    if (layer === null) return null;
    const count = runtime.count[op] ?? 0;
    const found = layers.get(layer) ?? { ns: 0, op };
    found.ns += count === 0 ? 0 : (runtime.totalNs[op] ?? 0) / count;
    layers.set(layer, found);
  }
  const sorted = [...layers].sort((a, b) => a[1].ns - b[1].ns);
  const [first, last] = [sorted[0], sorted[sorted.length - 1]];
  if (sorted.length < 2 || first === undefined || last === undefined || last[1].ns === 0) return null;
  return {
    count: sorted.length,
    minNs: first[1].ns,
    medianNs: sorted[sorted.length >> 1]?.[1].ns ?? 0,
    maxNs: last[1].ns,
    slowest: last[0],
    slowestOp: last[1].op,
  };
}
