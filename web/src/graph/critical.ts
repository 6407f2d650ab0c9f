/** The chain of operators that bounds the step: the longest path over dependencies, weighted by mean time. */
import type { GraphDocument } from "../types";
import { topologyOf } from "./topology";

export interface CriticalPath {
  /** Its operators, each before the one that depends on it. */
  readonly chain: Int32Array;
  readonly ops: ReadonlySet<number>;
  readonly totalNs: number;
}

/** The same as a worker sends it. */
export type FoundChain = Omit<CriticalPath, "ops">;

export const NO_PATH: CriticalPath = { chain: new Int32Array(0), ops: new Set(), totalNs: 0 };

export const criticalPath = (document: GraphDocument, meansNs: Float64Array): CriticalPath =>
  pathOf(criticalChain(document, meansNs));

export const pathOf = ({ chain, totalNs }: FoundChain): CriticalPath => ({ chain, totalNs, ops: new Set(chain) });

/** `meansNs`: of each operator; NaN where none was measured. */
export function criticalChain(document: GraphDocument, meansNs: Float64Array): FoundChain {
  const { via, last, totalNs } = longest(document, meansNs);
  if (totalNs === 0) return { chain: new Int32Array(0), totalNs }; // its own: a worker gives the buffer away
  const found: number[] = [];
  for (let op = last; op >= 0; op = via[op] ?? -1) found.push(op);
  return { chain: Int32Array.from(found.reverse()), totalNs };
}

interface Longest {
  /** The predecessor through which each operator is reached last; -1 for none. */
  readonly via: Int32Array;
  readonly last: number;
  readonly totalNs: number;
}

function longest(document: GraphDocument, meansNs: Float64Array): Longest {
  const n = document.ops.length;
  const { order, predStart, preds } = topologyOf(document);
  const finish = new Float64Array(n);
  const via = new Int32Array(n).fill(-1);
  let last = -1;
  for (const op of order) {
    const latest = latestOf(finish, preds.subarray(predStart[op], predStart[op + 1]));
    const before = latest < 0 ? 0 : (finish[latest] ?? 0);
    via[op] = latest;
    finish[op] = before + (meansNs[op] || 0);
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
