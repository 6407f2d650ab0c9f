"""`penstock export` before it asks a server: options that do not fit, names of files, what it says in the end."""

from __future__ import annotations

from typing import cast

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.client import Job
from penstock.command.export import file_name, sentence


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "mlflow"], "--tracking-uri"),
        (["--format", "mlflow", "--tracking-uri", "http://127.0.0.1:1", "-o", "x"], "leave out"),
        (["--format", "csv", "--tracking-uri", "http://127.0.0.1:1"], "--format mlflow"),
        (["--format", "svg"], "perfetto"),
        ([], "--format"),
    ],
)
def test_options_that_do_not_fit_are_a_usage_error(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["export", "ctr", *options], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert said in result.output


def test_a_file_is_named_after_its_job() -> None:
    job = cast(Job, {"name": "../my job/7", "id": "0190aaaa-bbbb-cccc-dddd-eeeeffff1234"})
    assert file_name(job, ".csv") == "my-job-7-ffff1234.csv"
    assert file_name(cast(Job, {**job, "name": "…"}), ".csv") == "job-ffff1234.csv"


def test_losses_are_said() -> None:
    said = {"slices": 12345, "dropped": {"OP_EVENTS": 7, "OP_SUMS": 1}, "thinned": ["loss"]}
    assert sentence(said) == (
        "slices: 12,345; 8 rows were dropped before they were recorded; thinned by the server: loss"
    )
