/** Series as charts show them: those of all trainers in one, the best value, and what stands under a crosshair. Pure. */
import type { Series, SeriesStore } from "./series";

/** "loss.trainer1" is the loss of trainer 1; that of the first trainer has the name alone. */
export function splitName(name: string): { readonly base: string; readonly who: string } {
  const found = /^(.+)\.(trainer|pserver)(\d{1,6})$/.exec(name);
  return found?.[1] === undefined ? { base: name, who: "" } : { base: found[1], who: `${found[2]} ${found[3]}` };
}

/** What charts have from left to right: steps, or seconds since the first point of a curve's job. */
export type Axis = "step" | "time";

export interface Curve {
  /** One of its own among the curves of a chart. */
  readonly key: string;
  readonly name: string;
  readonly who: string;
  readonly series: Series;
  /** Unix time of its job's first point. */
  readonly originNs: number;
}

/** Another job, of which the charts show the first trainer. */
export interface OtherRun {
  /** Of the job. */
  readonly id: string;
  readonly name: string;
  readonly series: SeriesStore;
}

/** Curves by what they measure, those of one chart in the order of the trainers; those of other runs behind them. */
export function curvesOf(store: SeriesStore, others: readonly OtherRun[] = []): Map<string, Curve[]> {
  const found = new Map<string, Curve[]>();
  const originNs = firstOf(store);
  for (const [name, series] of store.byName) {
    const { base, who } = splitName(name);
    found.set(base, [...(found.get(base) ?? []), { key: name, name, who, series, originNs }]);
  }
  const number = (curve: Curve) => Number(/\d+$/.exec(curve.who)?.[0] ?? 0);
  for (const curves of found.values()) {
    curves.sort((a, b) => number(a) - number(b));
    // Beside others the first trainer needs its name as well.
    const first = curves[0];
    if (first !== undefined && first.who === "" && curves.length > 1) curves[0] = { ...first, who: "trainer 0" };
  }
  for (const [base, curves] of found) {
    const theirs = others.flatMap((other) => {
      const series = other.series.byName.get(base);
      if (series === undefined) return [];
      return [{ key: `${base} of ${other.id}`, name: base, who: other.name, series, originNs: firstOf(other.series) }];
    });
    if (theirs.length > 0 && curves.length === 1 && curves[0] !== undefined)
      curves[0] = { ...curves[0], who: "this job" };
    curves.push(...theirs);
  }
  return found;
}

const firstOf = (store: SeriesStore): number =>
  [...store.byName.values()].reduce((least, series) => Math.min(least, series.timeNs[0] ?? least), Infinity);

/** Where a curve's points stand, ascending, and their values. */
function pointsOf({ series, originNs }: Curve, axis: Axis): readonly [number[], number[]] {
  if (axis === "step") return series.bySteps();
  return [series.timeNs.map((time) => (time - originNs) / 1e9), series.value];
}

/** Which way a metric is better; null where neither is. */
export function better(base: string): "less" | "more" | null {
  if (/loss|error|perplexity|rmse|mae\b/i.test(base)) return "less";
  if (/auc|acc|precision|recall|f1|ndcg|bleu/i.test(base)) return "more";
  return null;
}

export interface Best {
  readonly value: number;
  readonly step: number;
}

/** The best value of a score and its step. Of a loss, which is noise from batch to batch, none is worth a name. */
export function bestOf(base: string, series: Series): Best | null {
  if (better(base) !== "more") return null;
  let at = -1;
  series.value.forEach((value, index) => {
    if (at < 0 || value > (series.value[at] ?? value)) at = index;
  });
  return at < 0 ? null : { value: series.value[at] ?? 0, step: series.step[at] ?? 0 };
}

/** Undefined: the curve has no point there; null: nothing was reported, so that the line breaks off. */
export type Column = (number | null | undefined)[];

/** Steps or times of several curves joined, and each curve's values at them, as uPlot takes them. */
export function joined(curves: readonly Curve[], axis: Axis = "step"): [number[], ...Column[]] {
  const each = curves.map((curve) => pointsOf(curve, axis));
  const gaps = curves.map((curve) => gapsOf(curve, axis));
  const [only] = each;
  if (each.length === 1 && only !== undefined && gaps[0]?.length === 0) return [only[0], only[1]];
  const steps = [...new Set([...each.flatMap(([step]) => step), ...gaps.flat()])].sort((a, b) => a - b);
  const at = new Map(steps.map((step, index) => [step, index]));
  const columns = each.map(([step, value], curve) => {
    const column: Column = new Array(steps.length).fill(undefined);
    step.forEach((one, index) => {
      column[at.get(one) ?? 0] = value[index];
    });
    for (const gap of gaps[curve] ?? []) column[at.get(gap) ?? 0] = null;
    return column;
  });
  return [steps, ...columns];
}

/** This many times the usual time without a point, and at least this long, is a gap. */
const GAP_TIMES = 20;
const GAP_NS = 5e9;

/** Between two points each: where the process reported nothing for long (it was stopped, or evaluated). */
export function gapsOf(curve: Curve, axis: Axis): number[] {
  const { timeNs, ascending } = curve.series;
  if ((axis === "step" && !ascending) || timeNs.length < 3) return [];
  const [at] = pointsOf(curve, axis);
  const waits = timeNs.slice(1).map((time, index) => time - (timeNs[index] ?? time));
  const usual = [...waits].sort((a, b) => a - b)[waits.length >> 1] ?? 0;
  const limit = Math.max(GAP_NS, GAP_TIMES * usual);
  return waits.flatMap((wait, index) => (wait > limit ? [((at[index] ?? 0) + (at[index + 1] ?? 0)) / 2] : []));
}

/** An exponential moving mean from the first value on; gaps stay. `weight`: of what was before, 0 to below 1. */
export function smoothed(values: Column, weight: number): Column {
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** For a logarithmic axis, which has no place for what is not above zero. */
export const aboveZero = (values: Column): Column =>
  values.map((value) => (value !== null && value !== undefined && value <= 0 ? null : value));

/** The value of a curve at a step or time: that of the newest point at or before it, NaN before its first. */
export function valueAt(curve: Curve, x: number, axis: Axis = "step"): number {
  const [steps, values] = pointsOf(curve, axis);
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((steps[middle] ?? 0) <= x) low = middle + 1;
    else high = middle;
  }
  return low === 0 ? Number.NaN : (values[low - 1] ?? Number.NaN);
}

/** The newest step that a job has finished: as its progress counts them, or as its metrics do. */
export function newestStep(progressSteps: number | null, seriesStep: number): number {
  return Math.max(progressSteps ?? 0, seriesStep);
}
