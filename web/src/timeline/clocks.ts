/** The clocks of the nodes that processes of a job run on. Pure. */
import { nanos } from "../format";
import type { NodeRow, Replica } from "../types";

/** How far a node's clock is ahead of the server's, right within ± `errorMs`. */
export interface NodeClock {
  readonly node: string;
  readonly offsetMs: number;
  readonly errorMs: number;
}

/**
 * The clock of each process's node, by stream, where the processes of a job are on several machines: those of one have
 * one clock, which needs no correction, and an estimate would only add its error. Nodes of one host share the estimate
 * with the smallest error.
 */
export function clocksOf(replicas: readonly Replica[], nodes: readonly NodeRow[]): ReadonlyMap<number, NodeClock> {
  const nodeOf = new Map(nodes.map((node) => [node.id, node]));
  const placed = replicas.flatMap((one) => {
    const node = nodeOf.get(one.node_id ?? "");
    return node === undefined ? [] : [{ stream: one.stream, node }];
  });
  if (new Set(placed.map(({ node }) => node.host)).size < 2) return new Map();
  return new Map(
    placed.flatMap(({ stream, node }) => {
      const clock = bestOf(nodes.filter((other) => other.host === node.host));
      return clock === null ? [] : [[stream, { node: node.name, ...clock }] as const];
    }),
  );
}

function bestOf(nodes: readonly NodeRow[]): Omit<NodeClock, "node"> | null {
  const known = nodes.flatMap(({ clock }) => clock ?? []);
  const best = known.reduce<(typeof known)[number] | null>(
    (least, one) => (least === null || one.error_ms < least.error_ms ? one : least),
    null,
  );
  return best === null ? null : { offsetMs: best.offset_ms, errorMs: best.error_ms };
}

/** "clock of node-b: +3.20 ms ± 0.40 ms". */
export function clockText({ node, offsetMs, errorMs }: NodeClock): string {
  return `clock of ${node}: ${offsetMs < 0 ? "−" : "+"}${nanos(Math.abs(offsetMs) * 1e6)} ± ${nanos(errorMs * 1e6)}`;
}
