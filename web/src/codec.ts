/**
 * Telemetry frames (core/penstock/protocol/frames.py) read as typed arrays, without copies.
 *
 * Both sides are held to the same vectors in tests/golden/frames/. A frame that is truncated, foreign or
 * inconsistent throws `FrameError`; the socket counts it and goes on, for one bad frame must not end a page.
 */

import { COLUMN_CODE, COLUMNS, Column, HEADER_BYTES, Kind, MAGIC, MAX_FRAME_BYTES, VERSION } from "./constants";

export type ColumnArray =
  | Uint8Array
  | Uint16Array
  | Uint32Array
  | BigUint64Array
  | BigInt64Array
  | Float32Array
  | Float64Array;

interface Dtype {
  readonly size: number;
  readonly make: (buffer: ArrayBuffer, at: number, length: number) => ColumnArray;
}

const DTYPES: Readonly<Record<number, Dtype>> = {
  1: { size: 1, make: (b, at, n) => new Uint8Array(b, at, n) },
  2: { size: 2, make: (b, at, n) => new Uint16Array(b, at, n) },
  3: { size: 4, make: (b, at, n) => new Uint32Array(b, at, n) },
  4: { size: 8, make: (b, at, n) => new BigUint64Array(b, at, n) },
  5: { size: 8, make: (b, at, n) => new BigInt64Array(b, at, n) },
  6: { size: 4, make: (b, at, n) => new Float32Array(b, at, n) },
  7: { size: 8, make: (b, at, n) => new Float64Array(b, at, n) },
};

const JSON_ONLY: readonly Column[] = [Column.JSON];

export class FrameError extends Error {
  override readonly name = "FrameError";
}

export interface Header {
  readonly kind: Kind;
  readonly flags: number;
  readonly numColumns: number;
  readonly stream: number;
  readonly epoch: number;
  readonly seq: bigint;
  readonly t0Ns: bigint;
  readonly step: number;
  readonly count: number;
  readonly bodyBytes: number;
}

export interface Frame extends Header {
  readonly columns: ReadonlyMap<Column, ColumnArray>;
  /** The object of a JSON frame; undefined for a columnar one. */
  readonly body: unknown;
}

const KINDS: ReadonlySet<number> = new Set(Object.values(Kind));
const isKind = (value: number): value is Kind => KINDS.has(value);

/** Read the header alone and check that exactly one whole frame is there. Throws FrameError. */
export function decodeHeader(buffer: ArrayBuffer): Header {
  const length = buffer.byteLength;
  if (length < HEADER_BYTES) throw new FrameError(`frame has ${length} bytes; a header alone has ${HEADER_BYTES}`);
  const view = new DataView(buffer, 0, HEADER_BYTES);
  const magic = view.getUint16(0, true);
  const version = view.getUint8(2);
  if (magic !== MAGIC || version !== VERSION || view.getUint16(6, true) !== 0) {
    throw new FrameError(
      `not a Penstock frame of version ${VERSION}: magic 0x${magic.toString(16)}, version ${version}`,
    );
  }
  const kind = view.getUint8(3);
  if (!isKind(kind)) throw new FrameError(`frame kind ${kind} is unknown`);
  const bodyBytes = view.getUint32(44, true);
  if (length !== HEADER_BYTES + bodyBytes || length > MAX_FRAME_BYTES) {
    throw new FrameError(`frame has ${length} bytes; its header promises ${HEADER_BYTES + bodyBytes}`);
  }
  return {
    kind,
    flags: view.getUint8(4),
    numColumns: view.getUint8(5),
    stream: view.getUint32(8, true),
    epoch: view.getUint32(12, true),
    seq: view.getBigUint64(16, true),
    t0Ns: view.getBigInt64(24, true),
    step: Number(view.getBigUint64(32, true)),
    count: view.getUint32(40, true),
    bodyBytes,
  };
}

