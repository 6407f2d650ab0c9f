import { describe, expect, it } from "vitest";
import type { Frame } from "../src/codec";
import { Kind } from "../src/constants";
import { cellKey, ExchangeStore } from "../src/store/exchange";
import type { Job, Replica } from "../src/types";

const A = "127.0.0.1:6174";
const B = "127.0.0.1:6175";
const START = Date.parse("2026-01-01T00:00:00Z");

function replica(role: "trainer" | "pserver", index: number, stream: number, endpoint: string | null = null): Replica {
  return { role, index, stream, endpoint, started_at: "2026-01-01T00:00:00Z" } as unknown as Replica;
}

function job(...replicas: Replica[]): Job {
  return { created_at: "2026-01-01T00:00:00Z", replicas } as unknown as Job;
}

const TRAINER = replica("trainer", 0, 1);
const SERVERS = [replica("pserver", 0, 8, A), replica("pserver", 1, 9, B)];

function frame(stream: number, atS: number, step: number, body: unknown): Frame {
  const t0Ns = BigInt(START + atS * 1000) * 1_000_000n;
  return { kind: Kind.EXCHANGE, stream, t0Ns, step, columns: new Map(), body } as unknown as Frame;
}

/** One block "w" at server B: calls, sent, received, wait, retries, staleness, merges. */
const body = (...sums: number[]) => ({ peers: [A, B], blocks: ["w"], rows: [[1, 0, ...sums]] });

describe("rates", () => {
  it("shows rates of the window while the job runs", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 1, 10, body(10, 1000, 500, 10e6, 0, 5, 0)), 0);
    store.ingest(frame(1, 3, 30, body(50, 5000, 2500, 50e6, 0, 45, 0)), 0);
    const view = store.view(job(TRAINER, ...SERVERS), false, 0);
    const cell = view?.cells.get(cellKey(0, 1));
    expect(cell).toMatchObject({ trainer: 0, pserver: 1, bytesPerS: 3000, sentPerS: 2000, waitNs: 2e6, staleness: 2 });
    expect(view?.cells.has(cellKey(0, 0))).toBe(false);
    expect(view).toMatchObject({ perStep: true, whole: false, trainers: [0] });
    expect(view?.pservers.map((one) => one.endpoint)).toEqual([A, B]);
  });

  it("is stale by push, of which GEO and queues that merge make fewer than steps", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 1, 10, body(10, 1000, 500, 10e6, 0, 5, 0)), 0);
    store.ingest(frame(1, 3, 30, body(18, 5000, 2500, 50e6, 0, 13, 0)), 0);
    const [row] = store.view(job(TRAINER, ...SERVERS), false, 0)?.blocks ?? [];
    expect(row).toMatchObject({ block: "w", pushes: 4, staleness: 2 });
  });

  it("falls to nothing when nothing comes any more", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 1, 10, body(10, 1000, 500, 10e6, 0, 0, 0)), 0);
    store.ingest(frame(1, 2, 20, body(20, 9000, 500, 20e6, 0, 0, 0)), 0);
    const rate = (nowMs: number) =>
      store.view(job(TRAINER, ...SERVERS), false, nowMs)?.cells.get(cellKey(0, 1))?.bytesPerS;
    expect(rate(0)).toBe(8000);
    expect(rate(6500)).toBeCloseTo(8000 / 6);
    expect(rate(60_000)).toBe(0);
  });

  it("shows the whole run of a job that is over", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 10, 100, body(100, 20_000, 0, 400e6, 3, 0, 7)), 0);
    const cell = store.view(job(TRAINER, ...SERVERS), true, 1e9)?.cells.get(cellKey(0, 1));
    expect(cell).toMatchObject({ bytesPerS: 2000, waitNs: 4e6, retries: 3, merges: 7 });
  });
});

describe("waits of a trainer that counts no steps", () => {
  it("are of each exchange: sending and fetching are one", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 10, 0, body(200, 20_000, 20_000, 400e6, 0, 300, 0)), 0);
    const view = store.view(job(TRAINER, ...SERVERS), true, 0);
    expect(view?.perStep).toBe(false);
    expect(view?.cells.get(cellKey(0, 1))).toMatchObject({ waitNs: 4e6, staleness: 3 });
  });
});

