/** What the boxes of a layout show of the operators inside them: their share of the time, and how lit they are. */
import type { GraphRuntime } from "../store/ops";
import { reducedMotion } from "../store/session";
import { edgeKey } from "./edges";
import type { Layout } from "./layout";

/** The box around each box of a layout, -1 for none; typed, as paths are walked up for thousands of operators. */
function parentsOf(layout: Layout): Int32Array {
  let found = parents.get(layout);
  if (found === undefined) {
    found = new Int32Array(layout.boxes.length);
    for (let box = 0; box < found.length; box++) found[box] = layout.boxes[box]?.parent ?? -1;
    parents.set(layout, found);
  }
  return found;
}

const parents = new WeakMap<Layout, Int32Array>();

/** The edges that a chain of operators runs along: between boxes around two of them that stand in the same frame. */
export function edgesAlong(layout: Layout, chain: Int32Array): Set<number> {
  const edges = new Set<number>();
  for (let i = 1; i < chain.length; i++) addSiblings(edges, layout, chain[i - 1] ?? -1, chain[i] ?? -1);
  return edges;
}

function addSiblings(edges: Set<number>, layout: Layout, from: number, to: number): void {
  const parent = parentsOf(layout);
  for (let a = layout.boxOfOp[from] ?? -1; a >= 0; a = parent[a] ?? -1) {
    for (let b = layout.boxOfOp[to] ?? -1; b >= 0; b = parent[b] ?? -1) {
      if (a === b || parent[a] !== parent[b]) continue;
      edges.add(edgeKey(a, b));
      break;
    }
  }
}

export interface Shares {
  /** Rows of the graph that they were computed from. */
  readonly rows: number;
  readonly share: Float64Array;
  readonly maxShare: number;
}
export const NO_SHARES: Shares = { rows: -1, share: new Float64Array(0), maxShare: 0 };

/** Share of operator time by box. O(operators). */
export function shares(layout: Layout, graph: GraphRuntime): Shares {
  const share = new Float64Array(layout.boxes.length);
  const parent = parentsOf(layout);
  let total = 0;
  for (let op = 0; op < layout.boxOfOp.length; op++) {
    if ((layout.groupBoxOfOp[op] ?? -1) < 0) continue;
    const spent = graph.totalNs[op] ?? 0;
    total += spent;
    for (let box = layout.boxOfOp[op] ?? -1; box >= 0; box = parent[box] ?? -1) {
      share[box] = (share[box] ?? 0) + spent;
    }
  }
  if (total === 0) return { rows: graph.rows, share: share.fill(Number.NaN), maxShare: 0 };
  let maxShare = 0;
  layout.boxes.forEach((box, index) => {
    share[index] = (share[index] ?? 0) / total;
    if (!box.expanded) maxShare = Math.max(maxShare, share[index] ?? 0);
  });
  return { rows: graph.rows, share, maxShare };
}

export function glows(layout: Layout, graph: GraphRuntime, nowMs: number): Float64Array {
  const glow = new Float64Array(layout.boxes.length);
  const still = reducedMotion.matches;
  for (let op = 0; op < layout.boxOfOp.length; op++) {
    const lit = graph.glow(op, nowMs);
    const box = layout.boxOfOp[op] ?? -1;
    if (lit > 0 && box >= 0) glow[box] = Math.max(glow[box] ?? 0, still ? 1 : lit);
  }
  spread(glow, parentsOf(layout));
  return glow;
}

/** A box is as bright as the brightest inside it. One that is brighter already has those around it so, or comes itself. */
function spread(glow: Float64Array, parent: Int32Array): void {
  for (let box = 0; box < glow.length; box++) {
    const lit = glow[box] ?? 0;
    for (let up = parent[box] ?? -1; up >= 0 && (glow[up] ?? 0) < lit; up = parent[up] ?? -1) glow[up] = lit;
  }
}
