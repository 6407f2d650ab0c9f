/** Metric series, appended as they arrive. Bounded: past `MAX_POINTS` every second older point is dropped. */
import type { SeriesDelta, SeriesSet } from "../types";

export const MAX_POINTS = 8000;

export class Series {
  step: number[] = [];
  timeNs: number[] = [];
  value: number[] = [];
  /** Points that arrived, thinned out or not. */
  arrived = 0;

  append(delta: SeriesDelta): void {
    for (let i = 0; i < delta.step.length; i++) {
      const value = delta.value[i];
      const step = delta.step[i];
      if (step === undefined || value === undefined || value === null || !Number.isFinite(value)) continue;
      // A resubscribe sends what is stored again; steps only grow within one attempt.
      if (this.#has(step, delta.time_ns[i] ?? 0)) continue;
      this.step.push(step);
      this.timeNs.push(delta.time_ns[i] ?? 0);
      this.value.push(value);
      this.arrived += 1;
    }
    if (this.step.length > MAX_POINTS) this.#thin();
  }

  #has(step: number, timeNs: number): boolean {
    const last = this.step.length - 1;
    return last >= 0 && step <= (this.step[last] ?? -1) && timeNs <= (this.timeNs[last] ?? 0);
  }

  #thin(): void {
    const half = Math.floor(this.step.length / 2);
    const keep = (_: number, index: number) => index >= half || index % 2 === 0;
    this.step = this.step.filter(keep);
    this.timeNs = this.timeNs.filter(keep);
    this.value = this.value.filter(keep);
  }

  get latest(): number | undefined {
    return this.value[this.value.length - 1];
  }
}

export class SeriesStore {
  readonly byName = new Map<string, Series>();

  append(set: SeriesSet): void {
    for (const [name, delta] of Object.entries(set)) {
      let series = this.byName.get(name);
      if (series === undefined) {
        series = new Series();
        this.byName.set(name, series);
      }
      series.append(delta);
    }
  }

  latest(name: string): number | undefined {
    return this.byName.get(name)?.latest;
  }
}
