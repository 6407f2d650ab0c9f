"""The book's examples reach the quality that they state, in both modes, with 1, 2 and 3 replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.book import fit_a_line, recognize_digits, recommender
from tests.property.oracle import intra_op_threads

MODES = ["all_reduce", "reduce"]
pytestmark = [
    pytest.mark.parametrize("mode", MODES),
    pytest.mark.parametrize("num_replicas", [1, 2, 3]),
]


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch, num_replicas: int) -> Iterator[None]:
    monkeypatch.setenv("CPU_NUM", str(num_replicas))
    with intra_op_threads(1):
        yield


def test_fit_a_line_comes_near_least_squares(mode: str) -> None:
    error, exact = fit_a_line.run(mode)
    assert error <= exact * fit_a_line.LIMIT


def test_digits_are_recognized(mode: str) -> None:
    assert recognize_digits.run(mode) >= recognize_digits.LIMIT


def test_ratings_are_recommended(mode: str) -> None:
    assert recommender.run(mode) <= recommender.LIMIT
