"""Telemetry frames: a 48-byte little-endian header, column descriptors, 8-byte-aligned columns.

    offset  type  field
    0       u16   magic 0x5350 (bytes "PS")
    2       u8    version (1)
    3       u8    kind (`Kind`)
    4       u8    flags (bit 0: the step of this frame was sampled whole; bit 2: the JSON is deflated, GRAPH only)
    5       u8    number of columns
    6       u16   zero
    8       u32   stream (given by the server; stands for one replica)
    12      u32   epoch (fencing number of the attempt)
    16      u64   seq (from 0, one more for each frame of a stream)
    24      i64   t0_ns (Unix time, nanoseconds; columns named *_start_ns count from it)
    32      u64   step (training step of the frame, 0 if none)
    40      u32   count (rows)
    44      u32   body_bytes (descriptors and columns together)
    48      n x { u8 dtype, u8 column id, u16 zero, u32 bytes }, then the columns, each padded to 8 bytes

A kind has either one JSON column, which holds one JSON object in UTF-8 without NaN or Infinity, or exactly the
columns of `COLUMNS`, in any order. Truncated, oversized, self-contradicting or foreign bytes raise `PeerError` and
nothing else: a decoder never trusts a peer. JSON frames have count 1. A graph document above `DEFLATE_FROM_BYTES` is
deflated (zlib), since 20,000 operators are some 8 MB of JSON, and one twentieth of that deflated; a decoder inflates at
most `MAX_DOCUMENT_BYTES`.
The same layout is read in TypeScript (`web/src/codec.ts`); `tests/golden/frames/` holds both to it.
On a Unix socket every frame is preceded by its length as u32; on a websocket one message is one frame.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PeerError

MAGIC = 0x5350
VERSION = 1
HEADER = struct.Struct("<HBBBBHIIQqQII")
DESCRIPTOR = struct.Struct("<BBHI")
HEADER_BYTES = HEADER.size
MAX_FRAME_BYTES = 4 << 20
SPOOLED = struct.Struct("<Q")  # from an agent to a process: the seq of the newest frame that it has on disk
FLAG_WHOLE_STEP = 1
FLAG_IN_FULL = 2  # of a whole step that was sent as every step was for a while, not as a sample
FLAG_DEFLATED = 4
DEFLATE_FROM_BYTES = 1 << 20
MAX_DOCUMENT_BYTES = 64 << 20


class Kind(IntEnum):
    """What a frame holds. In brackets: its columns (see `Column`), or the keys of its JSON."""

    HELLO = 1  # JSON {role, index, host, pid, endpoint?, program?, version}
    GRAPH = 2  # JSON: a graph document (`graphdoc`); sent once for each hash
    OP_EVENTS = 3  # [START_NS, DURATION_NS, OP, THREAD] all events of one sampled step, ~12 bytes each
    OP_SUMS = 4  # [OP, COUNT, TOTAL_NS, MAX_NS] since the previous frame of this kind
    METRICS = 5  # [STEP, TIME_NS, LOSS, SAMPLES, STEP_NS, SYNC_BYTES, SYNC_NS] one row a reported step
    SYNC = 6  # [PARAM, COUNT, BYTES, TOTAL_NS, WAIT_NS] since the previous frame of this kind
    GAP = 7  # JSON {kind name: dropped rows}, e.g. {"OP_EVENTS": 4096}
    PROGRESS = 8  # JSON {done, total, unit}
    SCALARS = 9  # JSON {step, time_ns, values: {name: number|null}, media?: {name: `media`}} of penstock.log
    GOODBYE = 10  # JSON {failed, error} the process closed its telemetry on purpose
    LOG = 11  # [TEXT] raw bytes of a log; step = byte offset in the file, flags bit 1 = stderr
    GRAPH_USED = 12  # JSON {hash, `Threads`?}: the following OP_* and SYNC frames index this graph's operators
    EXCHANGE = 13  # JSON {peers, blocks, rows, cpu_ns?, mode?, tables?}: sums of the exchange with servers
    INPUT_EVENTS = 14  # [START_NS, DURATION_NS, WORK, THREAD] work beside operators: of the data feed, of a pserver


class Work(IntEnum):
    """The WORK column: what the data feed did around sampled steps, or a parameter server for its trainers."""

    READ = 0  # reads and parses, or the script's generator makes, a batch
    BATCH = 1  # makes the tensors of a batch that is there
    WAIT = 2  # a thread that trains waits for a batch
    RECEIVE = 3  # a trainer's request, from its first byte until it is decoded
    ROUND = 4  # a trainer's step waits for those of others, and for the update
    MERGE = 5
    LOG = 6  # writes a record of the write-ahead log
    UPDATE = 7
    LOOK_UP = 8  # gathers rows of a block
    ANSWER = 9  # copies what was asked for, and sends it


FIRST_READER = 1 << 15
"""THREAD of the first reader in INPUT_EVENTS; below it are the threads that train."""

FIRST_BLOCK = 1 << 15
"""THREAD of a pserver's first block in INPUT_EVENTS, whose name EXCHANGE has; below it are trainers and ROUNDS_LANE."""

