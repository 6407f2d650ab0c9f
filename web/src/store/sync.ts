/** Gradient exchange per parameter: what SYNC frames said in the last window, and since the page subscribed. */
import { type Frame, smallColumn, wideColumn } from "../codec";
import { Column } from "../constants";
import type { GraphDocument } from "../types";

/** Exchanges that the table averages over: long enough to read, short enough to follow. */
export const WINDOW_MS = 10_000;

export interface SyncRow {
  readonly index: number;
  readonly parameter: string;
  readonly gradient: string;
  readonly mode: string;
  readonly owner: number;
  readonly sparse: boolean;
  /** Bytes, nanoseconds and waited nanoseconds of one exchange, averaged over the window. */
  readonly bytes: number;
  readonly timeNs: number;
  readonly waitNs: number;
  readonly count: number;
}

interface Sample {
  readonly atMs: number;
  readonly param: Uint16Array | Uint32Array;
  readonly count: Uint16Array | Uint32Array;
  readonly bytes: BigUint64Array;
  readonly total: BigUint64Array;
  readonly wait: BigUint64Array;
}

export class SyncStore {
  #samples = new Map<string, Sample[]>();
  #counts = new Map<string, Float64Array>();

  ingest(hash: string, frame: Frame, nowMs: number): void {
    const sample: Sample = {
      atMs: nowMs,
      param: smallColumn(frame, Column.PARAM),
      count: smallColumn(frame, Column.COUNT),
      bytes: wideColumn(frame, Column.BYTES),
      total: wideColumn(frame, Column.TOTAL_NS),
      wait: wideColumn(frame, Column.WAIT_NS),
    };
    const list = this.#samples.get(hash) ?? [];
    list.push(sample);
    while ((list[0]?.atMs ?? nowMs) < nowMs - WINDOW_MS) list.shift();
    this.#samples.set(hash, list);
    this.#countUp(hash, sample);
  }

  #countUp(hash: string, sample: Sample): void {
    const highest = Array.from(sample.param).reduce((most, param) => Math.max(most, param), -1);
    let counts = this.#counts.get(hash) ?? new Float64Array(0);
    if (counts.length <= highest) {
      const wider = new Float64Array(highest + 1);
      wider.set(counts);
      counts = wider;
    }
    for (let i = 0; i < sample.param.length; i++) {
      const param = sample.param[i] ?? 0;
      counts[param] = (counts[param] ?? 0) + (sample.count[i] ?? 0);
    }
    this.#counts.set(hash, counts);
  }

  rows(graph: GraphDocument, hash: string): SyncRow[] {
    const n = graph.syncs.length;
    const sums = {
      count: new Float64Array(n),
      bytes: new Float64Array(n),
      time: new Float64Array(n),
      wait: new Float64Array(n),
    };
    for (const sample of this.#samples.get(hash) ?? []) {
      for (let i = 0; i < sample.param.length; i++) {
        const param = sample.param[i] ?? 0;
        if (param >= n) continue;
        sums.count[param] = (sums.count[param] ?? 0) + (sample.count[i] ?? 0);
        sums.bytes[param] = (sums.bytes[param] ?? 0) + Number(sample.bytes[i] ?? 0n);
        sums.time[param] = (sums.time[param] ?? 0) + Number(sample.total[i] ?? 0n);
        sums.wait[param] = (sums.wait[param] ?? 0) + Number(sample.wait[i] ?? 0n);
      }
    }
    const counts = this.#counts.get(hash);
    return graph.syncs.map((sync, index) => {
      const exchanges = sums.count[index] ?? 0;
      const per = (sum: Float64Array) => (exchanges === 0 ? 0 : (sum[index] ?? 0) / exchanges);
      return {
        index,
        parameter: sync.parameter,
        gradient: sync.gradient,
        mode: sync.mode,
        owner: sync.owner,
        sparse: sync.sparse,
        bytes: exchanges === 0 ? sync.bytes : per(sums.bytes),
        timeNs: per(sums.time),
        waitNs: per(sums.wait),
        count: counts?.[index] ?? 0,
      };
    });
  }
}
