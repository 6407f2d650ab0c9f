/** The list of jobs, live: one subscription, made by the jobs page. */
import { signal } from "@preact/signals";
import { stream } from "../socket";
import type { Job, NodeRow, ServerMessage } from "../types";

export class JobsStore {
  /** null until the first snapshot: loading is not the same as empty. */
  readonly jobs = signal<readonly Job[] | null>(null);
  /** Nodes as the server pushed them last; null if it has pushed none. */
  readonly nodes = signal<readonly NodeRow[] | null>(null);
  #unsubscribe: () => void;

  constructor() {
    this.#unsubscribe = stream.subscribe({
      request: () => ({ topic: "jobs" }),
      onMessage: (message) => this.#receive(message),
    });
  }

  dispose(): void {
    this.#unsubscribe();
  }

  #receive(message: ServerMessage): void {
    if (message.type === "snapshot" && "jobs" in message) {
      this.jobs.value = newestFirst(message.jobs);
      if (message.nodes !== undefined) this.nodes.value = message.nodes;
    }
    if (message.type === "nodes") this.nodes.value = message.nodes;
    if (message.type === "job") {
      const others = (this.jobs.value ?? []).filter((job) => job.id !== message.job.id);
      this.jobs.value = newestFirst([message.job, ...others]);
    }
  }
}

function newestFirst(jobs: readonly Job[]): Job[] {
  return [...jobs].sort((a, b) => (a.created_at < b.created_at ? 1 : a.created_at > b.created_at ? -1 : 0));
}
