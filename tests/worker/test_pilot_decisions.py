"""When a pilot drains and leaves, decided from facts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_worker.pilot import Drain, Facts, Leave, Serve, Terms, decide, terms

ONCE = Terms(once=True)
HOUR = Terms(ends_at=3600.0, drain_s=60.0, stop_s=20.0)


def facts(
    now: float = 0.0, *, busy: bool = False, served: bool = False, job: bool = False, confirmed: bool = False
) -> Facts:
    return Facts(now, busy, served, job, confirmed)


def test_agent_without_once_and_ttl_is_no_pilot() -> None:
    assert terms(once=False, ttl_s=None, drain_s=None, now=5.0) is None


def test_short_time_leaves_at_least_half_of_it_to_jobs() -> None:
    made = terms(once=False, ttl_s=8.0, drain_s=None, now=100.0)
    assert made == Terms(ends_at=108.0, drain_s=2.0, stop_s=2.0)


def test_once_waits_for_a_job_however_long() -> None:
    assert decide(ONCE, facts(1e9)) == Serve()


def test_once_stays_while_its_job_recovers_elsewhere() -> None:
    assert decide(ONCE, facts(served=True, job=True)) == Serve()


def test_once_leaves_after_its_job_when_the_server_knows() -> None:
    assert isinstance(decide(ONCE, facts(served=True)), Drain)
    assert isinstance(decide(ONCE, facts(served=True, confirmed=True)), Leave)


def test_idle_pilot_whose_time_is_nearly_over_drains_first() -> None:
    assert decide(HOUR, facts(3539.0)) == Serve()
    assert isinstance(decide(HOUR, facts(3540.0)), Drain)
    assert isinstance(decide(HOUR, facts(3540.0, confirmed=True)), Leave)


def test_busy_pilot_is_left_running_until_it_has_to_stop() -> None:
    busy = facts(3579.0, busy=True, served=True, job=True, confirmed=True)
    assert isinstance(decide(HOUR, busy), Drain)
    assert isinstance(decide(HOUR, facts(3580.0, busy=True, job=True)), Leave)


@given(st.floats(0.5, 1e6), st.none() | st.floats(0.1, 1e6), st.booleans(), st.booleans(), st.booleans())
def test_every_pilot_with_a_ttl_leaves_by_then(
    ttl_s: float, drain_s: float | None, busy: bool, served: bool, confirmed: bool
) -> None:
    made = terms(once=False, ttl_s=ttl_s, drain_s=drain_s, now=10.0)
    assert made is not None
    assert made.stop_s <= made.drain_s <= ttl_s
    assert isinstance(decide(made, Facts(10.0 + ttl_s, busy, served, busy, confirmed)), Leave)


@pytest.mark.parametrize("now", [3540.0, 3579.0])
def test_seconds_left_are_those_before_the_stop(now: float) -> None:
    assert HOUR.seconds_left(now) == 3580.0 - now
