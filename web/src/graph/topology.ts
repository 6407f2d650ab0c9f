/** Order of operators by their dependencies. Pure; O(V + E), computed once for a document. */
import type { GraphDocument } from "../types";

/** Dependencies of a document as flat arrays, and its operators in an order that respects them. */
export interface Topology {
  /** Position of each operator in a topological order (Kahn); operators of a cycle, which cannot be, come last. */
  readonly position: Float64Array;
  /** Operators by position. */
  readonly order: Int32Array;
  /** Predecessors of `op`: `preds[predStart[op]] … preds[predStart[op + 1] - 1]`. */
  readonly predStart: Int32Array;
  readonly preds: Int32Array;
}

const known = new WeakMap<GraphDocument, Topology>();

export function topologyOf(document: GraphDocument): Topology {
  let found = known.get(document);
  if (found === undefined) {
    found = compute(document);
    known.set(document, found);
  }
  return found;
}

export const topological = (document: GraphDocument): Float64Array => topologyOf(document).position;

/** Neighbours by operator, in the order of the edges: those of `op` are `list[start[op]] …`. */
function neighbours(document: GraphDocument, by: 0 | 1): { start: Int32Array; list: Int32Array } {
  const n = document.ops.length;
  const start = new Int32Array(n + 1);
  const inside = (edge: readonly [number, number]) => edge[0] >= 0 && edge[1] >= 0 && edge[0] < n && edge[1] < n;
  for (const edge of document.edges) if (inside(edge)) start[edge[by] + 1] = (start[edge[by] + 1] ?? 0) + 1;
  for (let op = 0; op < n; op++) start[op + 1] = (start[op + 1] ?? 0) + (start[op] ?? 0);
  const next = start.slice();
  const list = new Int32Array(start[n] ?? 0);
  for (const edge of document.edges) {
    if (!inside(edge)) continue;
    const at = next[edge[by]] ?? 0;
    next[edge[by]] = at + 1;
    list[at] = edge[1 - by] ?? 0;
  }
  return { start, list };
}

function compute(document: GraphDocument): Topology {
  const n = document.ops.length;
  const succ = neighbours(document, 0);
  const pred = neighbours(document, 1);
  const left = new Int32Array(n);
  for (let op = 0; op < n; op++) left[op] = (pred.start[op + 1] ?? 0) - (pred.start[op] ?? 0);
  const position = new Float64Array(n).fill(n);
  const order = new Int32Array(n);
  let count = 0;
  const ready = (op: number) => {
    order[count++] = op;
  };
  left.forEach((degree, op) => {
    if (degree === 0) ready(op);
  });
  for (let head = 0; head < count; head++) {
    const op = order[head] ?? 0;
    position[op] = head;
    for (const next of succ.list.subarray(succ.start[op], succ.start[op + 1])) {
      left[next] = (left[next] ?? 1) - 1;
      if (left[next] === 0) ready(next);
    }
  }
  left.forEach((degree, op) => {
    if (degree > 0) ready(op);
  });
  return { position, order, predStart: pred.start, preds: pred.list };
}
