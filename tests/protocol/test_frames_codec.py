"""The codec's own promises: round trips, refusals, and no exception but PeerError on foreign bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PeerError
from penstock.protocol.frames import (
    COLUMN_DTYPE,
    COLUMNS,
    DESCRIPTOR,
    FLAG_DEFLATED,
    HEADER,
    HEADER_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_FRAME_BYTES,
    Column,
    Frame,
    Kind,
    decode,
    decode_header,
    encode,
)

GOLDEN = [path.read_bytes() for path in sorted((Path(__file__).parents[1] / "golden" / "frames").glob("*.bin"))]
U32, U64, I64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(list(Kind)))
    rows = draw(st.integers(0, 20))
    columns: dict[Column, Any] = {}
    for column in sorted(COLUMNS.get(kind, frozenset())):
        dtype = COLUMN_DTYPE[column]
        raw = draw(st.binary(min_size=rows * dtype.itemsize, max_size=rows * dtype.itemsize))
        columns[column] = np.frombuffer(raw, dtype=dtype)
    flags = draw(st.integers(0, 255)) & ~(FLAG_DEFLATED if kind is Kind.GRAPH else 0)
    return Frame(
        kind, draw(U32), draw(U32), draw(U64), draw(I64), draw(U64), flags,
        columns, None if columns else draw(st.dictionaries(st.text(), JSON, max_size=4)),
    )  # fmt: skip


def decode_or_refuse(data: bytes) -> None:
    """Decode; an exception other than PeerError fails the test."""
    try:
        frame = decode(data)
    except PeerError:
        return
    assert decode(encode(frame)).count == frame.count


def test_the_flag_of_deflated_graphs_is_not_given_by_callers() -> None:
    frame = Frame(Kind.GRAPH, 0, 0, 0, 0, 0, FLAG_DEFLATED, {}, {})
    with pytest.raises(ValueError, match="FLAG_DEFLATED"):
        encode(frame)


@given(frames())
def test_decode_returns_what_was_encoded(frame: Frame) -> None:
    data = encode(frame)
    back, head = decode(data), decode_header(data)
    fields = ("kind", "stream", "epoch", "seq", "t0_ns", "step", "flags", "count")
    assert (
        [getattr(back, f) for f in fields] == [getattr(frame, f) for f in fields] == [getattr(head, f) for f in fields]
    )
    assert back.body == frame.body
    assert {c: v.tobytes() for c, v in back.columns.items()} == {c: v.tobytes() for c, v in frame.columns.items()}


@given(frames())
def test_every_column_starts_at_a_multiple_of_eight_bytes(frame: Frame) -> None:
    data = encode(frame)
    at = HEADER_BYTES + DESCRIPTOR.size * decode_header(data).num_columns
    for i in range(decode_header(data).num_columns):
        assert at % 8 == 0
        at += -(-DESCRIPTOR.unpack_from(data, HEADER_BYTES + DESCRIPTOR.size * i)[3] // 8) * 8
    assert at == len(data)


@settings(max_examples=300)
@given(st.binary(max_size=256))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    decode_or_refuse(data)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 255), st.integers(0, 20), st.integers(0, 4))
def test_any_body_under_a_good_header_decodes_or_is_refused(body: bytes, kind: int, columns: int, rows: int) -> None:
    head = struct.pack("<HBBBBHIIQqQII", 0x5350, 1, kind % 14, 0, columns, 0, 1, 1, 0, 0, 0, rows, len(body))
    decode_or_refuse(head + body)


@settings(max_examples=500)
@given(st.sampled_from(GOLDEN), st.data())
def test_a_good_frame_with_changed_bytes_decodes_or_is_refused(golden: bytes, data: st.DataObject) -> None:
    changed = bytearray(golden)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    decode_or_refuse(bytes(changed))
    decode_or_refuse(bytes(changed[:cut]))


def test_json_nested_beyond_the_stack_is_refused() -> None:
    text = np.frombuffer(b'{"a":' * 200_000, dtype=np.uint8)
    good = encode(Frame(Kind.GAP, 1, 1, 0, body={}))
    descriptor = DESCRIPTOR.pack(1, Column.JSON, 0, len(text))
    data = good[:44] + struct.pack("<I", 8 + len(text)) + descriptor + text.tobytes()
    with pytest.raises(PeerError, match="no JSON"):
        decode(data)


def test_a_column_given_twice_is_refused() -> None:
    sums = {c: np.array([1]) for c in (Column.OP, Column.COUNT, Column.TOTAL_NS, Column.MAX_NS)}
    data = bytearray(encode(Frame(Kind.OP_SUMS, 1, 1, 0, columns=sums)))
    data[HEADER_BYTES + 24 : HEADER_BYTES + 32] = data[HEADER_BYTES + 8 : HEADER_BYTES + 16]  # MAX_NS becomes COUNT
    with pytest.raises(PeerError, match="COUNT is there twice"):
        decode(bytes(data))


def test_a_frame_at_the_limit_decodes_and_a_byte_more_is_refused() -> None:
    room = MAX_FRAME_BYTES - HEADER_BYTES - DESCRIPTOR.size
    largest = encode(Frame(Kind.LOG, 1, 1, 0, columns={Column.TEXT: np.zeros(room, dtype=np.uint8)}))
    assert len(largest) == MAX_FRAME_BYTES and decode(largest).count == room
    with pytest.raises(ValueError, match="larger than"):
        encode(Frame(Kind.LOG, 1, 1, 0, columns={Column.TEXT: np.zeros(room + 1, dtype=np.uint8)}))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (Frame(Kind.OP_SUMS, 1, 1, 0, columns={Column.OP: np.array([1])}), "does not hold the columns"),
        (Frame(Kind.GAP, 1, 1, 0, columns={Column.OP: np.array([1])}), "does not hold the columns"),
        (Frame(Kind.SCALARS, 1, 1, 0, body={"loss": float("nan")}), "not JSON compliant"),
        (Frame(Kind.GAP, 2**32, 1, 0, body={}), "header field"),
        (Frame(Kind.GAP, 1, 1, -1, body={}), "header field"),
        (
            Frame(Kind.SYNC, 1, 1, 0, columns={c: np.zeros(1 + (c == Column.BYTES)) for c in COLUMNS[Kind.SYNC]}),
            "differ in length",
        ),
    ],
)
def test_encode_refuses_what_no_decoder_would_read(frame: Frame, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode(frame)


def _large_document(ops: int) -> dict[str, object]:
    op = {"type": "aten.addmm.default", "inputs": [{"name": f"v{i}", "shape": [500, 400]} for i in range(6)]}
    return {"ops": [{"name": f"addmm_{i}", **op} for i in range(ops)]}


def test_a_graph_of_twenty_thousand_operators_is_one_frame() -> None:
    frame = Frame(Kind.GRAPH, 1, 2, 3, body=_large_document(20_000))
    assert len(json.dumps(frame.body)) > MAX_FRAME_BYTES
    data = encode(frame)
    assert decode_header(data).flags == FLAG_DEFLATED
    assert decode(data) == frame


def test_a_small_graph_stays_readable_by_an_older_server() -> None:
    assert decode_header(encode(Frame(Kind.GRAPH, 1, 2, 3, body=_large_document(10)))).flags == 0


@pytest.mark.parametrize("spoil", [lambda body: body[:-4], lambda body: body + b"more", lambda body: b"no zlib"])
def test_a_document_that_does_not_inflate_is_refused(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(PeerError, match="GRAPH frame"):
        decode(_graph_frame(spoil(zlib.compress(b"{}"))))


def test_a_document_that_inflates_without_end_is_refused() -> None:
    with pytest.raises(PeerError, match="over"):
        decode(_graph_frame(zlib.compress(b" " * (MAX_DOCUMENT_BYTES + 1) + b"{}")))


def _graph_frame(text: bytes) -> bytes:
    fields = list(HEADER.unpack_from(encode(Frame(Kind.GRAPH, 1, 1, 0, body={}))))
    fields[3] = FLAG_DEFLATED
    good = HEADER.pack(*fields)
    body = DESCRIPTOR.pack(1, Column.JSON, 0, len(text)) + text + b"\0" * (-len(text) % 8)
    return good[:44] + struct.pack("<I", len(body)) + body
