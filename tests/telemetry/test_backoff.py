"""Back-off doubles, is bounded, spreads out, and begins anew after a success."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0, chance=lambda: 0.0)
    assert [backoff.wait_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_waits_begin_anew_after_a_success() -> None:
    backoff = Backoff(1.0, 5.0, chance=lambda: 0.0)
    backoff.wait_s()
    backoff.wait_s()
    backoff.reset()
    assert backoff.wait_s() == 1.0


@given(st.floats(0.0, 1.0), st.integers(0, 2000))
def test_jitter_takes_at_most_a_half(chance: float, attempts: int) -> None:
    backoff = Backoff(1.0, 5.0, chance=lambda: chance)
    backoff.attempts = attempts
    full = min(5.0, 2.0**attempts) if attempts < 4 else 5.0
    assert full / 2 <= backoff.wait_s() <= full


def test_pauses_do_not_shift_what_a_script_draws() -> None:
    state = random.getstate()
    Backoff(1.0, 8.0).wait_s()
    assert random.getstate() == state
