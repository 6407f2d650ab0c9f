/** The list of jobs, live: one subscription, made by the jobs page. */
import { signal } from "@preact/signals";
import { ApiError, api } from "../api";
import { integer, plural } from "../format";
import { stream } from "../socket";
import type { Figures, Job, NodeRow, Page, ServerMessage } from "../types";

export class JobsStore {
  /** null until the first snapshot: loading is not the same as empty. */
  readonly jobs = signal<readonly Job[] | null>(null);
  /** Nodes as the server pushed them last; null if it has pushed none. */
  readonly nodes = signal<readonly NodeRow[] | null>(null);
  /** How many jobs there are in all, as far as the server said; null if it did not. */
  readonly total = signal<number | null>(null);
  /** Whether jobs exist that are older than those shown. */
  readonly more = signal(false);
  readonly loading = signal(false);
  readonly error = signal<ApiError | null>(null);
  #unsubscribe: () => void;
  #pageToken: string | null = null;
  #disposed = false;

  constructor(private readonly fetchPage: (token: string | null) => Promise<Page<Job>> = api.jobs) {
    this.#unsubscribe = stream.subscribe({
      request: () => ({ topic: "jobs" }),
      onMessage: (message) => this.#receive(message),
    });
  }

  dispose(): void {
    this.#disposed = true;
    this.#unsubscribe();
  }

  /** Add older jobs by REST. The first pages may repeat what the snapshot held; it reads on until one is new. */
  async loadOlder(): Promise<void> {
    if (this.loading.value) return;
    this.loading.value = true;
    this.error.value = null;
    try {
      const before = this.jobs.value?.length ?? 0;
      do {
        const page = await this.fetchPage(this.#pageToken);
        if (this.#disposed) return;
        this.#pageToken = page.next_page_token;
        this.#add(page.items);
        this.more.value = page.next_page_token !== null;
      } while (this.more.value && (this.jobs.value?.length ?? 0) === before);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.error.value = error;
    } finally {
      this.loading.value = false;
    }
  }

  /** Jobs that are known already stay: what the stream said of them is newer than any page. */
  #add(older: readonly Job[]): void {
    const known = new Map((this.jobs.value ?? []).map((job) => [job.id, job]));
    for (const job of older) if (!known.has(job.id)) known.set(job.id, job);
    this.jobs.value = newestFirst([...known.values()]);
  }

  #snapshot(message: Extract<ServerMessage, { jobs: readonly Job[] }>): void {
    const fresh = new Set(message.jobs.map((job) => job.id));
    const oldest = message.jobs.reduce((least, job) => (job.created_at < least ? job.created_at : least), "~");
    // After a reconnect, what was loaded from further back than the snapshot reaches stays on the page.
    const kept = message.more ? (this.jobs.value ?? []).filter((j) => !fresh.has(j.id) && j.created_at <= oldest) : [];
    this.jobs.value = newestFirst([...message.jobs, ...kept]);
    this.total.value = message.total ?? null;
    if (kept.length === 0) {
      this.more.value = message.more ?? false;
      this.#pageToken = null;
    }
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

/** `total` counts all jobs, of which the page may show the newest only. */
export function summary(jobs: readonly Job[], total: number | null, more: boolean): string {
  const running = jobs.filter((job) => job.state === "RUNNING").length;
  const waiting = jobs.filter((job) => job.state === "QUEUED" || job.state === "STARTING").length;
  const all = Math.max(total ?? 0, jobs.length);
  const count = all > jobs.length ? `newest ${integer(jobs.length)} of ${plural(all, "job")}` : plural(all, "job");
  const open = more && all === jobs.length ? ", older ones exist" : "";
  return `${running} running · ${waiting} waiting · ${count}${open}`;
}
