"""`bench datafeed`: that everybody reads all rows, and that it reports."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import datafeed


def test_every_reader_goes_through_the_same_rows(tmp_path: Path) -> None:
    rows, variables = datafeed.Rows(tmp_path, 2500), datafeed.inputs()
    assert datafeed.go_through(datafeed.dataset_over(rows.text, variables)) == 2500
    assert datafeed.go_through(datafeed.dataset_over(rows.parquet, variables)) == 2500
    assert datafeed.through_memory(rows.text, variables) == 2500
    assert datafeed.through_pandas(rows.csv) == datafeed.through_pyarrow(rows.csv) == 2500
    assert datafeed.through_dataloader(rows.short) == 125


def test_it_reports_a_rate_for_each_reader() -> None:
    report = datafeed.main(1, True, argparse.Namespace(rows=1000, threads=[]))
    for name in (
        "penstock_queue",
        "penstock_memory",
        "penstock_parquet",
        "torch_dataloader",
        "pandas",
        "pyarrow",
        "read",
    ):
        assert report.figures[f"{name}_mb_per_s_core"] > 0
    assert set(report.ratios) | set(report.missing) == {"torch_dataloader", "pandas", "pyarrow", "paddle_memory"}
