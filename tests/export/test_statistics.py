"""Costs of operators: sums of all runs, percentiles of the sampled ones; as CSV and as Parquet."""

from __future__ import annotations

import csv
import gc
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.export.recorded import RecordedJob, events, graph, sums, used

from penstock.errors import SpecError
from penstock.export.files import whole_file
from penstock.export.statistics import COLUMNS, Costs, Row, statistics
from penstock.export.tables import parquet_writer, write_csv

MAIN, TEST = graph("relu_0", "allreduce_0", "never_0"), graph("relu_0", program="test")
DURATIONS = [7, 400, 90_000, 500, 450]


def job() -> RecordedJob:
    rows = [(i, duration, 0, 0) for i, duration in enumerate(DURATIONS)]
    first = [used(MAIN), sums([(0, 9, 900, 300), (1, 1, 50, 50)]), events(1, rows), sums([(0, 1, 90_000, 90_000)])]
    return RecordedJob(trainer_0=[*first, used(TEST), sums([(0, 2, 8, 4)])], trainer_1=[used(MAIN), *first[1:2]]).knows(
        MAIN, TEST
    )


def rows() -> list[Row]:
    return [row for table in statistics(job().recording()) for row in table]


def test_sums_are_of_all_runs_and_percentiles_of_sampled_ones() -> None:
    relu, exchange, test, other, _ = rows()
    assert (relu.process, relu.name, relu.replica, relu.bytes, relu.line) == ("trainer 0", "relu_0", 0, 0, "a.py:0")
    assert (relu.count, relu.total_ns, relu.mean_ns, relu.max_ns) == (10, 90_900, 9090.0, 90_000)
    assert (relu.sampled, relu.min_ns) == (5, 7)
    assert relu.p50_ns == pytest.approx(450, rel=0.011)
    assert relu.p99_ns == pytest.approx(90_000, rel=0.011)
    assert (exchange.name, exchange.replica, exchange.bytes, exchange.count, exchange.p50_ns) == (
        "allreduce_0", -1, 1000, 1, None
    )  # fmt: skip
    assert (test.process, test.name, test.count, test.total_ns) == ("trainer 0", "relu_0", 2, 8)
    assert test.graph != relu.graph
    assert (other.process, other.count, other.graph) == ("trainer 1", 9, relu.graph)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_percentile_is_within_its_bin_of_the_true_one(durations: list[int], share: float) -> None:
    costs = Costs(2)
    costs.add_events(events(1, [(0, duration, 1, 0) for duration in durations]))
    true = np.quantile(durations, share, method="inverted_cdf")
    assert np.isnan(costs.percentile(share)[0])
    assert costs.percentile(share)[1] == pytest.approx(true, rel=0.011)


def test_operators_that_were_not_sampled_have_no_bins() -> None:
    tracemalloc.start()
    try:
        costs = Costs(100_000)
        for op in (7, 99_999, 7):
            costs.add_events(events(1, [(0, 500 + op, op, 0)]))
        assert costs.percentile(0.5)[[7, 99_999]] == pytest.approx([507, 100_499], rel=0.011)
        assert costs.sampled()[[6, 7, 99_999]].tolist() == [0, 2, 1]
        assert tracemalloc.get_traced_memory()[1] < 100_000 * 100
    finally:
        tracemalloc.stop()


def test_costs_are_freed_once_their_rows_were_yielded() -> None:
    tables = statistics(job().recording())
    retained = [sum(type(one) is Costs for one in gc.get_objects()) for _ in tables]
    assert retained == [1, 0, 0]


def test_csv_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a.csv") as file:
        assert write_csv(statistics(job().recording()), file) == 5
    with whole_file(tmp_path / "a.parquet") as file:
        assert parquet_writer()(statistics(job().recording()), file) == 5
    with (tmp_path / "a.csv").open(newline="") as text:
        found = list(csv.DictReader(text))
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert table == [{name: getattr(row, name) for name in COLUMNS} for row in rows()]
    assert found == [{name: "" if v is None else str(v) for name, v in row.items()} for row in table]


def test_parquet_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecError, match=r"penstock\[parquet\].*--format csv"):
        parquet_writer()
