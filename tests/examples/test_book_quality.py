"""The book's examples reach the quality that they state, in both modes, with 1, 2 and 3 replicas.

Four of the six cases are long tests: that replicas train as one does is shown by tests/property for each mode.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from examples.book import (
    fit_a_line,
    image_classification,
    recognize_digits,
    recommender,
    understand_sentiment,
    word2vec,
)
from tests.property.oracle import intra_op_threads

QUICK = [("all_reduce", 2), ("reduce", 3)]
LONG = [("all_reduce", 1), ("reduce", 1), ("reduce", 2), ("all_reduce", 3)]
pytestmark = pytest.mark.parametrize(
    ("mode", "num_replicas"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)]
)


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


def test_images_are_classified_by_running_statistics(mode: str) -> None:
    assert image_classification.run(mode) >= image_classification.LIMIT


def test_sentiment_is_understood_behind_negations(mode: str) -> None:
    assert understand_sentiment.run(mode) >= understand_sentiment.LIMIT


def test_sentiment_is_understood_by_an_lstm(mode: str) -> None:
    assert understand_sentiment.run(mode, net="lstm", num_passes=4) >= understand_sentiment.LIMIT


def test_the_next_word_is_guessed_nearly_as_well_as_possible(mode: str) -> None:
    assert word2vec.run(mode) <= word2vec.LIMIT
