"""Rows of bytes are what protobuf's own decoder reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as messages

from penstock.export.packets import doubles, message, number, rows_of, text

U64 = st.integers(0, 2**64 - 1)


@given(st.lists(st.tuples(U64, st.floats(allow_nan=False)), min_size=1, max_size=5), U64, st.text(max_size=200))
def test_protobuf_reads_the_values_of_each_row(rows: list[tuple[int, float]], shared: int, name: str) -> None:
    uuids, values = np.array([row[0] for row in rows], np.uint64), np.array([row[1] for row in rows])
    event = message(11, [*number(11, uuids), *doubles(44, values), *text(23, name)])
    packets = rows_of(message(1, [*number(8, shared), *event]), len(rows)).tobytes()
    found = [(packet.timestamp, packet.track_event) for packet in messages.Trace.FromString(packets).packet]
    expected = [(uuid, shared, value, name.encode("utf-8", "replace").decode()) for uuid, value in rows]
    assert [(one.track_uuid, at, one.double_counter_value, one.name) for at, one in found] == expected
