/**
 * Log lines per replica, by byte offset: a piece that was seen is skipped, so reconnecting never doubles a line.
 * Bounded to `MAX_LINES` a replica, oldest dropped and counted. Carriage returns rewrite the line, as a terminal does.
 * A line has the time at which its first byte reached the server, and the colours that a terminal would give it.
 */
import { codesAfter, hasCodes, plain, type Run, runsOf } from "./ansi";

export const MAX_LINES = 50_000;

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** (Byte offset, Unix ms), ascending: what begins there came then. */
export type Times = readonly (readonly [number, number])[];

/** Bytes that `text` had in the file; a character the server could not decode stands for one byte. */
export function byteLength(text: string): number {
  let replaced = 0;
  for (const letter of text) if (letter === "\ufffd") replaced += 1;
  return encoder.encode(text).length - 2 * replaced;
}

export class ReplicaLog {
  /** Without codes of colours. */
  lines: string[] = [];
  /** When each line came, in Unix ms; 0 where that is unknown. Never descending. */
  times: number[] = [];
  /** Offset that the next piece should have. */
  next = 0;
  dropped = 0;
  /** Bytes skipped at the beginning because the log was long. */
  skippedBytes = 0;
  #open = false;
  /** Lines with colours as they were written, and the codes that held where they begin; by number since the start. */
  #coloured = new Map<number, { readonly line: string; readonly codes: string }>();
  #raw = "";
  #codes = "";

  append(offset: number, text: string, times: Times = []): void {
    const size = byteLength(text);
    if (offset + size <= this.next) return;
    const fresh = offset < this.next ? decoder.decode(encoder.encode(text).subarray(this.next - offset)) : text;
    const begin = Math.max(offset, this.next);
    if (offset > this.next && this.next === 0) this.skippedBytes = offset;
    this.next = offset + size;
    this.#write(fresh, begin, times);
  }

  /** A line as runs of one style. */
  runs(index: number): Run[] {
    const coloured = this.#coloured.get(this.dropped + index);
    if (coloured !== undefined) return runsOf(coloured.line, coloured.codes);
    return [{ text: this.lines[index] ?? "", classes: "" }];
  }

  #write(text: string, begin: number, times: Times): void {
    const timeAt = clockOf(times);
    const isOne = times.length <= 1 && (times[0]?.[0] ?? begin) <= begin;
    let at = begin;
    const parts = text.split("\n");
    const rest = parts.pop() ?? "";
    for (const part of parts) {
      this.#put(part, timeAt(at));
      this.#open = false;
      // Where one time holds for all of it, bytes need not be counted.
      if (!isOne) at += byteLength(part) + 1;
    }
    if (rest !== "") this.#put(rest, timeAt(at));
    this.#trim();
  }

  /** Add to the line that is open, or begin one. */
  #put(part: string, time: number): void {
    if (!this.#open) {
      this.#codes = codesAfter(this.#codes, this.#raw);
      this.#raw = "";
      this.lines.push("");
      this.times.push(Math.max(time, this.times[this.times.length - 1] ?? 0));
      this.#open = true;
    }
    const raw = this.#raw + part;
    const begin = raw.lastIndexOf("\r", raw.length - 2) + 1;
    // What was overwritten is gone; a colour that it left on stays.
    this.#codes = codesAfter(this.#codes, raw.slice(0, begin));
    this.#raw = raw.slice(begin);
    const line = this.#raw.endsWith("\r") ? this.#raw.slice(0, -1) : this.#raw;
    const last = this.lines.length - 1;
    this.lines[last] = plain(line);
    if (this.#codes !== "" || hasCodes(line)) this.#coloured.set(this.dropped + last, { line, codes: this.#codes });
    else this.#coloured.delete(this.dropped + last);
  }

  #trim(): void {
    const excess = this.lines.length - MAX_LINES;
    if (excess <= 0) return;
    this.lines.splice(0, excess);
    this.times.splice(0, excess);
    for (let i = 0; i < excess; i++) this.#coloured.delete(this.dropped + i);
    this.dropped += excess;
  }
}

/** The time of a byte, of bytes that are asked for in order; 0 before the first time: those bytes were not timed. */
function clockOf(times: Times): (offset: number) => number {
  let index = 0;
  return (offset) => {
    while (index + 1 < times.length && (times[index + 1]?.[0] ?? 0) <= offset) index += 1;
    const time = times[index];
    return time !== undefined && time[0] <= offset ? time[1] : 0;
  };
}

/** One line among those of all processes. */
export interface LineOf {
  readonly log: ReplicaLog;
  readonly replicaId: string;
  readonly line: number;
}

/** The newest lines of several logs by time, at most `most`; those of one log stay in their order. O(most × logs). */
export function merged(logs: readonly (readonly [string, ReplicaLog])[], most = MAX_LINES): LineOf[] {
  const left = logs.map(([, log]) => log.lines.length - 1);
  const found: LineOf[] = [];
  while (found.length < most) {
    let newest = -1;
    let newestTime = -1;
    for (let i = 0; i < logs.length; i++) {
      const time = logs[i]?.[1].times[left[i] ?? -1];
      if (time !== undefined && time >= newestTime) [newest, newestTime] = [i, time];
    }
    const one = logs[newest];
    if (one === undefined) break;
    const line = left[newest] ?? 0;
    found.push({ log: one[1], replicaId: one[0], line });
    left[newest] = line - 1;
  }
  return found.reverse();
}

export class LogStore {
  readonly byReplica = new Map<string, ReplicaLog>();

  of(replicaId: string): ReplicaLog {
    let log = this.byReplica.get(replicaId);
    if (log === undefined) {
      log = new ReplicaLog();
      this.byReplica.set(replicaId, log);
    }
    return log;
  }

  /** Where to resume, for the next subscribe. */
  offsets(): Record<string, number> {
    return Object.fromEntries([...this.byReplica].map(([id, log]) => [id, log.next]));
  }
}
