import { describe, expect, test } from "vitest";
import type { Frame } from "../src/codec";
import { Kind } from "../src/constants";
import { TableStore } from "../src/store/tables";
import type { Job, Replica } from "../src/types";

const server = (index: number, stream: number): Replica => ({ role: "pserver", index, stream }) as unknown as Replica;
const job = (...replicas: Replica[]): Job => ({ replicas }) as unknown as Job;

interface Given {
  readonly rows: number;
  readonly pushed: number;
  readonly pulled?: number;
  readonly hot?: readonly (readonly [string, number])[];
}

function frame(stream: number, atS: number, { rows, pushed, pulled = 0, hot = [] }: Given, name = "emb"): Frame {
  const sums = { width: 8, capacity: 1000, rows, held_bytes: 64 * rows, pulled, absent: pulled / 4, pushed };
  const tables = [{ name, ...sums, sampled: 100, missed: 0, hot }];
  const body = { peers: [], blocks: [], rows: [], tables };
  return { kind: Kind.EXCHANGE, stream, t0Ns: BigInt(atS * 1e9), body, columns: new Map() } as unknown as Frame;
}

describe("sparse tables", () => {
  test("are the sum of their servers' parts, with the rates of the last ten seconds", () => {
    const store = new TableStore();
    for (let s = 0; s <= 30; s++) store.ingest(frame(8, s, { rows: 100, pushed: 100 * s, pulled: 400 }), 0);
    store.ingest(frame(9, 30, { rows: 300, pushed: 1000 }), 0);
    const [row] = store.rows(job(server(0, 8), server(1, 9)), false, 0);
    expect(row).toMatchObject({ name: "emb", rows: 400, bytes: 25_600, capacity: 2000, found: 0.75 });
    expect(row).toMatchObject({ pushedPerS: 100, skewRows: 1.5, skewPushes: 1.5 });
    expect(row?.parts.map((part) => [part.pserver, part.rows])).toEqual([
      [0, 100],
      [1, 300],
    ]);
  });

  test("have smaller rates the longer nothing is reported, and none when the job is over", () => {
    const store = new TableStore();
    for (let s = 0; s <= 30; s++) store.ingest(frame(8, s, { rows: 100, pushed: 100 * s }), 1000 * s);
    const at = (over: boolean, nowMs: number) => store.rows(job(server(0, 8)), over, nowMs)[0]?.pushedPerS;
    expect([at(false, 30_000), at(false, 36_500), at(false, 60_000)]).toEqual([100, 50, 0]);
    expect(at(true, 60_000)).toBeNull();
  });

  test("name the ids pushed most by their shares of all pushes", () => {
    const store = new TableStore();
    store.ingest(frame(8, 1, { rows: 1, pushed: 300, hot: [["9223372036854775807", 20]] }), 0);
    store.ingest(frame(9, 1, { rows: 1, pushed: 900, hot: [["-3", 30]] }), 0);
    const [row] = store.rows(job(server(0, 8), server(1, 9)), false, 0);
    expect(row?.hot.map((one) => [one.id, one.pserver])).toEqual([
      ["-3", 1],
      ["9223372036854775807", 0],
    ]);
    expect(row?.hot[0]?.share).toBeCloseTo(0.225);
    expect(row?.hot[1]?.share).toBeCloseTo(0.05);
    expect(row?.pushedPerS).toBeNull();
  });

  test("of a server that was restarted are those of the newer process", () => {
    const store = new TableStore();
    store.ingest(frame(8, 1, { rows: 50, pushed: 0 }), 0);
    store.ingest(frame(12, 2, { rows: 7, pushed: 0 }), 0);
    expect(store.rows(job(server(0, 8), server(0, 12)), false, 0).map((row) => row.rows)).toEqual([7]);
  });

  test("that are malformed, or of no server, are left out", () => {
    const store = new TableStore();
    const bad = frame(8, 1, { rows: 5, pushed: 0 });
    Object.assign((bad.body as { tables: object[] }).tables[0] ?? {}, { rows: "5" });
    store.ingest(bad, 0);
    store.ingest({ ...frame(8, 1, { rows: 5, pushed: 0 }), body: { peers: [] } }, 0);
    expect(store.rows(job(server(0, 8)), false, 0)).toEqual([]);
    store.ingest(frame(8, 1, { rows: 5, pushed: 0 }), 0);
    expect(store.rows(job(), false, 0)).toEqual([]);
  });
});
