/** Order of operators by their dependencies. Pure; O(V + E). */
import type { GraphDocument } from "../types";

/** Position of each operator in a topological order (Kahn); operators of a cycle, which cannot be, come last. */
export function topological(document: GraphDocument): Float64Array {
  const n = document.ops.length;
  const indegree = new Int32Array(n);
  const succs: number[][] = Array.from({ length: n }, () => []);
  for (const [from, to] of document.edges) {
    succs[from]?.push(to);
    indegree[to] = (indegree[to] ?? 0) + 1;
  }
  const position = new Float64Array(n).fill(n);
  const queue: number[] = [];
  for (let op = 0; op < n; op++) if (indegree[op] === 0) queue.push(op);
  for (let head = 0; head < queue.length; head++) {
    const op = queue[head] as number;
    position[op] = head;
    for (const next of succs[op] ?? []) {
      indegree[next] = (indegree[next] ?? 1) - 1;
      if (indegree[next] === 0) queue.push(next);
    }
  }
  return position;
}
