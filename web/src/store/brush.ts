/** What all views of a job show a part of: steps that were chosen together, in strip, chart or address. Pure. */
import type { Axis } from "./curves";
import { rangeOf, rangeText, type StepRange } from "./history";
import type { Series, SeriesStore } from "./series";

/** The steps from the first to the last that `step` in the address names; null for none and for a single one. */
export function brushOf(query: URLSearchParams): StepRange | null {
  const range = rangeOf(query.get("step"));
  return range !== null && range.first < range.last ? range : null;
}

/** What the charts of an axis are zoomed to; null: they show all. Steps are the brush, seconds have a field of their own. */
export function zoomOf(query: URLSearchParams, axis: Axis): readonly [number, number] | null {
  if (axis === "step") {
    const brush = brushOf(query);
    return brush === null ? null : [brush.first, brush.last];
  }
  const [from, to] = (query.get("zoom") ?? "").split("..").map(Number);
  return from !== undefined && to !== undefined && from >= 0 && to > from ? [from, to] : null;
}

/** The fields of the address that zoom to a range. */
export function zoomFields(axis: Axis, from: number, to: number): Readonly<Record<string, string | null>> {
  if (axis === "time") return { zoom: `${Number(from.toPrecision(7))}..${Number(to.toPrecision(7))}` };
  const first = Math.max(0, Math.round(from));
  return { step: rangeText({ first, last: Math.max(first + 1, Math.round(to)) }), span: null, held: null };
}

/** Lines of a log have the time at which they reached the server. */
const UNDER_WAY_MS = 1000;

/** The series that count training steps, one a trainer; all of them if there is none: a script may count otherwise. */
function stepsOf(series: SeriesStore): Series[] {
  const all = [...series.byName];
  const timed = all.filter(([name]) => /^step_ms(\.|$)/.test(name));
  return (timed.length > 0 ? timed : all).map(([, one]) => one);
}

/**
 * From when to when what was written while steps ran reached the server, in Unix ms, as far as a metric says so; null if
 * none does, or without steps.
 */
export function timesOf(series: SeriesStore, range: StepRange | null): readonly [number, number] | null {
  if (range === null) return null;
  const { first, last } = range;
  let [from, to] = [Number.NEGATIVE_INFINITY, Number.NEGATIVE_INFINITY];
  let isThere = false;
  for (const one of stepsOf(series)) {
    let [before, end] = [Number.NEGATIVE_INFINITY, Number.NEGATIVE_INFINITY];
    one.step.forEach((step, i) => {
      const ms = (one.timeNs[i] ?? 0) / 1e6;
      if (step < first) before = Math.max(before, ms);
      else if (step <= last) end = Math.max(end, ms);
    });
    if (end === Number.NEGATIVE_INFINITY) continue;
    from = isThere ? Math.min(from, before) : before;
    to = Math.max(to, end);
    isThere = true;
  }
  return isThere ? [from, to + UNDER_WAY_MS] : null;
}
