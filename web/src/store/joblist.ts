/** Which jobs a list shows and in what order: what runs or failed comes before what waits. Pure. */
import type { Job } from "../types";

export const STATES = ["all", "running", "failed", "waiting", "done"] as const;
export type StateTab = (typeof STATES)[number];
export const SORTS = ["attention", "newest", "name", "loss", "speed"] as const;
export type Sort = (typeof SORTS)[number];

export interface Wish {
  readonly state: StateTab;
  readonly text: string;
  readonly sort: Sort;
}

/** As the server names them. */
export const STATES_OF: Readonly<Record<StateTab, readonly string[]>> = {
  all: [],
  running: ["STARTING", "RUNNING", "RECOVERING", "STOPPING"],
  failed: ["FAILED"],
  waiting: ["CREATED", "QUEUED"],
  done: ["SUCCEEDED", "CANCELLED"],
};
const TAB: Readonly<Record<string, StateTab>> = Object.fromEntries(
  STATES.flatMap((tab) => STATES_OF[tab].map((state) => [state, tab])),
);
export const tabOfState = (state: string): StateTab => TAB[state] ?? "done";
export const tabOf = (job: Job): StateTab => tabOfState(job.state);

const oneOf = <T extends string>(list: readonly T[], value: string | null, otherwise: T): T =>
  list.find((one) => one === value) ?? otherwise;

/** What the address asks for. */
export function wishOf(query: URLSearchParams): Wish {
  return {
    state: oneOf(STATES, query.get("state"), "all"),
    text: query.get("q") ?? "",
    sort: oneOf(SORTS, query.get("sort"), "attention"),
  };
}

export function counts(jobs: readonly Job[]): Readonly<Record<StateTab, number>> {
  const found = { all: jobs.length, running: 0, failed: 0, waiting: 0, done: 0 };
  for (const job of jobs) found[tabOf(job)] += 1;
  return found;
}

const RANK: Readonly<Record<StateTab, number>> = { all: 0, running: 0, failed: 1, waiting: 2, done: 3 };
const newest = (a: Job, b: Job): number => (a.created_at < b.created_at ? 1 : a.created_at > b.created_at ? -1 : 0);
const number = (value: number | undefined, missing: number): number => value ?? missing;

const ORDER: Readonly<Record<Sort, (a: Job, b: Job) => number>> = {
  attention: (a, b) => RANK[tabOf(a)] - RANK[tabOf(b)] || newest(a, b),
  newest,
  name: (a, b) => Number(a.name > b.name) - Number(a.name < b.name) || newest(a, b), // by character, as the server
  loss: (a, b) => number(a.latest.loss, 1 / 0) - number(b.latest.loss, 1 / 0) || newest(a, b),
  speed: (a, b) => number(b.latest.samples_per_s, -1) - number(a.latest.samples_per_s, -1) || newest(a, b),
};

/** Words have to be somewhere in the name, id, state or reason. */
export function arrange(jobs: readonly Job[], wish: Wish): Job[] {
  const words = wish.text.toLowerCase().split(/\s+/).filter(Boolean);
  const says = (job: Job) => `${job.name} ${job.id} ${job.state} ${job.kind} ${job.why}`.toLowerCase();
  return jobs
    .filter((job) => wish.state === "all" || tabOf(job) === wish.state)
    .filter((job) => words.length === 0 || words.every((word) => says(job).includes(word)))
    .sort(ORDER[wish.sort]);
}
