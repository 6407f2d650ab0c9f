/** Jobs that were selected in the list, to be compared; the address has them. Pure. */
import { MOST_RUNS } from "./runs";

export const LEAST_PICKED = 2;
/** One of them is the job whose charts the others are shown in. */
export const MOST_PICKED = MOST_RUNS + 1;

/** What `pick` in the address names, each once. */
export const pickedOf = (query: URLSearchParams): readonly string[] =>
  [...new Set((query.get("pick") ?? "").split(",").filter((id) => id !== ""))].slice(0, MOST_PICKED);

/** The same with one more or one less; null: none is left. One too many changes nothing. */
export function toggled(picked: readonly string[], id: string): string | null {
  const next = picked.includes(id) ? picked.filter((one) => one !== id) : [...picked, id];
  return next.length === 0 ? null : next.slice(0, MOST_PICKED).join(",");
}

/** Where they are compared: in the charts of the first. */
export function comparisonHref([first = "", ...others]: readonly string[]): string {
  return `/jobs/${encodeURIComponent(first)}?tab=metrics&with=${others.map(encodeURIComponent).join(",")}`;
}
