"""Telemetry frames: a 48-byte little-endian header, column descriptors, 8-byte-aligned columns.

    offset  type  field
    0       u16   magic 0x5350 (bytes "PS")
    2       u8    version (1)
    3       u8    kind (`Kind`)
    4       u8    flags (bit 0: the step of this frame was sampled whole)
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

A JSON frame has one column of dtype JSON. Truncated, oversized or foreign bytes raise `PeerError`.
The same layout is read in TypeScript (`web/src/codec.ts`); `tests/golden/frames/` holds both to it.
On a Unix socket every frame is preceded by its length as u32; on a websocket one message is one frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
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
FLAG_WHOLE_STEP = 1


class Kind(IntEnum):
    """What a frame holds. In brackets: its columns (see `Column`), or the keys of its JSON."""

    HELLO = 1  # JSON {role, index, host, pid, endpoint?, program?, version}
    GRAPH = 2  # JSON: a graph document (`graphdoc`); sent once for each hash
    OP_EVENTS = 3  # [START_NS, DURATION_NS, OP, THREAD] all events of one sampled step, ~12 bytes each
    OP_SUMS = 4  # [OP, COUNT, TOTAL_NS, MAX_NS] since the previous frame of this kind
    METRICS = 5  # [STEP, TIME_NS, LOSS, SAMPLES, STEP_NS, SYNC_BYTES, SYNC_NS] one row a reported step
    SYNC = 6  # [PARAM, COUNT, BYTES, TOTAL_NS, WAIT_NS] since the previous frame of this kind
    GAP = 7  # JSON {kind: dropped rows}
    PROGRESS = 8  # JSON {done, total, unit}
    SCALARS = 9  # JSON {step, time_ns, values: {name: number}} from penstock.telemetry.log
    GOODBYE = 10  # JSON {} the process closed its telemetry on purpose
    LOG = 11  # [TEXT] raw bytes of a log; step = byte offset in the file, flags bit 1 = stderr
    GRAPH_USED = 12  # JSON {hash}: the following OP_* and SYNC frames index this graph's operators


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


_CODES: dict[int, str] = {1: "<u1", 2: "<u2", 3: "<u4", 4: "<u8", 5: "<i8", 6: "<f4", 7: "<f8"}
_CODE_OF = {np.dtype(text): code for code, text in _CODES.items()}

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
}

Array = npt.NDArray[Any]


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
    """Encode one frame. Raises ValueError if columns differ in length or the frame is too large."""
    columns: dict[Column, Array] = dict(frame.columns)
    if not columns:
        text = json.dumps(frame.body, separators=(",", ":"), sort_keys=True).encode()
        columns = {Column.JSON: np.frombuffer(text, dtype=np.uint8)}
    arrays = {c: np.ascontiguousarray(v, dtype=COLUMN_DTYPE[c]) for c, v in columns.items()}
    count = frame.count
    if frame.columns and any(len(v) != count for v in arrays.values()):
        raise ValueError(f"columns of one frame differ in length: { {c.name: len(v) for c, v in arrays.items()} }")
    parts = [DESCRIPTOR.pack(_CODE_OF[v.dtype], c, 0, v.nbytes) for c, v in arrays.items()]
    for value in arrays.values():
        parts.append(value.tobytes())
        parts.append(b"\0" * (-value.nbytes % 8))
    body = b"".join(parts)
    if HEADER_BYTES + len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes is larger than {MAX_FRAME_BYTES}")
    head = HEADER.pack(
        MAGIC, VERSION, frame.kind, frame.flags, len(arrays), 0, frame.stream, frame.epoch,
        frame.seq, frame.t0_ns, frame.step, count, len(body),
    )  # fmt: skip
    return head + body


def decode_header(data: bytes | memoryview) -> Header:
    """Read the header alone, and check that exactly one whole frame is there. Raises PeerError."""
    if len(data) < HEADER_BYTES:
        raise PeerError(f"frame has {len(data)} bytes; a header alone has {HEADER_BYTES}")
    magic, version, kind, flags, ncol, zero, stream, epoch, seq, t0, step, count, body = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION or zero != 0:
        raise PeerError(f"not a Penstock frame of version {VERSION}: magic {magic:#06x}, version {version}")
    if kind not in Kind.__members__.values():
        raise PeerError(f"frame kind {kind} is unknown")
    if len(data) != HEADER_BYTES + body or len(data) > MAX_FRAME_BYTES:
        raise PeerError(f"frame has {len(data)} bytes; its header promises {HEADER_BYTES + body}")
    return Header(Kind(kind), flags, ncol, stream, epoch, seq, t0, step, count, body)


def decode(data: bytes | memoryview) -> Frame:
    """Decode one frame; columns are views of `data`. Raises PeerError."""
    head = decode_header(data)
    view = memoryview(data)
    at = HEADER_BYTES + DESCRIPTOR.size * head.num_columns
    columns: dict[Column, Array] = {}
    for i in range(head.num_columns):
        if at > len(view):
            raise PeerError("frame ends inside its columns")
        code, column, _, nbytes = DESCRIPTOR.unpack_from(view, HEADER_BYTES + DESCRIPTOR.size * i)
        columns[_column(column, code)] = _read(view, at, nbytes, _CODES[code])
        at += nbytes + (-nbytes % 8)
    if at != len(view):
        raise PeerError(f"columns end at byte {at} of {len(view)}")
    return _frame(head, columns)


def _column(column: int, code: int) -> Column:
    if column not in Column.__members__.values() or code not in _CODES:
        raise PeerError(f"column {column} of dtype code {code} is unknown")
    if np.dtype(_CODES[code]) != COLUMN_DTYPE[Column(column)]:
        raise PeerError(f"column {Column(column).name} has dtype {_CODES[code]}")
    return Column(column)


def _read(view: memoryview, at: int, nbytes: int, dtype: str) -> Array:
    size = np.dtype(dtype).itemsize
    if at + nbytes > len(view) or nbytes % size:
        raise PeerError(f"a column of {nbytes} bytes at {at} does not fit a frame of {len(view)}")
    return np.frombuffer(view, dtype=dtype, count=nbytes // size, offset=at)


def _frame(head: Header, columns: dict[Column, Array]) -> Frame:
    body: Any = None
    if Column.JSON in columns:
        try:
            body = json.loads(columns[Column.JSON].tobytes())
        except ValueError as error:
            raise PeerError(f"a {head.kind.name} frame holds no JSON: {error}") from error
        columns = {}
    elif any(len(v) != head.count for v in columns.values()):
        raise PeerError(f"header promises {head.count} rows, columns differ")
    return Frame(head.kind, head.stream, head.epoch, head.seq, head.t0_ns, head.step, head.flags, columns, body)
