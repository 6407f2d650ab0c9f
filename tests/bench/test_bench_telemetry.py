"""`bench telemetry` in small: every row is accounted for, and browsers come and go beside training."""

from __future__ import annotations

import argparse

import pytest
from bench.report import Report

from bench import telemetry


def test_every_row_is_stored_shown_or_counted() -> None:
    report = Report("telemetry", 1)
    telemetry.measure_events(argparse.Namespace(events_per_s=20_000, seconds=2.0), report)
    figures = report.figures
    assert figures["rows_produced"] == 40_000
    assert (figures["rows_unaccounted"], figures["browser_rows_unaccounted"]) == (0, 0)
    assert figures["rows_stored"] > 0
    assert figures["server_share_of_a_core"] > 0


def test_training_is_compared_with_and_without_browsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "BLOCK_STEPS", 4)
    report = Report("telemetry", 1)
    telemetry.measure_watched(1, report)
    assert report.figures["training_with_5_over_0_browsers"] > 0
