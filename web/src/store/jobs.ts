/** The list of jobs, live: one subscription, made by the jobs page. */
import { signal } from "@preact/signals";
import { ApiError, api } from "../api";
import { plural } from "../format";
import { stream } from "../socket";
import type { Figures, Job, NodeRow, ServerMessage } from "../types";

export class JobsStore {
  /** null until the first snapshot: loading is not the same as empty. */
  readonly jobs = signal<readonly Job[] | null>(null);
  /** Nodes as the server pushed them last; null if it has pushed none. */
  readonly nodes = signal<readonly NodeRow[] | null>(null);
  /** How many jobs there are in all, as far as the server said; null if it did not. */
  readonly total = signal<number | null>(null);
  /** Whether jobs exist that are older than those shown. */
  readonly more = signal(false);
  #unsubscribe: () => void;
  #lookedUp = signal<ReadonlyMap<string, Job>>(new Map());
  #asked = new Set<string>();

  constructor(private readonly fetchJob: (jobId: string) => Promise<Job> = api.job) {
    this.#unsubscribe = stream.subscribe({
      request: () => ({ topic: "jobs" }),
      onMessage: (message) => this.#receive(message),
    });
  }

  dispose(): void {
    this.#unsubscribe();
  }

  /** A job of the live list, or one that was looked up. */
  find(jobId: string): Job | undefined {
    return this.jobs.value?.find((job) => job.id === jobId) ?? this.#lookedUp.value.get(jobId);
  }

  /** Ask for jobs that are not in the live list; one that there is not stays unknown. */
  async lookUp(jobIds: readonly string[]): Promise<void> {
    for (const id of jobIds) {
      if (this.find(id) !== undefined || this.#asked.has(id)) continue;
      this.#asked.add(id);
      try {
        const job = await this.fetchJob(id);
        this.#lookedUp.value = new Map([...this.#lookedUp.value, [id, job]]);
      } catch (error) {
        if (!(error instanceof ApiError)) throw error; // the comparison says which jobs it does not know
      }
    }
  }

  #snapshot(message: Extract<ServerMessage, { jobs: readonly Job[] }>): void {
    this.jobs.value = newestFirst(message.jobs);
    this.total.value = message.total ?? null;
    this.more.value = message.more ?? false;
    if (message.nodes !== undefined) this.nodes.value = message.nodes;
  }

  #receive(message: ServerMessage): void {
    if (message.type === "snapshot" && "jobs" in message) this.#snapshot(message);
    if (message.type === "nodes") this.nodes.value = message.nodes;
    if (message.type === "figures" && this.jobs.value !== null) {
      this.jobs.value = this.jobs.value.map((job) => withFigures(job, message.jobs[job.id]));
    }
    if (message.type === "job") {
      const before = this.jobs.value ?? [];
      const others = before.filter((job) => job.id !== message.job.id);
      const oldest = before[before.length - 1];
      // One that is not shown and older than all that are was in the total already.
      const counted = this.more.value && oldest !== undefined && message.job.created_at < oldest.created_at;
      if (this.total.value !== null && others.length === before.length && !counted) this.total.value += 1;
      this.jobs.value = newestFirst([message.job, ...others]);
    }
  }
}

/** A job with what it reported since; one that has ended has no time left. */
export function withFigures(job: Job, figures: Figures | undefined): Job {
  if (figures === undefined) return job;
  return {
    ...job,
    latest: { ...job.latest, ...figures.latest },
    progress: figures.progress ?? job.progress,
    eta_s: job.finished_at === null ? figures.eta_s : null,
  };
}

function newestFirst(jobs: readonly Job[]): Job[] {
  return [...jobs].sort((a, b) => (a.created_at < b.created_at ? 1 : a.created_at > b.created_at ? -1 : 0));
}

/** `total` counts all jobs, of which `jobs` may be the newest and those that go on. */
export function summary(jobs: readonly Job[], total: number | null): string {
  const running = jobs.filter((job) => job.state === "RUNNING").length;
  const waiting = jobs.filter((job) => job.state === "QUEUED" || job.state === "STARTING").length;
  return `${running} running · ${waiting} waiting · ${plural(Math.max(total ?? 0, jobs.length), "job")}`;
}
