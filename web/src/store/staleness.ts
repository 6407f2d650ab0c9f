/**
 * How old the parameters are that an operator reads, in updates by other trainers: what servers count when a gradient
 * comes, the updates of its block since its trainer pulled it. Pure. NaN: nothing was counted.
 */
import type { GraphDocument } from "../types";
import type { ExchangeView } from "./exchange";

/** Mean number of updates behind, by parameter; one in several blocks is as old as its oldest. */
export type Behind = ReadonlyMap<string, number>;

export function behindOf(view: ExchangeView | null): Behind {
  const found = new Map<string, number>();
  for (const { block, pserver, pushes, staleness } of view?.blocks ?? []) {
    if (pserver < 0 || block === "" || pushes === 0) continue;
    for (const name of new Set([block, block.replace(/\.block\d+$/, "")])) {
      found.set(name, Math.max(found.get(name) ?? 0, staleness));
    }
  }
  return found;
}

/** The oldest parameter that some operators read, of those that are known; NaN if none is. */
export function behindAt(document: GraphDocument, ops: readonly number[], behind: Behind): number {
  let most = Number.NaN;
  for (const op of ops) {
    for (const { name } of document.ops[op]?.inputs ?? []) {
      const one = behind.get(name);
      if (one !== undefined && !(most >= one)) most = one;
    }
  }
  return most;
}
