"""`bench telemetry` in small: every row is accounted for, and browsers come and go beside training."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.report import Report

from bench import telemetry

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_is_stored_shown_or_counted() -> None:
    report = Report("telemetry", 1)
    telemetry.measure_events(argparse.Namespace(events_per_s=20_000, seconds=2.0), report)
    figures = report.figures
    assert figures["rows_produced"] == 40_000
    assert (figures["rows_unaccounted"], figures["browser_rows_unaccounted"]) == (0, 0)
    assert figures["rows_stored"] > 0
    assert figures["server_share_of_a_core"] > 0


SMALL = """
from bench import telemetry
from bench.report import Report

telemetry.BLOCK_STEPS = 4
report = Report("telemetry", 1)
telemetry.measure_watched(1, report)
print(report.figures["training_with_5_over_0_browsers"])
"""


def test_training_is_compared_with_and_without_browsers() -> None:
    # in a process of its own, as the benchmark is: one that has trained unwatched stays so
    done = subprocess.run(
        [sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) > 0
