/** The list of jobs, addresses and the words for what happened: what must hold beside the websocket. */
import { beforeAll, describe, expect, test, vi } from "vitest";
import { ApiError } from "../src/api";
import { stream } from "../src/socket";
import { JobsStore, summary } from "../src/store/jobs";
import type { SyncRow } from "../src/store/sync";
import { subjectOf } from "../src/subject";
import type { EventRow, Job, NodeRow, ServerMessage } from "../src/types";

/** Job `n` was created n seconds after the first. */
const job = (n: number, more: Partial<Job> = {}): Job =>
  ({ id: `job-${n}`, created_at: new Date(n * 1000).toISOString(), state: "SUCCEEDED", ...more }) as Job;
const jobs = (...numbers: number[]) => numbers.map((n) => job(n));

/** A store, what the server says to it, and the jobs that REST has. */
function listing(...there: Job[]) {
  let say: (message: ServerMessage) => void = () => undefined;
  vi.spyOn(stream, "subscribe").mockImplementation((subscription) => {
    say = subscription.onMessage;
    return () => undefined;
  });
  const asked: string[] = [];
  const store = new JobsStore(async (id) => {
    asked.push(id);
    const found = there.find((one) => one.id === id);
    if (found === undefined) throw new ApiError(404, "no such job");
    return found;
  });
  const ids = () => store.jobs.value?.map((one) => one.id);
  return { store, asked, ids, say: (message: object) => say({ id: 1, ...message } as ServerMessage) };
}

describe("the live list", () => {
  test("a reconnect replaces it, newest first", () => {
    const { store, ids, say } = listing();
    say({ type: "snapshot", jobs: jobs(4, 3), total: 4, more: true });
    say({ type: "snapshot", jobs: jobs(3, 5), total: 5, more: true });
    expect([ids(), store.more.value]).toEqual([["job-5", "job-3"], true]);
  });

  test("other jobs are looked up once, whether there are any or not", async () => {
    const { store, asked, say } = listing(job(1));
    say({ type: "snapshot", jobs: jobs(4), total: 2, more: true });
    await store.lookUp(["job-4", "job-1", "job-0"]);
    await store.lookUp(["job-1", "job-0"]);
    expect(asked).toEqual(["job-1", "job-0"]);
    expect(["job-4", "job-1", "job-0"].map((id) => store.find(id)?.id)).toEqual(["job-4", "job-1", undefined]);
  });

  test("figures change what a job reports and nothing else of it", () => {
    const { store, say } = listing();
    const running = { state: "RUNNING", finished_at: null, latest: { loss: 2, auc: 0.5 }, eta_s: null } as const;
    const over = { state: "FAILED", finished_at: "2026-01-01", latest: {}, eta_s: null } as const;
    say({ type: "snapshot", jobs: [job(2, { ...running, progress: null }), job(1, over)], total: 2, more: false });
    const progress = { done: 1, total: 4, unit: "step" };
    say({
      type: "figures",
      jobs: {
        "job-2": { latest: { loss: 1 }, progress, eta_s: 9 },
        "job-1": { latest: { loss: 3 }, progress: null, eta_s: 7 },
        "job-0": { latest: {}, progress: null, eta_s: 1 },
      },
    });
    say({ type: "figures", jobs: { "job-2": { latest: { loss: 0.5 }, progress: null, eta_s: 8 } } });
    expect(store.jobs.value?.map((one) => [one.id, one.state, one.latest, one.progress, one.eta_s])).toEqual([
      ["job-2", "RUNNING", { loss: 0.5, auc: 0.5 }, progress, 8],
      ["job-1", "FAILED", { loss: 3 }, undefined, null],
    ]);
  });

  test("the summary counts all jobs, and a new one as it comes", () => {
    const { store, say } = listing();
    say({ type: "snapshot", jobs: [job(9, { state: "RUNNING" }), job(8)], total: 350, more: true });
    say({ type: "job", job: job(10, { state: "QUEUED" }) });
    say({ type: "job", job: job(9, { state: "SUCCEEDED" }) });
    say({ type: "job", job: job(1) });
    expect(summary(jobs(9, 8), store.total.value)).toBe("0 running · 0 waiting · 351 jobs");
    expect(summary(jobs(9, 8), null)).toBe("0 running · 0 waiting · 2 jobs");
  });

  test("a server that tells neither total nor more shows what it sent", () => {
    const { store, say } = listing();
    say({ type: "snapshot", jobs: jobs(1) });
    expect([store.more.value, store.total.value]).toEqual([false, null]);
  });
});

describe("subject of an event", () => {
  const event = (kind: EventRow["kind"], subject: string) => ({ kind, subject }) as EventRow;
  const replicas = [
    { id: "r1", role: "trainer", index: 0, attempt: 2 },
    { id: "r0", role: "trainer", index: 0, attempt: 1 },
  ];
  const known = job(1, { attempt: 2, replicas: replicas as unknown as Job["replicas"] });
  const nodes = [{ id: "n", name: "node-1" } as NodeRow];

  test("is job, the replica's role and number, or the node's name", () => {
    const subjects = [event("job", "job-1"), event("replica", "r1"), event("replica", "r0"), event("node", "n")];
    expect(subjects.map((one) => subjectOf(one, known, nodes))).toEqual([
      "job",
      "trainer 0",
      "trainer 0 · attempt 1",
      "node-1",
    ]);
  });

  test("is the id where nothing is known of it", () => {
    expect(subjectOf(event("replica", "gone"), null, nodes)).toBe("gone");
    expect(subjectOf(event("replica", "gone"), known, nodes)).toBe("a process of an earlier attempt");
    expect(subjectOf(event("node", "gone"), null, [])).toBe("gone");
  });
});

describe("with a browser's globals", () => {
  let router: typeof import("../src/router");
  let sync: typeof import("../src/views/sync");
  beforeAll(async () => {
    vi.stubGlobal("location", new URL("http://localhost/"));
    vi.stubGlobal("addEventListener", () => undefined);
    router = await import("../src/router");
    sync = await import("../src/views/sync");
  });

  test("an address with a broken percent sign is a page that is missing", () => {
    const at = (path: string) => router.parseRoute(new URL(path, "http://localhost"));
    expect(at("/jobs/%E0%A4%A")).toEqual({ page: "missing", path: "/jobs/%E0%A4%A" });
    expect(at("/jobs/%C3%A9")).toMatchObject({ page: "job", jobId: "é" });
  });

  test("bytes of sparse parameters are shown and added; only what nobody counted varies", () => {
    const row = (bytes: number, sparse: boolean) => ({ bytes, sparse }) as SyncRow;
    expect([row(4800.4, true), row(0, true), row(0, false)].map(sync.syncBytes)).toEqual([
      "4.80\u00a0kB",
      "varies",
      "0\u00a0B",
    ]);
    expect(sync.totalBytes([row(1000, false), row(4000, true)])).toBe("5.00\u00a0kB");
    expect(sync.totalBytes([row(1000, false), row(0, true)])).toBe("1.00\u00a0kB and 1 sparse parameter");
  });
});
