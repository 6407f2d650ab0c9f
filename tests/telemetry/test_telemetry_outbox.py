"""The outbox accounts for every row, whatever is put, taken, lost or dropped, and starts each connection anew."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.frames import COLUMNS, Frame, Kind, decode
from penstock.protocol.graphdoc import GraphHash, Threads
from penstock.telemetry.collector import Draft
from penstock.telemetry.outbox import (
    KEEP_BYTES,
    LAST_RESORT_BYTES,
    LIMIT_BYTES,
    REPLACED,
    Outbox,
    Parcel,
    message,
    pack,
)

A, B = GraphHash("aa"), GraphHash("bb")
HELLO = {"role": "trainer"}


def parcel(kind: Kind, rows: int, graph: GraphHash | None = None) -> Parcel:
    return pack(Draft(kind, {column: np.zeros(rows) for column in COLUMNS[kind]}, 0, graph=graph))


def outbox(*, limit_bytes: int = LIMIT_BYTES, last_resort_bytes: int = LAST_RESORT_BYTES) -> Outbox:
    box = Outbox(limit_bytes=limit_bytes, last_resort_bytes=last_resort_bytes)
    box.introduce(HELLO)
    box.connected(stream=3, epoch=1)
    return box


def taken(box: Outbox) -> list[Frame]:
    """Take all there is."""
    frames: list[Frame] = []
    while (item := box.take()) is not None:
        frames.append(decode(bytes(item.frame)))
    assert box.empty
    return frames


def kinds(frames: list[Frame]) -> list[str]:
    return [
        f"{frame.kind.name}:{frame.body['hash']}" if frame.kind is Kind.GRAPH_USED else frame.kind.name
        for frame in frames
    ]


def test_frames_go_out_in_order_numbered_from_zero_by_stream() -> None:
    box = outbox()
    box.put(parcel(Kind.METRICS, 1))
    box.put(message(Kind.SCALARS, {"step": 1}))
    frames = taken(box)
    assert kinds(frames) == ["HELLO", "METRICS", "SCALARS"]
    assert [(frame.stream, frame.epoch, frame.seq) for frame in frames] == [(3, 1, 0), (3, 1, 1), (3, 1, 2)]


def scalars(step: int) -> Parcel:
    return message(Kind.SCALARS, {"step": step})


def test_unconfirmed_metrics_are_resent_before_newer_ones() -> None:
    box = outbox()
    box.connected(stream=3, epoch=1, keeps=True)
    for step in (1, 2, 3):
        box.put(scalars(step))
    sent = taken(box)
    box.stored(sent[1].seq)
    broken = box.take()
    assert broken is None
    box.put(scalars(4))
    box.connected(stream=3, epoch=1, keeps=True)
    frames = taken(box)
    assert [frame.body.get("step") for frame in frames] == [None, 2, 3, 4]
    assert [frame.seq for frame in frames] == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", REPLACED)
def test_cumulative_frames_are_resent_and_operator_rows_are_not(kind: Kind) -> None:
    box = outbox()
    box.connected(stream=3, epoch=1, keeps=True)
    box.put(parcel(Kind.OP_SUMS, 2))
    for done in (1, 2):
        box.put(message(kind, {"done": done}))
        taken(box)
    box.connected(stream=3, epoch=1, keeps=True)
    assert [frame.body for frame in taken(box)] == [HELLO, {"done": 2}]


def test_what_could_not_be_sent_is_not_kept_beside() -> None:
    box = outbox()
    box.connected(stream=3, epoch=1, keeps=True)
    assert box.take() is not None
    box.put(scalars(1))
    item = box.take()
    assert item is not None
    box.put_back(item)
    box.connected(stream=3, epoch=1, keeps=True)
    assert kinds(taken(box)) == ["HELLO", "SCALARS"]


def test_a_peer_that_never_confirms_costs_a_bounded_memory() -> None:
    box = outbox()
    box.connected(stream=3, epoch=1, keeps=True)
    for step in range(40):
        box.put(message(Kind.SCALARS, {"step": step, "pad": "x" * (KEEP_BYTES // 10)}))
        taken(box)
    box.connected(stream=3, epoch=1, keeps=True)
    assert [frame.body.get("step") for frame in taken(box)][1:] == list(range(31, 40))


def test_the_use_of_a_graph_says_what_runs_it() -> None:
    box = outbox()
    box.announce(A, {}, Threads(1, 2))
    [*_, used] = taken(box)
    assert used.body == {"hash": A, "workers": 1, "intra_op_threads": 2}
    assert Threads.of(used.body) == Threads(1, 2)


@pytest.mark.parametrize("body", [{}, {"workers": 1}, {"workers": True, "intra_op_threads": 2},
                                  {"workers": 0, "intra_op_threads": 2},
                                  {"workers": 1, "intra_op_threads": "2"}])  # fmt: skip
def test_numbers_of_threads_that_are_none_are_unknown(body: dict[str, object]) -> None:
    assert Threads.of(body) is None


def test_a_graph_precedes_its_first_frame_and_each_change_of_use() -> None:
    box = outbox()
    box.announce(A, {})
    assert kinds(taken(box)) == ["HELLO", "GRAPH", "GRAPH_USED:aa"]  # at once, so that a page can draw it
    box.put(parcel(Kind.OP_SUMS, 1, A))
    box.announce(B, {})
    box.put(parcel(Kind.OP_SUMS, 1, B))
    box.put(parcel(Kind.SYNC, 1, B))
    box.put(parcel(Kind.OP_SUMS, 1, A))
    assert kinds(taken(box)) == ["GRAPH", "OP_SUMS", "GRAPH_USED:bb", "OP_SUMS", "SYNC", "GRAPH_USED:aa", "OP_SUMS"]


def test_a_new_connection_repeats_hello_and_graph_and_counts_on() -> None:
    box = outbox()
    box.announce(A, {})
    box.announce(B, {})
    box.put(parcel(Kind.OP_SUMS, 1, B))
    before = taken(box)
    box.connected(stream=3, epoch=1)
    after = taken(box)
    assert kinds(after) == ["HELLO", "GRAPH", "GRAPH_USED:bb"]
    assert [frame.seq for frame in after] == [len(before) + i for i in range(3)]


def test_another_stream_counts_from_zero() -> None:
    box = outbox()
    taken(box)
    box.connected(stream=4, epoch=1)
    assert [(frame.kind, frame.stream, frame.seq) for frame in taken(box)] == [(Kind.HELLO, 4, 0)]


def test_an_unsent_frame_goes_first_on_the_next_connection() -> None:
    box = outbox()
    box.put(parcel(Kind.METRICS, 1))
    box.put(parcel(Kind.METRICS, 2))
    assert box.take() is not None  # HELLO
    lost = box.take()
    assert lost is not None
    box.put_back(lost)
    box.connected(stream=3, epoch=1)
    frames = taken(box)
    assert [(frame.kind, frame.seq) for frame in frames] == [(Kind.HELLO, 1), (Kind.METRICS, 2), (Kind.METRICS, 3)]
    assert [frame.count for frame in frames[1:]] == [1, 2]


def test_over_the_limit_events_go_first_and_then_sums() -> None:
    one = len(parcel(Kind.OP_EVENTS, 100).data)
    box = outbox(limit_bytes=3 * one)
    box.put(parcel(Kind.METRICS, 1))
    box.put(parcel(Kind.OP_SUMS, 5))
    for rows in (100, 100, 100):
        box.put(parcel(Kind.OP_EVENTS, rows))
    frames = taken(box)
    assert kinds(frames) == ["HELLO", "GAP", "METRICS", "OP_SUMS", "OP_EVENTS", "OP_EVENTS"]
    assert frames[1].body == {"OP_EVENTS": 100}
    box = outbox(limit_bytes=1)
    box.put(parcel(Kind.METRICS, 1))
    box.put(parcel(Kind.OP_SUMS, 5))
    box.put(parcel(Kind.SYNC, 7))
    frames = taken(box)
    assert kinds(frames) == ["HELLO", "GAP", "METRICS"]
    assert frames[1].body == {"OP_SUMS": 5, "SYNC": 7}


def test_over_the_hard_limit_metrics_are_dropped_not_goodbye() -> None:
    one = len(parcel(Kind.METRICS, 1).data)
    box = outbox(limit_bytes=one, last_resort_bytes=3 * one)
    for _ in range(5):
        box.put(parcel(Kind.METRICS, 1))
    box.put(message(Kind.GOODBYE, {}))
    frames = taken(box)
    assert kinds(frames)[-1] == "GOODBYE"
    assert frames[1].body == {"METRICS": 5 - kinds(frames).count("METRICS")}


def test_only_the_newest_of_what_says_all_is_sent() -> None:
    box = outbox()
    for done in range(5):
        for kind in REPLACED:
            box.put(message(kind, {"done": done}))
    frames = taken(box)
    assert [frame.body for frame in frames] == [HELLO, {"done": 4}, {"done": 4}]
    assert {frame.kind for frame in frames[1:]} == set(REPLACED)


def test_the_newest_exchange_sums_are_not_dropped_for_space() -> None:
    one = len(parcel(Kind.SYNC, 100).data)
    box = outbox(limit_bytes=3 * one)
    box.put(message(Kind.EXCHANGE, {"rows": []}))
    for _ in range(20):
        box.put(parcel(Kind.SYNC, 100))
    assert "EXCHANGE" in kinds(taken(box))


def test_a_changed_introduction_is_said_on_the_open_connection() -> None:
    box = outbox()
    taken(box)
    box.introduce({"role": "pserver"})
    assert [frame.body for frame in taken(box)] == [{"role": "pserver"}]


def test_a_document_larger_than_a_frame_is_refused_with_its_rows() -> None:
    box = outbox()
    noise = random.Random(0).randbytes(5 << 20)
    with pytest.raises(ValueError, match="larger than"):
        box.announce(A, {"program": noise.hex()})  # deflates to half
    box.put(parcel(Kind.OP_SUMS, 4, A))
    frames = taken(box)
    assert kinds(frames) == ["HELLO", "GAP"]
    assert frames[1].body == {"OP_SUMS": 4}


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([Kind.OP_EVENTS, Kind.OP_SUMS, Kind.SYNC, Kind.METRICS]), st.integers(1, 60)),
        st.sampled_from(["take", "take", "break", "lose"]),
    ),
    max_size=150,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.integers(200, 6000))
def test_rows_produced_are_rows_delivered_plus_gaps(actions: list[tuple[Kind, int] | str], limit: int) -> None:
    box = outbox(limit_bytes=limit, last_resort_bytes=2 * limit)
    produced: Counter[Kind] = Counter()
    frames: list[Frame] = []
    for action in actions:
        if isinstance(action, tuple):
            kind, rows = action
            graph = None if kind is Kind.METRICS else (A, B)[rows % 2]
            box.put(parcel(kind, rows, graph))
            produced[kind] += rows
        elif action == "lose":
            box.count_dropped(Kind.OP_EVENTS, 9)
            produced[Kind.OP_EVENTS] += 9
        elif (item := box.take()) is None:
            continue
        elif action == "break":
            box.put_back(item)
            box.connected(stream=3, epoch=1)
        else:
            frames.append(decode(bytes(item.frame)))
    frames += taken(box)
    seen: Counter[Kind] = Counter()
    used = None
    for number, frame in enumerate(frames):
        assert frame.seq == number
        if frame.kind is Kind.GAP:
            seen.update({Kind[name]: rows for name, rows in frame.body.items()})
        elif frame.kind is Kind.GRAPH_USED:
            used = frame.body["hash"]
        elif frame.kind in COLUMNS:
            seen[frame.kind] += frame.count
            assert frame.kind is Kind.METRICS or used == (A, B)[frame.count % 2]
    assert seen == produced
