/**
 * What a failed job died of: the process that failed first, and its traceback, folded to what the person wrote. Pure.
 *
 * The server decides by the same rule which failure is the cause (penstock_server.services.lifecycle): of the processes
 * of the newest attempt that failed, the one that ended first; the others are usually its consequences.
 */
import type { Job, Replica } from "../types";
import { MASK } from "./masking";

/** What a process reports that ended because its job wanted it no more. */
const NOT_WANTED = new Set(["stopped", "it was never started"]);
/** What an attached process that failed reports of itself; its exit code is unknown. */
const FAILED = "failed: ";

export function firstFailure(job: Pick<Job, "attempt" | "replicas">): Replica | null {
  const newest = new Map<string, Replica>();
  for (const one of job.replicas) if (one.attempt === job.attempt) newest.set(`${one.role} ${one.index}`, one);
  const failed = [...newest.values()].filter(hasFailed);
  const ended = (one: Replica) => (one.finished_at === null ? Number.POSITIVE_INFINITY : Date.parse(one.finished_at));
  return failed.reduce<Replica | null>(
    (first, one) => (first === null || ended(one) < ended(first) ? one : first),
    null,
  );
}

function hasFailed(one: Replica): boolean {
  if (NOT_WANTED.has(one.reason)) return false;
  if (one.state === "LOST" || one.reason.startsWith(FAILED)) return true;
  return (one.state === "EXITED" || one.state === "KILLED") && (one.signal !== null || (one.exit_code ?? 0) !== 0);
}

/** Consecutive frames of a traceback: the person's own, or those of libraries, which are folded. */
export interface FramesOf {
  readonly own: boolean;
  /** Where libraries' frames are: "torch", "penstock". */
  readonly where: readonly string[];
  readonly frames: readonly { readonly at: string; readonly code: readonly string[] }[];
}

export interface Traceback {
  readonly parts: readonly FramesOf[];
  /** The person's line that was innermost: "train.py:41"; null: none of the frames is theirs. */
  readonly line: string | null;
  readonly error: string;
  /** Index of its first line in the log. */
  readonly begins: number;
}

const HEAD = "Traceback (most recent call last):";
const FRAME = /^ {2}File "(.+)", line (\d+)(?:, in (.+))?$/;
/** Before each line of one rank, where a launcher prefixes them. */
const RANK = /^\[(?:rank)?\d+\]:\s?/;
/** Where libraries are, the most telling first. */
const LIBRARIES = [
  /(?:site|dist)-packages[/\\]([^/\\.]+)/,
  /[/\\](penstock|torch)[/\\]/,
  /[/\\]lib[/\\]python[\d.]+[/\\]([^/\\.]+)/,
  /^<(frozen [\w.]+)/,
];

/** The last traceback of a log; null: there is none. */
export function lastTraceback(lines: readonly string[]): Traceback | null {
  const text = (index: number) => (lines[index] ?? "").replace(RANK, "");
  let begins = lines.length - 1;
  while (begins >= 0 && text(begins) !== HEAD) begins--;
  if (begins < 0) return null;
  const frames: { at: string; code: string[]; library: string | null }[] = [];
  let index = begins + 1;
  for (; index < lines.length && text(index).startsWith("  "); index++) {
    const found = FRAME.exec(text(index));
    if (found === null) frames[frames.length - 1]?.code.push(text(index).trim());
    else frames.push({ at: placeOf(found), code: [], library: libraryOf(found[1] ?? "") });
  }
  return {
    parts: folded(frames),
    line: frames.findLast((frame) => frame.library === null)?.at.split(" in ")[0] ?? null,
    error: errorFrom(text, index, lines.length),
    begins,
  };
}

const placeOf = ([, file = "", line = "", name]: RegExpExecArray): string =>
  `${file.split(/[/\\]/).slice(-1)[0]}:${line}${name === undefined ? "" : ` in ${name}`}`;

const libraryOf = (file: string): string | null =>
  LIBRARIES.map((one) => one.exec(file)?.[1]).find((name) => name !== undefined) ?? null;

function folded(frames: readonly { at: string; code: string[]; library: string | null }[]): FramesOf[] {
  const parts: { own: boolean; where: string[]; frames: { at: string; code: string[] }[] }[] = [];
  for (const { at, code, library } of frames) {
    let part = parts[parts.length - 1];
    if (part === undefined || part.own !== (library === null)) {
      part = { own: library === null, where: [], frames: [] };
      parts.push(part);
    }
    if (library !== null && !part.where.includes(library)) part.where.push(library);
    part.frames.push({ at, code });
  }
  return parts;
}

/** The error and its message, which may have several lines: up to the next empty one. */
function errorFrom(text: (index: number) => string, first: number, end: number): string {
  const found: string[] = [];
  for (let index = first; index < end && text(index) !== "" && found.length < MOST_LINES; index++)
    found.push(text(index));
  return found.join("\n");
}

const MOST_LINES = 12;

/** Variables whose values the server does not show, so that a copy of the specification would lack them. */
export const hiddenVariables = (job: Job): string[] =>
  Object.entries(job.spec.env ?? {}).flatMap(([name, value]) => (value === MASK ? [name] : []));
