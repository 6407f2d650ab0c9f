/** The whole list of jobs: found by the server, and what is live stands in its place. */
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { ApiError } from "../src/api";
import { STATES_OF, tabOfState, type Wish } from "../src/store/joblist";
import { JobSearch, listed } from "../src/store/jobsearch";
import { comparisonHref, MOST_PICKED, pickedOf, toggled } from "../src/store/picked";
import type { Job, JobCounts, Page } from "../src/types";

const job = (n: number, more: Partial<Job> = {}): Job =>
  ({
    id: `job-${n}`,
    name: `n${n}`,
    kind: "managed",
    why: "",
    created_at: new Date(n * 1000).toISOString(),
    state: "SUCCEEDED",
    latest: {},
    ...more,
  }) as Job;
const jobs = (...numbers: number[]) => numbers.map((n) => job(n));
const wish = (more: Partial<Wish> = {}): Wish => ({ state: "all", text: "", sort: "newest", ...more });
const page = (items: Job[], next: string | null = null): Page<Job> => ({ items, next_page_token: next }) as Page<Job>;

interface Asked {
  readonly wish: Wish;
  readonly states: readonly string[];
  readonly token: string | null;
  readonly answer: (page: Page<Job> | ApiError) => Promise<void>;
}

/** A search, and what it has asked for: a test answers when it likes. */
function searching(counts: JobCounts = { states: {}, total: 0 }) {
  const asked: Asked[] = [];
  const counted: string[] = [];
  const search = new JobSearch({
    find: (of, states, token) =>
      new Promise((resolve, reject) => {
        const answer = async (given: Page<Job> | ApiError) => {
          if (given instanceof ApiError) reject(given);
          else resolve(given);
          await vi.advanceTimersByTimeAsync(0);
        };
        asked.push({ wish: of, states, token, answer });
      }),
    count: async (words) => {
      counted.push(words);
      return counts;
    },
  });
  return { search, asked, counted, ids: () => search.found.value?.map((one) => one.id) };
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("a search", () => {
  test("asks once typing has paused, for the states of the tab", async () => {
    const { search, asked, counted } = searching();
    search.want(wish());
    await vi.advanceTimersByTimeAsync(0);
    for (const text of ["e", "er", "err"]) {
      search.want(wish({ text, state: "failed" }));
      await vi.advanceTimersByTimeAsync(50);
    }
    await vi.advanceTimersByTimeAsync(500);
    search.want(wish({ text: "err", state: "failed" }));
    await vi.advanceTimersByTimeAsync(500);
    expect(asked.map((one) => [one.wish.text, one.states, one.token])).toEqual([
      ["", [], null],
      ["err", ["FAILED"], null],
    ]);
    expect(counted).toEqual(["", "err"]);
  });

  test("goes on from the last page, and repeats no job", async () => {
    const { search, asked, ids } = searching();
    search.want(wish());
    await vi.advanceTimersByTimeAsync(0);
    await asked[0]?.answer(page(jobs(4, 3), "a"));
    expect([ids(), search.more.value]).toEqual([["job-4", "job-3"], true]);
    void search.loadMore();
    await asked[1]?.answer(page(jobs(3, 2)));
    expect([ids(), search.more.value, asked[1]?.token]).toEqual([["job-4", "job-3", "job-2"], false, "a"]);
  });

  test("drops the answer to what is not asked for any more", async () => {
    const { search, asked, ids } = searching();
    search.want(wish());
    await vi.advanceTimersByTimeAsync(0);
    search.want(wish({ sort: "name" }));
    await vi.advanceTimersByTimeAsync(0);
    await asked[1]?.answer(page(jobs(1)));
    await asked[0]?.answer(page(jobs(2)));
    expect([ids(), search.loading.value]).toEqual([["job-1"], false]);
  });

  test("says what failed, keeps what it has, and tries again", async () => {
    const { search, asked, ids } = searching();
    search.want(wish());
    await vi.advanceTimersByTimeAsync(0);
    await asked[0]?.answer(page(jobs(2), "a"));
    void search.loadMore();
    await asked[1]?.answer(new ApiError(0, "no answer"));
    expect([ids(), search.error.value?.message, search.loading.value]).toEqual([["job-2"], "no answer", false]);
    void search.loadMore();
    await asked[2]?.answer(page(jobs(1)));
    expect([ids(), search.error.value, asked[2]?.token]).toEqual([["job-2", "job-1"], null, "a"]);
  });

  test("counts all jobs by tab", async () => {
    const states = { FAILED: 3, RUNNING: 2, STARTING: 1, QUEUED: 4, CANCELLED: 5, SUCCEEDED: 6 };
    const { search } = searching({ states, total: 21 });
    search.want(wish());
    await vi.advanceTimersByTimeAsync(0);
    expect(search.counts.value).toEqual({ all: 21, running: 3, failed: 3, waiting: 4, done: 11 });
  });
});

test("every state of a tab is of that tab", () => {
  for (const [tab, states] of Object.entries(STATES_OF)) {
    for (const state of states) expect(tabOfState(state)).toBe(tab);
  }
});

describe("what is listed", () => {
  const ids = (some: readonly Job[]) => some.map((one) => one.id);

  test("is what was found, as it is by now, without what left the tab", () => {
    const found = [job(3, { state: "FAILED" }), job(1, { state: "FAILED", name: "old" })];
    const live = [job(3, { state: "RUNNING" }), job(9)];
    expect(ids(listed(live, found, wish({ state: "failed" }), false))).toEqual(["job-1"]);
  });

  test("has live jobs before the last one found, and none behind it", () => {
    const found = jobs(30, 20);
    const live = jobs(40, 25, 10);
    expect(ids(listed(live, found, wish(), true))).toEqual(["job-40", "job-30", "job-25", "job-20"]);
    expect(ids(listed(live, found, wish(), false)).at(-1)).toBe("job-10");
  });

  test("orders names by their characters, as the server does", () => {
    const found = ["a_b", "a-b", "a1", "ab", "a"].map((name, n) => job(n, { name }));
    expect(listed([], found, wish({ sort: "name" }), false).map((one) => one.name)).toEqual([
      "a",
      "a-b",
      "a1",
      "a_b",
      "ab",
    ]);
  });
});

describe("selected jobs", () => {
  test("are in the address, each once and as many as can be compared", () => {
    expect(pickedOf(new URLSearchParams("pick=a,b,a,"))).toEqual(["a", "b"]);
    const many = Array.from({ length: MOST_PICKED }, (_, n) => `j${n}`);
    expect(toggled(many, "one more")?.split(",")).toEqual(many);
    expect(toggled(["a", "b"], "a")).toBe("b");
    expect(toggled(["a"], "a")).toBeNull();
  });

  test("are compared in the charts of the first", () => {
    expect(comparisonHref(["a", "b", "c"])).toBe("/jobs/a?tab=metrics&with=b,c");
  });
});
