/** The chain of operators that bounds the step: the longest path over dependencies, weighted by mean time. */
import type { GraphDocument } from "../types";
import { topological } from "./topology";

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
  const position = topological(document);
  const order = Array.from({ length: n }, (_, op) => op).sort((a, b) => (position[a] ?? 0) - (position[b] ?? 0));
  const preds: number[][] = Array.from({ length: n }, () => []);
  for (const [from, to] of document.edges) preds[to]?.push(from);
  const finish = new Float64Array(n);
  const at = (op: number) => finish[op] ?? 0;
  const via = new Int32Array(n).fill(-1);
  let last = -1;
  for (const op of order) {
    const latest = (preds[op] ?? []).reduce((best, pred) => (at(pred) > (best < 0 ? 0 : at(best)) ? pred : best), -1);
    via[op] = latest;
    finish[op] = (latest < 0 ? 0 : at(latest)) + (meanNs(op) || 0);
    if (last < 0 || at(op) > at(last)) last = op;
  }
  return { via, last, totalNs: last < 0 ? 0 : at(last) };
}
