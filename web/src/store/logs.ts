/**
 * Log lines per replica, by byte offset: a piece that was seen is skipped, so reconnecting never doubles a line.
 * Bounded to `MAX_LINES` a replica, oldest dropped and counted. Carriage returns rewrite the line, as a terminal does.
 */

export const MAX_LINES = 50_000;

// biome-ignore lint/suspicious/noControlCharactersInRegex: terminal colour codes start with the control character ESC
const ANSI = /\u001b\[[0-9;?]*[A-Za-z]/g;
const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** Bytes that `text` had in the file; a character the server could not decode stands for one byte. */
export function byteLength(text: string): number {
  let replaced = 0;
  for (const letter of text) if (letter === "\ufffd") replaced += 1;
  return encoder.encode(text).length - 2 * replaced;
}

export class ReplicaLog {
  lines: string[] = [];
  /** Offset that the next piece should have. */
  next = 0;
  dropped = 0;
  /** Bytes skipped at the beginning because the log was long. */
  skippedBytes = 0;
  #open = false;

  append(offset: number, text: string): void {
    const size = byteLength(text);
    if (offset + size <= this.next) return;
    const fresh = offset < this.next ? decoder.decode(encoder.encode(text).subarray(this.next - offset)) : text;
    if (offset > this.next && this.next === 0) this.skippedBytes = offset;
    this.next = offset + size;
    this.#write(fresh.replace(ANSI, ""));
  }

  #write(text: string): void {
    const parts = text.split("\n");
    const first = parts.shift() ?? "";
    if (this.#open && this.lines.length > 0) {
      this.lines[this.lines.length - 1] = overwrite((this.lines[this.lines.length - 1] ?? "") + first);
    } else if (first !== "" || parts.length > 0) {
      this.lines.push(overwrite(first));
    }
    for (const part of parts) this.lines.push(overwrite(part));
    this.#open = true;
    if (this.lines[this.lines.length - 1] === "") {
      this.lines.pop();
      this.#open = false;
    }
    const excess = this.lines.length - MAX_LINES;
    if (excess > 0) {
      this.lines.splice(0, excess);
      this.dropped += excess;
    }
  }
}

function overwrite(line: string): string {
  const text = line.endsWith("\r") ? line.slice(0, -1) : line;
  const at = text.lastIndexOf("\r");
  return at < 0 ? text : text.slice(at + 1);
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
