"""A parameter server's work in INPUT_EVENTS frames: all of it within a budget, each event accounted for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.exchange import MAX_LANES, lanes_body, lanes_of
from penstock.protocol.frames import FIRST_BLOCK, ROUNDS_LANE, Column, Kind, Work
from penstock.telemetry.input import EVENT, Events
from penstock.telemetry.tally import Tally
from penstock.telemetry.work import BYTES_PER_S, EVENT_BYTES, WorkWatch

T0 = 1_790_000_000_000_000_000
SECOND = 1_000_000_000
MOST = BYTES_PER_S // EVENT_BYTES
"""Events of a second."""


class Served:
    """A server that did what a test says since the last call. Block 2 is an embedding."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, int, int]] = []
        self.lost = 0
        self.is_watched = False

    def watch(self) -> None:
        self.is_watched = True

    def take(self) -> tuple[Events, int]:
        events, self.events = self.events, []
        lost, self.lost = self.lost, 0
        return np.array(events, EVENT), lost

    def name(self, lane: int) -> str | None:
        return "embedding" if lane == FIRST_BLOCK + 2 else None

    def updates(self, count: int) -> None:
        self.events += [(T0 + i, T0 + i + 1, Work.UPDATE, ROUNDS_LANE) for i in range(count)]


def watched() -> tuple[WorkWatch, Served, Tally]:
    tally, server = Tally(), Served()
    watch = WorkWatch(tally)
    watch.add("server", server)
    return watch, server, tally


def rows(watch: WorkWatch, at_s: float, *, in_full: bool = False) -> int:
    drafts = watch.choose(step=0, now_ns=T0 + int(at_s * SECOND), in_full=in_full)
    assert all(draft.kind is Kind.INPUT_EVENTS for draft in drafts)
    return sum(len(draft.columns[Column.WORK]) for draft in drafts)


def test_work_is_recorded_once_a_session_watches() -> None:
    _, server, _ = watched()
    assert server.is_watched


def test_all_work_is_sent_within_the_budget() -> None:
    watch, server, tally = watched()
    for tick in range(20):
        server.updates(MOST // 20)
        assert rows(watch, 0.1 * tick) == MOST // 20
    assert (tally.sampled_out, tally.produced) == (0, 20 * (MOST // 20))


def test_beyond_the_budget_whole_drains_are_left_out() -> None:
    watch, server, tally = watched()
    sent = []
    for tick in range(200):
        server.updates(MOST // 2)  # five times too much
        sent.append(rows(watch, 0.1 * tick))
    assert set(sent) == {0, MOST // 2}
    assert 0.8 * 20 * MOST < sum(sent) < 1.2 * 21 * MOST  # 20 s and the burst
    assert tally.produced == tally.sampled_out + sum(sent)


def test_all_is_sent_while_all_is_asked_for() -> None:
    watch, server, _ = watched()
    for tick in range(20):
        server.updates(MOST)
        assert rows(watch, 0.1 * tick, in_full=True) == MOST


def test_what_a_server_did_last_is_sent_after_it_ended() -> None:
    watch, server, _ = watched()
    server.updates(3)
    watch.remove("server")
    server.updates(2)  # of nobody any more
    assert rows(watch, 0.1) == 3
    assert rows(watch, 0.2) == 0


def test_lanes_of_blocks_are_named_once_they_are_sent() -> None:
    watch, server, _ = watched()
    server.updates(1)
    assert rows(watch, 0.1) == 1
    assert watch.lanes() == {}
    server.events = [(T0, T0 + 9, Work.LOOK_UP, FIRST_BLOCK + 2), (T0, T0 + 9, Work.LOOK_UP, FIRST_BLOCK)]
    assert rows(watch, 0.2) == 2
    assert lanes_of(lanes_body(watch.lanes())) == {FIRST_BLOCK + 2: "embedding"}


def test_lanes_of_older_servers_and_of_nonsense_are_none() -> None:
    assert lanes_of({"rows": []}) == lanes_of(None) == lanes_of({"lanes": [1]}) == {}
    assert lanes_of({"lanes": {"7": "w", "x": "w", "8": 1}}) == {7: "w"}
    assert len(lanes_of({"lanes": {str(lane): "w" for lane in range(2 * MAX_LANES)}})) == MAX_LANES


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3 * MOST // 2), st.integers(0, 5), st.booleans()), max_size=30))
def test_every_event_is_sent_sampled_out_or_dropped(ticks: list[tuple[int, int, bool]]) -> None:
    watch, server, tally = watched()
    done = sent = 0
    for tick, (count, lost, in_full) in enumerate(ticks):
        server.updates(count)
        server.lost = lost
        done += count + lost
        sent += rows(watch, 0.1 * tick, in_full=in_full)
    assert tally.produced == done == sent + tally.sampled_out + tally.dropped.total()
