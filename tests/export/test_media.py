"""Tables and histograms of a job as CSV files, read back by the csv module."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tests.export.recorded import T0_NS, RecordedJob

from penstock.errors import SpecError
from penstock.export.media import write_media
from penstock.telemetry.media import Histogram, Table


def job() -> RecordedJob:
    made = RecordedJob()
    rows: list[list[object]] = [['a, "quoted"\nline', 0.5], ["dög", None]]
    made.media_of = {
        "eval/confusion": [(step, Table(["label", "share"], rows[: step + 1]).content()) for step in range(2)],
        "eval confusion": [(3, Histogram.of_counts([0, 1, 4], [2, 3]).content())],
    }
    return made


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_each_step_is_a_file_in_a_folder_of_its_name(tmp_path: Path) -> None:
    said = write_media(job().recording(), tmp_path / "out")
    assert said == {"names": 2, "files": 3, "rows": 5}
    found = {str(path.relative_to(tmp_path / "out")): read(path) for path in (tmp_path / "out").rglob("*.csv")}
    at = [f"attempt1-step{step:09d}-{T0_NS + step}.csv" for step in (0, 1, 3)]
    assert found == {
        f"eval-confusion/{at[0]}": [["label", "share"], ['a, "quoted"\nline', "0.5"]],
        f"eval-confusion/{at[1]}": [["label", "share"], ['a, "quoted"\nline', "0.5"], ["dög", ""]],
        f"eval-confusion~2/{at[2]}": [["low", "high", "count"], ["0.0", "1.0", "2"], ["1.0", "4.0", "3"]],
    }


def test_a_job_without_any_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no tables and histograms"):
        write_media(RecordedJob().recording(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SpecError, match="is not empty"):
        write_media(job().recording(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
