"""The bounded buffer of telemetry frames: what is dropped, what never is, what is sent again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.frames import COLUMNS, Frame, Kind, decode, decode_header, encode
from penstock_worker.buffer import AGAIN, KEPT, MAX_TRIES, FrameBuffer

LIMIT = 4000


def frame(kind: Kind, seq: int, rows: int = 10) -> bytes:
    if kind in COLUMNS:
        return encode(Frame(kind, 7, 1, seq, columns={column: np.zeros(rows) for column in COLUMNS[kind]}))
    return encode(Frame(kind, 7, 1, seq, body={"pad": "x" * rows}))


def push(buffer: FrameBuffer, payload: bytes) -> None:
    buffer.push(decode_header(payload), payload)


def drain(buffer: FrameBuffer) -> list[Frame]:
    out = []
    while (payload := buffer.pop()) is not None:
        out.append(decode(payload))
    return out


def test_frames_come_out_byte_for_byte_and_in_order() -> None:
    buffer = FrameBuffer(stream=7, epoch=1)
    payloads = [frame(Kind.OP_EVENTS, 0), frame(Kind.METRICS, 1), frame(Kind.SYNC, 2)]
    for payload in payloads:
        push(buffer, payload)
    assert [buffer.pop() for _ in payloads] == payloads
    assert buffer.pop() is None
    assert buffer.empty


def test_the_oldest_events_go_first_and_a_gap_counts_their_rows() -> None:
    buffer = FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT)
    push(buffer, frame(Kind.METRICS, 0))
    push(buffer, frame(Kind.OP_SUMS, 1))
    for seq in range(2, 60):
        push(buffer, frame(Kind.OP_EVENTS, seq, rows=50))
    out = drain(buffer)
    kinds = [item.kind for item in out]
    assert kinds[:3] == [Kind.METRICS, Kind.OP_SUMS, Kind.GAP]
    dropped = 58 - kinds.count(Kind.OP_EVENTS)
    assert out[2].body == {"OP_EVENTS": 50 * dropped}
    assert out[2].seq == dropped + 1, "the gap stands where the last dropped frame stood"
    assert out[-1].seq == 59


def test_sums_are_only_dropped_when_there_are_no_events_left() -> None:
    buffer = FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT)
    for seq in range(60):
        push(buffer, frame(Kind.OP_SUMS, seq, rows=50))
    gap = drain(buffer)[0]
    assert gap.kind is Kind.GAP
    assert list(gap.body) == ["OP_SUMS"]


def test_metrics_are_never_dropped_and_fill_the_buffer_instead() -> None:
    buffer = FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT)
    for seq in range(100):
        push(buffer, frame(Kind.METRICS, seq, rows=100))
    assert buffer.full
    assert [item.seq for item in drain(buffer)] == list(range(100))
    assert buffer.full, "sent and unconfirmed frames still count"
    buffer.confirm(buffer.sends)
    assert buffer.size_bytes == 0


def test_the_newest_exchange_sums_are_never_dropped() -> None:
    """Each says all that those before it said, and there may be none after it."""
    buffer = FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT)
    for seq in range(0, 120, 2):
        push(buffer, frame(Kind.EXCHANGE, seq, rows=200))
        push(buffer, frame(Kind.SYNC, seq + 1, rows=50))
    for seq in range(120, 160):
        push(buffer, frame(Kind.LOG, seq, rows=200))
    first = drain(buffer)
    assert [item.seq for item in first if item.kind is Kind.EXCHANGE] == [118]
    buffer.rewind()
    assert [item.seq for item in drain(buffer)] == [118]
    buffer.confirm(buffer.sends)
    buffer.rewind()
    assert drain(buffer) == []
    assert buffer.size_bytes == 0


def test_after_a_reconnect_only_unconfirmed_frames_are_resent() -> None:
    buffer = FrameBuffer(stream=7, epoch=1)
    for seq, kind in enumerate([Kind.HELLO, Kind.METRICS, Kind.OP_EVENTS, Kind.METRICS]):
        push(buffer, frame(kind, seq))
    buffer.pop()
    buffer.pop()
    mark = buffer.sends
    drain(buffer)
    buffer.confirm(mark)
    buffer.rewind()
    assert [item.seq for item in drain(buffer)] == [3], "events are not worth sending twice"


def test_a_frame_that_breaks_every_connection_is_dropped() -> None:
    buffer = FrameBuffer(stream=7, epoch=1)
    push(buffer, frame(Kind.METRICS, 0, rows=3))
    for _ in range(MAX_TRIES):
        assert [item.seq for item in drain(buffer)] == [0]
        buffer.rewind()
    push(buffer, frame(Kind.METRICS, 1))
    assert [(item.kind, item.seq) for item in drain(buffer)] == [(Kind.GAP, 0), (Kind.METRICS, 1)]
    buffer.confirm(buffer.sends)
    assert buffer.size_bytes == 0


def test_a_frame_never_sent_on_broken_connections_is_retained() -> None:
    buffer = FrameBuffer(stream=7, epoch=1)
    push(buffer, frame(Kind.METRICS, 0))
    for _ in range(2 * MAX_TRIES):
        buffer.rewind()
    assert [item.seq for item in drain(buffer)] == [0]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(set(Kind) - {Kind.GAP})), st.integers(1, 60), st.integers(0, 2)), max_size=120
    )
)
def test_order_is_kept_and_every_lost_row_is_counted(
    events: list[tuple[Kind, int, int]],
) -> None:
    buffer = FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT)
    out: list[Frame] = []
    pushed: dict[int, Frame] = {}
    for seq, (kind, rows, pops) in enumerate(events):
        payload = frame(kind, seq, rows)
        pushed[seq] = decode(payload)
        push(buffer, payload)
        taken = [popped for _ in range(pops) if (popped := buffer.pop()) is not None]
        out.extend(decode(popped) for popped in taken)
        buffer.confirm(buffer.sends)
        held = [item for item in pushed.values() if item.kind in AGAIN]
        assert buffer.size_bytes <= LIMIT or held, "the buffer is over its limit without need"
    out.extend(drain(buffer))
    seqs = [item.seq for item in out]
    assert seqs == sorted(set(seqs))
    arrived = {item.seq for item in out if item.kind is not Kind.GAP}
    lost = [item for seq, item in pushed.items() if seq not in arrived]
    assert not [item for item in lost if item.kind in KEPT]
    exchanged = [seq for seq, item in pushed.items() if item.kind is Kind.EXCHANGE]
    assert not exchanged or exchanged[-1] in arrived
    counted = sum(sum(item.body.values()) for item in out if item.kind is Kind.GAP)
    assert counted == sum(item.count for item in lost)


def test_gaps_of_a_named_buffer_hold_all_that_it_dropped() -> None:
    buffer = FrameBuffer(stream=7, epoch=1, limit_bytes=LIMIT, name="a1")
    totals = []
    for first in (0, 100):
        for seq in range(first, first + 60):
            push(buffer, frame(Kind.OP_EVENTS, seq, rows=50))
        totals += [item.body for item in drain(buffer) if item.kind is Kind.GAP]
    first, second = totals
    assert first["total"] == {"OP_EVENTS": first["OP_EVENTS"]}
    assert second["total"] == {"OP_EVENTS": first["OP_EVENTS"] + second["OP_EVENTS"]}
    assert first["agent"] == second["agent"] == "a1"
