/** The badge's count of what was lost: what is reported counts, once; what the page cannot know does not. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { Frame } from "../src/codec";
import { Column, Kind } from "../src/constants";
import { stream } from "../src/socket";
import { JobStore } from "../src/store/job";
import { MAX_WAITING_ROWS } from "../src/store/ops";
import type { ServerMessage } from "../src/types";

const blank = { flags: 0, numColumns: 0, stream: 1, epoch: 1, t0Ns: 0n, step: 1, bodyBytes: 0 };
const sums = (seq: number): Frame => ({
  ...blank,
  kind: Kind.OP_SUMS,
  seq: BigInt(seq),
  count: 1,
  columns: new Map([[Column.OP, Uint16Array.of(0)]]),
  body: undefined,
});
const gap = (seq: number, dropped: object): Frame => ({
  ...blank,
  kind: Kind.GAP,
  seq: BigInt(seq),
  count: 1,
  columns: new Map(),
  body: dropped,
});

let say: (message: ServerMessage) => void;
let arrive: (...frames: Frame[]) => void;
let store: JobStore;

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("fetch", () => new Promise(() => undefined));
  vi.spyOn(stream, "subscribe").mockImplementation((subscription) => {
    say = subscription.onMessage;
    arrive = (...frames) => {
      for (const frame of frames) subscription.onFrame?.(frame);
    };
    return () => undefined;
  });
  store = new JobStore("j");
  say({ type: "graph", id: 1, replica_id: "r", stream: 1, hash: "h" });
});
afterEach(() => void vi.useRealTimers());

function dropped(): number {
  vi.advanceTimersByTime(1000);
  return store.droppedRows.value;
}

test("a hole in the numbers is no loss by itself: metrics and logs are numbered too and come as text", () => {
  arrive(sums(3), sums(7), sums(8));
  expect(dropped()).toBe(0);
});

test("what frames and server report as lost is added up, of whatever kind it was", () => {
  arrive(sums(3), gap(4, { OP_EVENTS: 40, SYNC: 2 }));
  say({ type: "gap", id: 1, dropped: { OP_EVENTS: 100, FRAMES: 5 } });
  expect(dropped()).toBe(147);
});

test("what the server sends once more after a reconnect counts once", () => {
  arrive(sums(3), gap(4, { OP_EVENTS: 40 }), sums(5));
  arrive(sums(3), gap(4, { OP_EVENTS: 40 }), sums(5), gap(9, { OP_EVENTS: 1 }));
  expect(dropped()).toBe(41);
});

test("a report that is no number does not spoil the count", () => {
  arrive(gap(4, { OP_EVENTS: "many", OP_SUMS: -3, SYNC: null, LOG: 2 }));
  expect(dropped()).toBe(2);
});

test("what comes before the document of its graph waits for it, up to a bound in rows", () => {
  for (let seq = 3; seq < 5003; seq++) arrive(sums(seq));
  expect(dropped()).toBe(0);
  const many = { ...sums(6000), count: MAX_WAITING_ROWS - 10 };
  arrive(many);
  expect(dropped()).toBe(4990);
});
