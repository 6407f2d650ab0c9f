/** What the page does when the server does not answer as hoped. */
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { ApiError } from "../src/api";
import { stream } from "../src/socket";
import { GraphLoader } from "../src/store/graphs";
import { JobStore } from "../src/store/job";
import type { GraphDocument, ServerMessage } from "../src/types";

const DOCUMENT = { version: 1, ops: [] } as unknown as GraphDocument;

/** A loader whose fetches fail with these statuses one after the other, and then succeed. */
function loader(...failures: number[]) {
  const loaded: string[] = [];
  let asked = 0;
  const graphs = new GraphLoader(
    async () => {
      const status = failures[asked++];
      if (status !== undefined) throw new ApiError(status, `answered ${status}`);
      return DOCUMENT;
    },
    (hash) => loaded.push(hash),
  );
  return { graphs, loaded, asked: () => asked };
}

beforeEach(() => void vi.useFakeTimers());
afterEach(() => void vi.useRealTimers());

describe("graph documents", () => {
  test("a failure is shown and tried again, ever more rarely, until the document is there", async () => {
    const { graphs, loaded, asked } = loader(500, 0, 503);
    graphs.load("h");
    await vi.advanceTimersByTimeAsync(0);
    expect(graphs.failures.value.get("h")?.message).toBe("answered 500");
    await vi.advanceTimersByTimeAsync(2999);
    expect(asked()).toBe(2);
    await vi.advanceTimersByTimeAsync(4001);
    expect([asked(), loaded]).toEqual([4, ["h"]]);
    expect(graphs.failures.value.size).toBe(0);
  });

  test("a document that is a moment behind its name is no failure yet", async () => {
    const { graphs, loaded } = loader(404);
    graphs.load("h");
    await vi.advanceTimersByTimeAsync(999);
    expect(graphs.failures.value.size).toBe(0);
    await vi.advanceTimersByTimeAsync(1);
    expect(loaded).toEqual(["h"]);
  });

  test("a retry by hand asks at once, and not once more when the pause is over", async () => {
    const { graphs, loaded, asked } = loader(500);
    graphs.load("h");
    await vi.advanceTimersByTimeAsync(0);
    graphs.load("h");
    await vi.advanceTimersByTimeAsync(60_000);
    expect([asked(), loaded]).toEqual([2, ["h"]]);
  });

  test("a failure stays in its place while a retry by hand is under way", async () => {
    const { graphs } = loader(500, 502);
    const seen: (string | undefined)[] = [];
    graphs.load("h");
    await vi.advanceTimersByTimeAsync(0);
    const release = graphs.failures.subscribe((failures) => void seen.push(failures.get("h")?.message));
    graphs.load("h");
    await vi.advanceTimersByTimeAsync(0);
    release();
    expect(seen).toEqual(["answered 500", "answered 502"]);
  });

  test("a retry by hand while one is under way leaves one series of retries", async () => {
    const answers: ((error: ApiError) => void)[] = [];
    const ask = () => new Promise<GraphDocument>((_, reject) => answers.push(reject));
    const graphs = new GraphLoader(ask, () => undefined);
    graphs.load("h");
    graphs.load("h");
    graphs.load("h");
    for (const fail of answers) fail(new ApiError(500, "answered 500"));
    await vi.advanceTimersByTimeAsync(1999);
    expect(answers).toHaveLength(4);
    graphs.dispose();
  });

  test("what is refused waits for the person, and a page that was left asks no more", async () => {
    const refused = loader(403);
    refused.graphs.load("h");
    const left = loader(500);
    left.graphs.load("h");
    await vi.advanceTimersByTimeAsync(0);
    left.graphs.dispose();
    await vi.advanceTimersByTimeAsync(60_000);
    expect([refused.asked(), left.asked()]).toEqual([1, 1]);
  });
});

test("the page says that it was slowed down only as long as it is", () => {
  vi.stubGlobal("fetch", () => new Promise(() => undefined));
  let say: (message: ServerMessage) => void = () => undefined;
  vi.spyOn(stream, "subscribe").mockImplementation((subscription) => {
    say = subscription.onMessage;
    return () => undefined;
  });
  const store = new JobStore("j");
  say({ type: "degraded", id: 1, reason: "this browser is behind" });
  expect(store.degraded.value).toBe("this browser is behind");
  say({ type: "degraded", id: 1, reason: null });
  expect(store.degraded.value).toBeNull();
});
