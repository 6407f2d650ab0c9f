"""The arithmetic of `bench collective`: which part of a step is spent in exchanges that nothing hides."""

from __future__ import annotations

import pytest
from bench._exposed import exposed_shares

EXCHANGE, OTHER = 7, 3


def trace(*events: tuple[int, int, int, int]) -> dict[str, list[int]]:
    """Columns of (step, operator, begin, end)."""
    return {
        "step": [e[0] for e in events],
        "op": [e[1] for e in events],
        "start_ns": [e[2] for e in events],
        "duration_ns": [e[3] - e[2] for e in events],
    }


@pytest.mark.parametrize(
    ("events", "share"),
    [
        ([(0, OTHER, 0, 60), (0, EXCHANGE, 60, 100)], 0.4),  # after
        ([(0, OTHER, 0, 100), (0, EXCHANGE, 20, 60)], 0.0),  # hidden
        ([(0, OTHER, 0, 50), (0, EXCHANGE, 40, 80), (0, OTHER, 60, 100)], 0.1),  # between
        ([(0, EXCHANGE, 0, 50), (0, EXCHANGE, 20, 60), (0, OTHER, 60, 100)], 0.6),  # two at a time
        ([(0, OTHER, 0, 40), (0, EXCHANGE, 60, 100)], 0.4),  # a pause belongs to neither
        ([(0, EXCHANGE, 0, 30), (0, OTHER, 10, 20), (0, OTHER, 30, 100)], 0.2),  # an operator within
    ],
)
def test_only_time_of_exchanges_counts_as_exposed(events: list[tuple[int, int, int, int]], share: float) -> None:
    assert exposed_shares(trace(*events[::-1]), {EXCHANGE}) == [pytest.approx(share)]


def test_each_step_has_its_own_share() -> None:
    events = [(4, OTHER, 0, 10), (4, EXCHANGE, 10, 20), (5, OTHER, 20, 30), (5, EXCHANGE, 22, 28)]
    assert exposed_shares(trace(*events), {EXCHANGE}) == [pytest.approx(0.5), 0.0]