describe("what is joined", () => {
  it("takes staleness from whoever counted more, and merges there from the server", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 10, 100, body(100, 20_000, 0, 0, 0, 50, 0)), 0);
    const server = {
      peers: ["trainer 0", "nobody"],
      blocks: ["w"],
      rows: [
        [0, 0, 9, 0, 0, 0, 0, 200, 6],
        [1, 0, 1, 1, 1, 1, 1, 1, 1],
      ],
    };
    store.ingest(frame(9, 10, 0, server), 0);
    const view = store.view(job(TRAINER, ...SERVERS), true, 0);
    expect(view?.cells.get(cellKey(0, 1))).toMatchObject({ staleness: 2, joined: 6, calls: 100 });
    expect(view?.cells.size).toBe(1);
  });
});

describe("processes that were started again", () => {
  it("counts a trainer that was started again from its newest process while the job runs, from all when it is over", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 10, 100, body(100, 20_000, 0, 300e6, 0, 0, 0)), 0);
    store.ingest(frame(7, 10, 50, body(50, 4_000, 0, 150e6, 0, 0, 0)), 0);
    const both = job(TRAINER, ...SERVERS, replica("trainer", 0, 7));
    expect(store.view(both, false, 0)?.cells.get(cellKey(0, 1))?.calls).toBe(50);
    expect(store.view(both, true, 0)?.cells.get(cellKey(0, 1))).toMatchObject({
      calls: 150,
      bytesPerS: 1200, // 24 000 bytes in twice ten seconds
      waitNs: 3e6,
    });
  });

  it("adds up what both processes of a server that was started again joined", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 10, 100, body(100, 20_000, 0, 0, 0, 0, 0)), 0);
    const joined = (count: number) => ({
      peers: ["trainer 0"],
      blocks: ["w"],
      rows: [[0, 0, 9, 0, 0, 0, 0, 0, count]],
    });
    store.ingest(frame(9, 5, 0, joined(40)), 0);
    store.ingest(frame(12, 10, 0, joined(60)), 0);
    const view = store.view(job(TRAINER, ...SERVERS, replica("pserver", 1, 12, B)), true, 0);
    expect(view?.cells.get(cellKey(0, 1))).toMatchObject({ calls: 100, joined: 100, bytesPerS: 2000 });
  });
});

describe("what is told of trainers", () => {
  it("sets a trainer's wait for all servers beside its step", () => {
    const store = new ExchangeStore();
    const two = {
      peers: [A, B],
      blocks: ["v", "w"],
      rows: [
        [0, 0, 100, 9, 0, 200e6, 0, 0, 0],
        [1, 1, 100, 9, 0, 500e6, 0, 0, 0],
      ],
    };
    store.ingest(frame(1, 10, 100, two), 0);
    const view = store.view(job(TRAINER, ...SERVERS), true, 0);
    expect(view?.times.get(0)).toEqual({ waitNs: 7e6, stepNs: 1e8 });
    store.ingest(frame(1, 11, 0, two), 0);
    expect(store.view(job(TRAINER, ...SERVERS), true, 0)?.times.get(0)?.stepNs).toBeNull();
  });
});

describe("blocks and servers", () => {
  it("puts what waits in the trainer into no cell, and names its block", () => {
    const store = new ExchangeStore();
    const own = {
      peers: [A, ""],
      blocks: ["w"],
      rows: [
        [0, 0, 1, 1, 0, 0, 0, 0, 0],
        [1, 0, 4, 0, 0, 9e6, 0, 0, 3],
      ],
    };
    store.ingest(frame(1, 10, 1, own), 0);
    const view = store.view(job(TRAINER, ...SERVERS), true, 0);
    expect([...(view?.cells.keys() ?? [])]).toEqual([cellKey(0, 0)]);
    expect(view?.blocks.find((one) => one.pserver === -1)).toMatchObject({ block: "w", merges: 3, waitNs: 9e6 });
    expect(view?.times.get(0)?.waitNs).toBe(9e6);
  });

  it("numbers servers by the trainer's order when nobody registered them", () => {
    const store = new ExchangeStore();
    store.ingest(frame(1, 10, 1, body(1, 1, 0, 0, 0, 0, 0)), 0);
    expect(store.view(job(TRAINER), true, 0)?.pservers).toEqual([
      { index: 0, endpoint: A },
      { index: 1, endpoint: B },
    ]);
  });

  it.each([
    {},
    { peers: [A], blocks: ["w"], rows: [[0, 0, 1]] },
    { peers: [A], blocks: ["w"], rows: [[3, 0, 1, 1, 1, 1, 1, 1, 1]] },
    { peers: [A], blocks: ["w"], rows: ["x"] },
  ])("skips a body that is none: %j", (wrong) => {
    const store = new ExchangeStore();
    expect(store.ingest(frame(1, 1, 1, wrong), 0)).toBe(false);
    expect(store.view(job(TRAINER, ...SERVERS), false, 0)).toBeNull();
  });
});
