/** Metric series, appended as they arrive. Bounded: past `MAX_POINTS` every second older point is dropped. */
import type { SeriesDelta, SeriesSet } from "../types";

export const MAX_POINTS = 8000;

export class Series {
  step: number[] = [];
  timeNs: number[] = [];
  value: number[] = [];
  /** False once a point came with a smaller step: a process began again. */
  ascending = true;
  /** Points that arrived, thinned out or not. */
  arrived = 0;

  append(delta: SeriesDelta): void {
    for (let i = 0; i < delta.step.length; i++) {
      // A delta may repeat what a snapshot had; time only grows.
      if ((delta.time_ns[i] ?? 0) >= this.#lastTime()) this.#push(delta, i);
    }
    if (this.step.length > MAX_POINTS) this.#thin();
  }

  /** Start again from what is stored, and keep the points here that are newer than it. */
  restart(stored: SeriesDelta): void {
    const newer: SeriesDelta = { step: this.step, time_ns: this.timeNs, value: this.value };
    const arrived = this.arrived;
    this.step = [];
    this.timeNs = [];
    this.value = [];
    this.ascending = true;
    this.append(stored);
    const last = this.#lastTime();
    for (let i = 0; i < newer.step.length; i++) if ((newer.time_ns[i] ?? 0) > last) this.#push(newer, i);
    this.arrived = Math.max(arrived, this.step.length);
  }

  #lastTime(): number {
    return this.timeNs[this.timeNs.length - 1] ?? Number.NEGATIVE_INFINITY;
  }

  #push(from: SeriesDelta, i: number): void {
    const value = from.value[i];
    const step = from.step[i];
    if (step === undefined || value === undefined || !Number.isFinite(value)) return;
    if (from.time_ns[i] === this.#lastTime() && step === this.step[this.step.length - 1]) return;
    if (step < (this.step[this.step.length - 1] ?? step)) this.ascending = false;
    this.step.push(step);
    this.timeNs.push(from.time_ns[i] ?? 0);
    this.value.push(value);
    this.arrived += 1;
  }

  #thin(): void {
    const half = Math.floor(this.step.length / 2);
    const keep = (_: number, index: number) => index >= half || index % 2 === 0;
    this.step = this.step.filter(keep);
    this.timeNs = this.timeNs.filter(keep);
    this.value = this.value.filter(keep);
  }

  /**
   * Steps and values by ascending step, as a chart needs them; the stored arrays themselves where they are so. A step
   * that a process took again, after it was started again, has the value that came last.
   */
  bySteps(): readonly [number[], number[]] {
    if (this.ascending) return [this.step, this.value];
    const last = new Map(this.step.map((step, index) => [step, this.value[index] ?? 0]));
    const steps = [...last.keys()].sort((a, b) => a - b);
    return [steps, steps.map((step) => last.get(step) ?? 0)];
  }

  get latest(): number | undefined {
    return this.value[this.value.length - 1];
  }
}

export class SeriesStore {
  readonly byName = new Map<string, Series>();

  append(set: SeriesSet): void {
    for (const [name, delta] of Object.entries(set)) this.#of(name).append(delta);
  }

  /** Take a snapshot: every series begins with what the server stored. */
  restart(set: SeriesSet): void {
    for (const [name, stored] of Object.entries(set)) this.#of(name).restart(stored);
  }

  #of(name: string): Series {
    let series = this.byName.get(name);
    if (series === undefined) {
      series = new Series();
      this.byName.set(name, series);
    }
    return series;
  }

  latest(name: string): number | undefined {
    return this.byName.get(name)?.latest;
  }
}