ROUNDS_LANE = FIRST_BLOCK - 1
"""THREAD of what a pserver does for all trainers at once."""


class Column(IntEnum):
    """Column ids; the unit is in the name, the dtype is fixed by `COLUMN_DTYPE`."""

    JSON = 0
    START_NS = 1
    DURATION_NS = 2
    OP = 3
    THREAD = 4
    COUNT = 5
    TOTAL_NS = 6
    MAX_NS = 7
    STEP = 8
    TIME_NS = 9
    LOSS = 10
    SAMPLES = 11
    STEP_NS = 12
    SYNC_BYTES = 13
    SYNC_NS = 14
    PARAM = 15
    BYTES = 16
    WAIT_NS = 17
    TEXT = 18
    WORK = 19


COLUMNS: dict[Kind, frozenset[Column]] = {
    Kind.OP_EVENTS: frozenset({Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD}),
    Kind.OP_SUMS: frozenset({Column.OP, Column.COUNT, Column.TOTAL_NS, Column.MAX_NS}),
    Kind.METRICS: frozenset(
        {Column.STEP, Column.TIME_NS, Column.LOSS, Column.SAMPLES, Column.STEP_NS, Column.SYNC_BYTES, Column.SYNC_NS}
    ),
    Kind.SYNC: frozenset({Column.PARAM, Column.COUNT, Column.BYTES, Column.TOTAL_NS, Column.WAIT_NS}),
    Kind.LOG: frozenset({Column.TEXT}),
    Kind.INPUT_EVENTS: frozenset({Column.START_NS, Column.DURATION_NS, Column.WORK, Column.THREAD}),
}
"""Columns of each kind; a kind that is not here is a JSON frame."""

_JSON_ONLY = frozenset({Column.JSON})
_KINDS = {int(kind): kind for kind in Kind}
_CODES: dict[int, str] = {1: "<u1", 2: "<u2", 3: "<u4", 4: "<u8", 5: "<i8", 6: "<f4", 7: "<f8"}
CODE_OF = {np.dtype(text): code for code, text in _CODES.items()}

COLUMN_DTYPE: dict[Column, np.dtype[Any]] = {
    Column.JSON: np.dtype("<u1"),
    Column.START_NS: np.dtype("<u4"),
    Column.DURATION_NS: np.dtype("<u4"),
    Column.OP: np.dtype("<u2"),
    Column.THREAD: np.dtype("<u2"),
    Column.COUNT: np.dtype("<u4"),
    Column.TOTAL_NS: np.dtype("<u8"),
    Column.MAX_NS: np.dtype("<u4"),
    Column.STEP: np.dtype("<u8"),
    Column.TIME_NS: np.dtype("<i8"),
    Column.LOSS: np.dtype("<f8"),
    Column.SAMPLES: np.dtype("<u4"),
    Column.STEP_NS: np.dtype("<u8"),
    Column.SYNC_BYTES: np.dtype("<u8"),
    Column.SYNC_NS: np.dtype("<u8"),
    Column.PARAM: np.dtype("<u2"),
    Column.BYTES: np.dtype("<u8"),
    Column.WAIT_NS: np.dtype("<u8"),
    Column.TEXT: np.dtype("<u1"),
    Column.WORK: np.dtype("<u1"),
}

Array = npt.NDArray[Any]