/** Decode one frame; its columns are views of `buffer`. Throws FrameError. */
export function decodeFrame(buffer: ArrayBuffer): Frame {
  const head = decodeHeader(buffer);
  const length = buffer.byteLength;
  const columns = new Map<Column, ColumnArray>();
  let offset = HEADER_BYTES + 8 * head.numColumns;
  if (offset > length) throw new FrameError("frame ends inside its column descriptors");
  const view = new DataView(buffer);
  for (let i = 0; i < head.numColumns; i++) {
    const place = HEADER_BYTES + 8 * i;
    const column = view.getUint8(place + 1);
    const bytes = view.getUint32(place + 4, true);
    const dtype = dtypeOf(column, view.getUint8(place), view.getUint16(place + 2, true));
    if (columns.has(column as Column)) throw new FrameError(`column ${column} is there twice`);
    if (offset + bytes > length || bytes % dtype.size !== 0) {
      throw new FrameError(`a column of ${bytes} bytes at ${offset} does not fit a frame of ${length}`);
    }
    columns.set(column as Column, dtype.make(buffer, offset, bytes / dtype.size));
    offset += bytes + ((8 - (bytes % 8)) % 8);
  }
  if (offset !== length) throw new FrameError(`columns end at byte ${offset} of ${length}`);
  return finish(head, columns);
}

function dtypeOf(column: number, code: number, zero: number): Dtype {
  const dtype = DTYPES[code];
  const want = COLUMN_CODE[column];
  if (want === undefined || dtype === undefined || zero !== 0)
    throw new FrameError(`column ${column} of dtype code ${code} is unknown`);
  if (want !== code) throw new FrameError(`column ${column} has dtype code ${code}, expected ${want}`);
  return dtype;
}

function finish(head: Header, columns: Map<Column, ColumnArray>): Frame {
  const want = COLUMNS.get(head.kind) ?? JSON_ONLY;
  if (columns.size !== want.length || want.some((column) => !columns.has(column))) {
    throw new FrameError(`a frame of kind ${head.kind} does not hold the columns ${[...columns.keys()].join()}`);
  }
  const json = columns.get(Column.JSON);
  if (json !== undefined) return { ...head, columns: new Map(), body: jsonObject(head, json) };
  for (const array of columns.values()) {
    if (array.length !== head.count) throw new FrameError(`header promises ${head.count} rows, columns differ`);
  }
  return { ...head, columns, body: undefined };
}

function jsonObject(head: Header, column: ColumnArray): object {
  if (head.count !== 1) throw new FrameError(`header of a JSON frame promises ${head.count} rows, expected 1`);
  let body: unknown;
  try {
    body = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(column));
  } catch (cause) {
    throw new FrameError(`a frame of kind ${head.kind} holds no JSON`, { cause });
  }
  if (typeof body !== "object" || body === null || Array.isArray(body)) {
    throw new FrameError(`a frame of kind ${head.kind} holds JSON that is no object`);
  }
  return body;
}

/** A column of 16- or 32-bit unsigned integers, or an empty one when the frame lacks it. */
export function smallColumn(frame: Frame, column: Column): Uint16Array | Uint32Array {
  const array = frame.columns.get(column);
  return array instanceof Uint16Array || array instanceof Uint32Array ? array : new Uint32Array(0);
}

export const WORD = 2 ** 32;

/** A u64 column as its halves, the lower first: sums of 100 000 values a second make no bigint of each. */
export function wideWords(frame: Frame, column: Column): Uint32Array {
  const array = wideColumn(frame, column);
  return new Uint32Array(array.buffer, array.byteOffset, array.length * 2);
}

/** A u64 column. Values stay bigint: convert per element with Number(), exact below 2^53 (104 days of ns). */
export function wideColumn(frame: Frame, column: Column): BigUint64Array {
  const array = frame.columns.get(column);
  return array instanceof BigUint64Array ? array : new BigUint64Array(0);
}
