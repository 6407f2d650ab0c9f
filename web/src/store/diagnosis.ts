/**
 * Why the job's steps take as long as they do, as the server says it (core/penstock/diagnosis/).
 *
 * Asked for anew when steps have arrived, at most every `ASK_MS`; where they should and do not, every `SILENT_MS`; and
 * once a job no longer runs, as no step is missing then.
 */

import { signal } from "@preact/signals";
import { ApiError } from "../api";
import { firm } from "../format";
import type { Diagnosis, Finding, Job } from "../types";

export const ASK_MS = 2000;
export const SILENT_MS = 2000;

export class DiagnosisStore {
  readonly findings = signal<readonly Finding[]>([]);
  #askedAt = Number.NEGATIVE_INFINITY;
  #askedVersion = -1;
  #asking = false;
  #expected = false;

  constructor(private readonly fetchDiagnosis: () => Promise<Diagnosis>) {}

  /** Note the time, how many metrics came so far, and whether more are expected; asks if the answer may have changed. */
  async tick(nowMs: number, version: number, expectsMore: boolean): Promise<void> {
    const waited = nowMs - this.#askedAt;
    const isOther = version !== this.#askedVersion || (this.#expected && !expectsMore);
    const isDue = isOther ? waited >= ASK_MS : expectsMore && waited >= SILENT_MS;
    if (!isDue || this.#asking) return;
    this.#asking = true;
    this.#askedAt = nowMs;
    this.#askedVersion = version;
    try {
      this.findings.value = (await this.fetchDiagnosis()).findings;
      this.#expected = expectsMore;
    } catch (error) {
      // What was said last stays; the header says that the page is offline.
      if (!(error instanceof ApiError)) throw error;
    } finally {
      this.#asking = false;
    }
  }
}

const SHOWN = 2;
const WORTH_SAYING = 0.06;

/** What the header says: the first cause, and a second one that is worth it. */
export function shownFindings(findings: readonly Finding[]): Finding[] {
  const [first, ...more] = findings;
  if (first === undefined) return [];
  if (first.cause === "healthy") return [first];
  return [first, ...more.filter((one) => one.share >= WORTH_SAYING).slice(0, SHOWN - 1)];
}

/** Whether a process runs where the server does not reach it: what it does, and whether it still runs, is not known. */
export const isCutOff = (job: Job): boolean =>
  job.replicas.some((one) => one.attempt === job.attempt && one.state === "UNKNOWN");

/** Steps that are missing while a node is unreachable are no finding of their own. */
export const findingsOf = (job: Job, findings: readonly Finding[]): readonly Finding[] =>
  isCutOff(job) ? findings.filter((one) => one.cause !== "stalled") : findings;

/** Whether the job's own sentence stands before the findings: they are of steps that ran, and steps say nothing of a node. */
export const saysWhy = (job: Job, findings: readonly Finding[]): boolean =>
  job.state !== "RUNNING" || findings.length === 0 || isCutOff(job);

/** The address of a finding's evidence, in the view at `at`: which metric, which lane, which step, which operator. */
export function evidenceHref(at: string, finding: Finding): string {
  const fields = new URLSearchParams(finding.query);
  if (finding.op !== null) fields.set("op", `${finding.op}`);
  const query = fields.toString();
  return query === "" ? at : `${at}${at.includes("?") ? "&" : "?"}${query}`;
}

/** A sentence with its `quoted` names set apart: "is 15.8 ms of", and whether each part is a name. */
export const partsOf = (sentence: string): { readonly text: string; readonly isName: boolean }[] =>
  sentence
    .split("`")
    .map((text, index) => (index % 2 === 1 ? { text, isName: true } : { text: firm(text), isName: false }));