_DTYPES = {code: np.dtype(text) for code, text in _CODES.items()}
_COLUMNS_BY_ID = {int(column): column for column in Column}


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. `columns` of a JSON frame is empty and `body` holds its object."""

    kind: Kind
    stream: int
    epoch: int
    seq: int
    t0_ns: int = 0
    step: int = 0
    flags: int = 0
    columns: Mapping[Column, Array] = field(default_factory=dict)
    body: Any = None

    @property
    def count(self) -> int:
        """Rows of the columns; 1 for a JSON frame."""
        return 1 if not self.columns else len(next(iter(self.columns.values())))


@dataclass(frozen=True, slots=True)
class Header:
    """The 48 bytes that a forwarder reads; it decodes nothing else."""

    kind: Kind
    flags: int
    num_columns: int
    stream: int
    epoch: int
    seq: int
    t0_ns: int
    step: int
    count: int
    body_bytes: int


def encode(frame: Frame) -> bytes:
    """Encode one frame.

    Raises: ValueError if the columns are not those of the kind or differ in length, a header field does not fit its
    type, the flags of a graph's body have FLAG_DEFLATED (which is set here), the JSON holds NaN or Infinity, or the
    frame is too large. Column values are cast, not checked.
    """
    columns: dict[Column, Array] = dict(frame.columns)
    if not columns:
        if frame.kind is Kind.GRAPH and frame.flags & FLAG_DEFLATED:
            raise ValueError(f"flags of a GRAPH frame are {frame.flags:#x}: FLAG_DEFLATED is set by encode alone")
        text, added = _deflated(frame.kind, _json_text(frame.body))
        columns, frame = {Column.JSON: np.frombuffer(text, np.uint8)}, replace(frame, flags=frame.flags | added)
    if columns.keys() != COLUMNS.get(frame.kind, _JSON_ONLY):
        raise ValueError(f"a {frame.kind.name} frame does not hold the columns {[Column(c).name for c in columns]}")
    arrays = {c: np.ascontiguousarray(v, dtype=COLUMN_DTYPE[c]) for c, v in columns.items()}
    count = frame.count
    if frame.columns and any(len(v) != count for v in arrays.values()):
        raise ValueError(f"columns of one frame differ in length: { {c.name: len(v) for c, v in arrays.items()} }")
    parts = [DESCRIPTOR.pack(CODE_OF[v.dtype], c, 0, v.nbytes) for c, v in arrays.items()]
    for value in arrays.values():
        parts.append(value.tobytes())
        parts.append(b"\0" * (-value.nbytes % 8))
    body = b"".join(parts)
    if HEADER_BYTES + len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {HEADER_BYTES + len(body)} bytes is larger than {MAX_FRAME_BYTES}")
    return _header_bytes(frame, len(arrays), count, len(body)) + body


def decode_header(data: bytes | memoryview) -> Header:
    """Read the header alone, and check that exactly one whole frame is there. Raises PeerError."""
    if len(data) < HEADER_BYTES:
        raise PeerError(f"frame has {len(data)} bytes; a header alone has {HEADER_BYTES}")
    magic, version, kind, flags, ncol, zero, stream, epoch, seq, t0, step, count, body = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or zero != 0:
        raise PeerError(f"not a Penstock frame of version {VERSION}: magic {magic:#06x}, version {version}, pad {zero}")
    if kind not in _KINDS:
        raise PeerError(f"frame kind {kind} is unknown")
    if len(data) != HEADER_BYTES + body or len(data) > MAX_FRAME_BYTES:
        raise PeerError(f"frame has {len(data)} bytes (limit {MAX_FRAME_BYTES}); its header says {HEADER_BYTES + body}")
    return Header(_KINDS[kind], flags, ncol, stream, epoch, seq, t0, step, count, body)


def decode(data: bytes | memoryview) -> Frame:
    """Decode one frame; columns are read-only views of `data` if that is bytes. Raises PeerError."""
    head = decode_header(data)
    view = memoryview(data)
    at = HEADER_BYTES + DESCRIPTOR.size * head.num_columns
    if at > len(view):
        raise PeerError(f"frame of {len(view)} bytes ends inside the descriptors of {head.num_columns} columns")
    columns: dict[Column, Array] = {}
    for i in range(head.num_columns):
        code, column_id, zero, nbytes = DESCRIPTOR.unpack_from(view, HEADER_BYTES + DESCRIPTOR.size * i)
        column = _column(column_id, code, zero)
        if column in columns:
            raise PeerError(f"column {column.name} is there twice")
        columns[column] = _read(view, at, nbytes, COLUMN_DTYPE[column])
        at += nbytes + (-nbytes % 8)
    if at != len(view):
        raise PeerError(f"columns end at byte {at} of {len(view)}")
    return _frame(head, columns)


def _json_text(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


def _deflated(kind: Kind, text: bytes) -> tuple[bytes, int]:
    """Return what a JSON column holds, and the flag that says how."""
    if kind is not Kind.GRAPH or not DEFLATE_FROM_BYTES < len(text) <= MAX_DOCUMENT_BYTES:
        return text, 0
    return zlib.compress(text, 1), FLAG_DEFLATED


def _inflated(head: Header, text: bytes) -> bytes:
    """Inflate a JSON column, at most `MAX_DOCUMENT_BYTES` of it. Raises PeerError."""
    inflater = zlib.decompressobj()
    what = f"a {head.kind.name} frame of {len(text)} bytes"
    try:
        content = inflater.decompress(text, MAX_DOCUMENT_BYTES)
    except zlib.error as error:
        raise PeerError(f"{what} is not deflated, as it says: {error}") from error
    if not inflater.eof or inflater.unused_data:
        raise PeerError(f"{what} does not end with its document, or that has over {MAX_DOCUMENT_BYTES} bytes")
    return content


def _header_bytes(frame: Frame, num_columns: int, count: int, body_bytes: int) -> bytes:
    try:
        return HEADER.pack(
            MAGIC, VERSION, frame.kind, frame.flags, num_columns, 0, frame.stream, frame.epoch,
            frame.seq, frame.t0_ns, frame.step, count, body_bytes,
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a header field of a {frame.kind.name} frame does not fit: {error}") from error


def _column(column: int, code: int, zero: int) -> Column:
    if column not in _COLUMNS_BY_ID or code not in _DTYPES or zero != 0:
        raise PeerError(f"column {column} of dtype code {code} (pad {zero}) is unknown")
    found = _COLUMNS_BY_ID[column]
    if _DTYPES[code] != COLUMN_DTYPE[found]:
        raise PeerError(f"column {found.name} has dtype {_CODES[code]}, expected {COLUMN_DTYPE[found].str}")
    return found


def _read(view: memoryview, at: int, nbytes: int, dtype: np.dtype[Any]) -> Array:
    if at + nbytes > len(view) or nbytes % dtype.itemsize:
        raise PeerError(f"a column of {nbytes} bytes at {at} does not fit a frame of {len(view)}")
    return np.frombuffer(view, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)


def _frame(head: Header, columns: dict[Column, Array]) -> Frame:
    if columns.keys() != COLUMNS.get(head.kind, _JSON_ONLY):
        raise PeerError(f"a {head.kind.name} frame does not hold the columns {[c.name for c in columns]}")
    body, flags = None, head.flags
    if Column.JSON in columns:
        text = columns.pop(Column.JSON).tobytes()
        if head.kind is Kind.GRAPH and flags & FLAG_DEFLATED:
            text, flags = _inflated(head, text), flags & ~FLAG_DEFLATED
        body = _json_object(head, text)
    elif any(len(v) != head.count for v in columns.values()):
        raise PeerError(f"header promises {head.count} rows; { {c.name: len(v) for c, v in columns.items()} }")
    return Frame(head.kind, head.stream, head.epoch, head.seq, head.t0_ns, head.step, flags, columns, body)


def _json_object(head: Header, text: bytes) -> dict[str, Any]:
    if head.count != 1:
        raise PeerError(f"header of a JSON frame promises {head.count} rows, expected 1")
    try:
        # Not json.loads(bytes): that guesses UTF-16 and UTF-32, which no browser would.
        body = json.loads(text.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"a {head.kind.name} frame holds no JSON: {error}") from error
    if not isinstance(body, dict):
        raise PeerError(f"a {head.kind.name} frame holds a JSON {type(body).__name__}, expected an object")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
