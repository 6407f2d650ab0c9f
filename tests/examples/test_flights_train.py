"""The figures that the flights example reports, judged by scikit-learn, and its command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import flights_model
import train
from flights_data import CATEGORICAL, NUMERIC, Split


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12)), min_size=2, max_size=200).filter(
        lambda rows: len({label for label, _ in rows}) == 2
    )
)
def test_area_under_curve_is_that_of_scikit_learn_ties_included(rows: list[tuple[int, int]]) -> None:
    label = np.array([label for label, _ in rows], dtype=np.int64)
    score = np.array([score / 8 for _, score in rows], dtype=np.float32)
    assert train.area_under_curve(label, score) == pytest.approx(roc_auc_score(label, score), abs=1e-12)


def test_the_last_line_has_first_and_best_pass_and_the_rate() -> None:
    figures = train.Figures(auc=[0.77, 0.7912345, 0.78], num_samples=3000, train_s=0.5)
    assert json.loads(figures.as_json()) == {"auc": 0.7912, "auc_first_pass": 0.77, "samples_per_s": 6000}


def test_a_feed_has_one_column_for_each_slot_and_the_label() -> None:
    batch = Split(np.arange(20).reshape(10, 2), np.zeros((2, len(NUMERIC)), dtype=np.float32), np.array([0, 1]))
    fed = flights_model.feed(batch)
    assert set(fed) == {*CATEGORICAL, flights_model.NUMERIC_FEED, flights_model.LABEL_FEED}
    assert fed["flight"].tolist() == [[2], [3]]
    assert fed[flights_model.LABEL_FEED].tolist() == [[0], [1]]
    assert fed[flights_model.NUMERIC_FEED].shape == (2, 10)


@pytest.mark.parametrize("option", ["--passes", "--batch-size", "--fetch-every", "--rows"])
def test_a_count_of_nothing_is_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main([option, "0"])
    assert f"{option} is 0; expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "rows"), [(3, [0, 2, 5]), (8, list(range(8))), (100, list(range(8)))])
def test_fewer_rows_are_spread_over_all_of_them(asked: int, rows: list[int]) -> None:
    split = Split(np.arange(8).reshape(1, 8), np.zeros((8, 1), dtype=np.float32), np.arange(8))
    assert split.evenly(asked).label.tolist() == rows
