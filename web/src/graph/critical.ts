/** The chain of operators that bounds the step: the longest path over dependencies, weighted by mean time. */
import type { GraphDocument } from "../types";
import { topologyOf } from "./topology";

export interface CriticalPath {
  readonly ops: ReadonlySet<number>;
  readonly edges: ReadonlySet<string>;
  readonly totalNs: number;
}

export const NO_PATH: CriticalPath = { ops: new Set(), edges: new Set(), totalNs: 0 };

export function criticalPath(document: GraphDocument, meanNs: (op: number) => number): CriticalPath {
  const { via, last, totalNs } = longest(document, meanNs);
  if (totalNs === 0) return NO_PATH;
  const ops = new Set<number>();
  const edges = new Set<string>();
  for (let op = last; op >= 0; op = via[op] ?? -1) {
    ops.add(op);
    const pred = via[op] ?? -1;
    if (pred >= 0) edges.add(`${pred},${op}`);
  }
  return { ops, edges, totalNs };
}

interface Longest {
  /** The predecessor through which each operator is reached last; -1 for none. */
  readonly via: Int32Array;
  readonly last: number;
  readonly totalNs: number;
}

function longest(document: GraphDocument, meanNs: (op: number) => number): Longest {
  const n = document.ops.length;
  const { order, predStart, preds } = topologyOf(document);
  const finish = new Float64Array(n);
  const via = new Int32Array(n).fill(-1);
  let last = -1;
  for (const op of order) {
    const latest = latestOf(finish, preds.subarray(predStart[op], predStart[op + 1]));
    const before = latest < 0 ? 0 : (finish[latest] ?? 0);
    via[op] = latest;
    finish[op] = before + (meanNs(op) || 0);
    if (last < 0 || (finish[op] ?? 0) > (finish[last] ?? 0)) last = op;
  }
  return { via, last, totalNs: last < 0 ? 0 : (finish[last] ?? 0) };
}

/** The operator that finishes last, if any takes time; else -1. */
function latestOf(finish: Float64Array, ops: Int32Array): number {
  let latest = -1;
  for (const op of ops) if ((finish[op] ?? 0) > (latest < 0 ? 0 : (finish[latest] ?? 0))) latest = op;
  return latest;
}
