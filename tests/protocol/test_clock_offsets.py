"""Estimates of clock offsets from round trips, with clocks that are ahead, that drift, and that are set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.clocks import ClockOffset, ClockWatch, RoundTrip

MS = 1_000_000
S = 1_000 * MS
T0 = 1_796_000_000 * S


def trip(at: int, ahead: int, there: int, back: int, held: int = 0) -> RoundTrip:
    """A round trip that begins at server time `at`, of a node whose clock is `ahead`; all in nanoseconds."""
    return RoundTrip(at + ahead, at + there, at + there + held, at + there + held + back + ahead)


@given(
    ahead=st.integers(-3600 * S, 3600 * S),
    there=st.integers(0, S),
    back=st.integers(0, S),
    held=st.integers(0, 2 * S),
)
def test_the_true_offset_is_within_the_error(ahead: int, there: int, back: int, held: int) -> None:
    found = trip(T0, ahead, there, back, held).offset()
    assert abs(found.offset_ns - ahead) <= found.error_ns <= (there + back) // 2 + 1


@given(
    ahead=st.integers(-5 * S, 5 * S),
    ways=st.lists(st.tuples(st.integers(0, 50 * MS), st.integers(0, 50 * MS)), min_size=1, max_size=30),
    drift_ppm=st.integers(-15, 15),
)
def test_the_best_estimate_holds_while_a_clock_drifts(ahead: int, ways: list[tuple[int, int]], drift_ppm: int) -> None:
    watch = ClockWatch()
    for number, (there, back) in enumerate(ways):
        now_ahead = ahead + number * 5 * S * drift_ppm // 1_000_000
        found = watch.note(trip(T0 + number * 5 * S, now_ahead, there, back))
        assert abs(found.offset_ns - now_ahead) <= found.error_ns + 10_000
        assert found.error_ns <= (there + back) // 2 + 1


def test_a_slow_round_trip_does_not_replace_a_fast_one() -> None:
    watch = ClockWatch()
    watch.note(trip(T0, 3 * MS, 200_000, 200_000))
    found = watch.note(trip(T0 + 5 * S, 3 * MS, 40 * MS, 2 * MS))
    assert found.offset_ns == 3 * MS
    assert found.error_ns < MS // 2


def test_a_clock_that_is_set_is_noticed_at_once() -> None:
    watch = ClockWatch()
    watch.note(trip(T0, 0, 200_000, 200_000))
    found = watch.note(trip(T0 + 5 * S, 2 * S, 40 * MS, 2 * MS))
    assert abs(found.offset_ns - 2 * S) <= found.error_ns < 30 * MS
    later = watch.note(trip(T0 + 10 * S, 2 * S, 60 * MS, 60 * MS))
    assert abs(later.offset_ns - 2 * S) <= later.error_ns


def test_an_answer_without_times_or_request_shows_nothing() -> None:
    watch = ClockWatch()
    watch.sent(T0)
    watch.returned(0, 0, T0 + MS)
    watch.returned(T0, T0, T0 + MS)
    assert watch.offset is None


def test_only_an_estimate_that_tells_something_new_differs() -> None:
    known = ClockOffset(offset_ns=3 * MS, error_ns=400_000)
    assert known.differs(None)
    assert not ClockOffset(offset_ns=3 * MS + 100_000, error_ns=410_000).differs(known)
    assert ClockOffset(offset_ns=4 * MS, error_ns=400_000).differs(known)
    assert ClockOffset(offset_ns=3 * MS, error_ns=100_000).differs(known)
