"""INPUT_EVENTS frames: of the data feed's work what belongs to sampled steps is sent, each event once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.telemetry.test_telemetry_collector import plan

from penstock.protocol.frames import FIRST_READER, Column, Kind, Work
from penstock.telemetry.collector import MARK, Collector, Draft, Marks
from penstock.telemetry.events import Events
from penstock.telemetry.input import EVENT, KEPT_NS, MOST, InputSampler, InputTrace, Turn
from penstock.telemetry.input import Events as InputEvents
from penstock.telemetry.sampling import Sampler

T0 = 1_790_000_000_000_000_000
Spans = list[tuple[int, int]]


def work(*spans: tuple[int, int]) -> InputEvents:
    """Reads of one reader, as (begin, end) after T0."""
    return np.array([(T0 + begin, T0 + end, Work.READ, FIRST_READER) for begin, end in spans], EVENT)


def spans_of(drafts: list[Draft]) -> Spans:
    found = []
    for draft in drafts:
        assert draft.kind is Kind.INPUT_EVENTS
        begins = draft.t0_ns - T0 + draft.columns[Column.START_NS]
        found += list(zip(begins.tolist(), (begins + draft.columns[Column.DURATION_NS]).tolist(), strict=True))
    return found


def choose(sampler: InputSampler, events: InputEvents, *turns: Turn, now: int = 0) -> Spans:
    at = [(T0 + begin, T0 + end) for begin, end in turns]
    return spans_of(sampler.choose(events, at, step=7, now_ns=T0 + now))


def test_events_of_a_sampled_turn_are_sent_and_no_others() -> None:
    sampler = InputSampler()
    assert choose(sampler, work((0, 90), (90, 110), (150, 160), (190, 205), (200, 230)), (100, 200)) == [
        (90, 110),
        (150, 160),
        (190, 205),
    ]


def test_an_event_that_comes_after_its_turn_is_sent_once() -> None:
    sampler = InputSampler()
    assert choose(sampler, work((0, 50)), (100, 200)) == []
    assert choose(sampler, work((180, 400))) == [(180, 400)]
    assert choose(sampler, work(), (200, 300)) == []
    assert choose(sampler, work((10, 60)), (40, 55)) == [(0, 50), (10, 60)]


def test_turns_that_do_not_meet_stay_two() -> None:
    sampler = InputSampler()
    choose(sampler, work(), (1000, 2000))
    assert choose(sampler, work((120, 130), (300, 400)), (100, 150)) == [(120, 130)]


def test_what_is_older_than_any_step_to_come_is_forgotten() -> None:
    sampler = InputSampler()
    assert choose(sampler, work((0, 50), (KEPT_NS, KEPT_NS + 50)), now=KEPT_NS + 55) == []
    assert choose(sampler, work(), (0, 2 * KEPT_NS), now=KEPT_NS + 60) == [(KEPT_NS, KEPT_NS + 50)]
    assert choose(sampler, work((100, 150)), now=4 * KEPT_NS) == []  # its turn is too long ago


def test_a_wait_of_minutes_is_cut_into_pieces_that_join() -> None:
    second = 1_000_000_000
    found = choose(InputSampler(), work((0, 30 * second), (29 * second, 29 * second + 5)), (0, 31 * second))
    pieces = sorted(span for span in found if span != (29 * second, 29 * second + 5))
    assert len(found) == len(pieces) + 1
    assert (pieces[0][0], pieces[-1][1]) == (0, 30 * second)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))


SPAN = st.tuples(st.integers(0, 500), st.integers(0, 80)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=200, deadline=None)
@given(events=st.lists(SPAN, max_size=20), turns=st.lists(SPAN, max_size=6), cut=st.integers(0, 20))
def test_each_overlapping_event_is_sent_once(events: Spans, turns: Spans, cut: int) -> None:
    # Turns that touch or overlap are one, which is what may be recorded in full; kept apart here.
    turns = [turn for i, turn in enumerate(sorted(turns)) if i == 0 or turn[0] > max(end for _, end in turns[:i])]
    sampler = InputSampler()
    found = choose(sampler, work(*events[:cut]), *turns) + choose(sampler, work(*events[cut:]))
    wanted = [one for one in events if any(one[0] < end and one[1] > begin for begin, end in turns)]
    assert sorted(found) == sorted(wanted)


def test_a_trace_keeps_the_newest_and_asks_readers() -> None:
    trace = InputTrace()
    trace.add_reader(lambda: work((1, 2)))
    for begin in range(MOST + 3):
        trace.add(Work.WAIT, 0, begin, begin + 1)
    found = trace.drain()
    assert (len(found), found["begin_ns"][0], found["begin_ns"][-1] - T0) == (MOST + 1, 3, 1)
    assert len(trace.drain()) == 1


def test_a_reader_that_leaves_is_asked_a_last_time() -> None:
    trace = InputTrace()

    def reads() -> InputEvents:
        return work((3, 4))

    trace.add_reader(reads)
    trace.remove_reader(reads)
    assert trace.drain()["end_ns"].tolist() == [T0 + 4]
    assert len(trace.drain()) == 0


def test_readers_of_two_data_sets_have_lanes_of_their_own() -> None:
    trace = InputTrace()
    first, second = trace.claim(2), trace.claim(1)
    assert (first, second) == ([FIRST_READER, FIRST_READER + 1], [FIRST_READER + 2])
    trace.release(first)
    assert trace.claim(1) == [FIRST_READER]  # the next pass has the same
    assert trace.claim(2) == [FIRST_READER + 1, FIRST_READER + 3]
    with pytest.raises(ValueError, match="at most 32768 have lanes"):
        trace.claim(FIRST_READER)


def _marks(*rows: tuple[int, int, int]) -> Marks:
    return np.array([(step, T0 + begin, T0 + end, 8, math.nan) for step, begin, end in rows], MARK)


def _step(step: int, at: int) -> Events:
    one = np.array([0])
    return Events(one + T0 + at, one + 10, one, one + step, one)


@pytest.mark.parametrize(("first", "expected"), [(True, [(100, 150)]), (False, [(150, 260)])])
def test_a_turn_reaches_back_to_the_step_before(first: bool, expected: Spans) -> None:
    collector = Collector(Sampler())
    collector.use(plan(), from_step=0)
    got = collector.collect(_step(1, 110), lost=0, marks=_marks((1, 100, 150)), now_ns=T0)
    if not first:
        got = collector.collect(_step(2, 210), lost=0, marks=_marks((2, 200, 260)), now_ns=T0)
    assert [(begin - T0, end - T0) for begin, end in got.turns] == expected
