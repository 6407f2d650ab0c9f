"""When a trainer tries to open channels to a server, and when it says that steps do without."""

from __future__ import annotations

from penstock.ps.retry import CHANNELS_AGAIN_S, UNOPENED, ChannelOpenings


def test_attempts_that_fail_become_rare_and_the_third_is_said() -> None:
    openings = ChannelOpenings()
    said = []
    for _ in range(UNOPENED):
        assert openings.is_due(10.0)
        said.append(openings.failed(10.0, is_refused=False))
    assert said == [False] * (UNOPENED - 1) + [True]
    assert not openings.is_due(10.0 + CHANNELS_AGAIN_S - 1)
    assert openings.is_due(10.0 + CHANNELS_AGAIN_S)
    assert openings.failed(50.0, is_refused=False), "it is not tried at each step again"


def test_a_success_begins_anew() -> None:
    openings = ChannelOpenings()
    for _ in range(UNOPENED):
        openings.failed(0.0, is_refused=False)
    openings.succeeded()
    assert openings.is_due(0.0)
    assert not openings.failed(0.0, is_refused=False)


def test_a_refusal_lasts_until_the_next_join() -> None:
    openings = ChannelOpenings()
    assert openings.failed(0.0, is_refused=True)
    assert not openings.is_due(1e9)
    openings.succeeded()
    assert openings.is_due(0.0)
