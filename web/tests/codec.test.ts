/** The codec against the vectors that the Python side made: both read the same bytes in the same way. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { describe, expect, test } from "vitest";
import { decodeFrame, FrameError } from "../src/codec";
import { Column, Kind } from "../src/constants";

const GOLDEN = join(import.meta.dirname, "../../tests/golden/frames");

interface Vector {
  readonly kind: keyof typeof Kind;
  readonly stream: number;
  readonly epoch: number;
  readonly seq: string;
  readonly step: string;
  readonly t0_ns: string;
  readonly flags: number;
  readonly count: number;
  readonly body: unknown;
  readonly columns: Readonly<Record<keyof typeof Column, { readonly values: readonly unknown[] }>>;
}

function bytesOf(path: string): ArrayBuffer {
  const file = readFileSync(path);
  return file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength) as ArrayBuffer;
}

const names = readdirSync(GOLDEN)
  .filter((name) => name.endsWith(".bin"))
  .map((name) => name.slice(0, -4));

describe("golden frames", () => {
  test.each(names)("%s decodes to what its description says", (name) => {
    const want = JSON.parse(readFileSync(join(GOLDEN, `${name}.json`), "utf8")) as Vector;
    const frame = decodeFrame(bytesOf(join(GOLDEN, `${name}.bin`)));
    expect(frame.kind).toBe(Kind[want.kind]);
    expect([frame.stream, frame.epoch, frame.flags, frame.count]).toEqual([
      want.stream,
      want.epoch,
      want.flags,
      want.count,
    ]);
    expect([frame.seq, frame.t0Ns, frame.step]).toEqual([BigInt(want.seq), BigInt(want.t0_ns), Number(want.step)]);
    if (frame.columns.size === 0) expect(frame.body).toEqual(want.body);
    for (const [column, { values }] of Object.entries(want.columns)) {
      const got = Array.from(frame.columns.get(Column[column as keyof typeof Column]) ?? [], String);
      expect(got).toEqual(values.map((value) => String(value)));
    }
    expect([...frame.columns.keys()].length).toBe(Object.keys(want.columns).length);
  });
});

describe("foreign bytes", () => {
  const refused = join(GOLDEN, "refused");
  test.each(readdirSync(refused).filter((name) => name.endsWith(".bin")))("%s is refused", (name) => {
    expect(() => decodeFrame(bytesOf(join(refused, name)))).toThrow(FrameError);
  });

  test("every truncation of a frame is refused", () => {
    const whole = bytesOf(join(GOLDEN, "op_events.bin"));
    for (let length = 0; length < whole.byteLength; length++) {
      expect(() => decodeFrame(whole.slice(0, length))).toThrow(FrameError);
    }
  });
});

test("columns are views of the message, not copies", () => {
  const buffer = bytesOf(join(GOLDEN, "op_events.bin"));
  expect(decodeFrame(buffer).columns.get(Column.OP)?.buffer).toBe(buffer);
});
