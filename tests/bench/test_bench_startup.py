"""`bench startup` times real processes part by part, and compares round by round."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from bench.peers.first_step import KINDS
from bench.report import Report

from bench import peers, startup


def test_a_process_is_timed_from_its_start_by_parts() -> None:
    report = startup.main(1, json=True, extra=argparse.Namespace(workload=["criteo"], peers=[]))
    figures = report.figures
    parts = [f"criteo_penstock_{part}_cpu_s" for part in ("import_torch", "recording", "startup_program", "first_run")]
    assert all(figures[part] > 0.0 for part in parts)
    assert sum(figures[part] for part in parts) == pytest.approx(figures["criteo_penstock_cpu_s"], abs=0.1)
    assert figures["criteo_penstock_wall_s"] > 0.0
    beyond = figures["criteo_penstock_cpu_s"] - figures["criteo_import_torch_cpu_s"]
    assert figures["criteo_beyond_torch_cpu_s"] == pytest.approx(beyond, abs=0.002)
    assert not report.ratios and not report.missing


def test_ratios_are_of_one_round_and_the_first_is_left_out() -> None:
    def rounds(*seconds: float) -> list[startup.Parts]:
        return [{"data": (9.0, 9.0), "first_run": (one, 2 * one)} for one in seconds]

    report = Report("startup", 3)
    raced = {"import_torch": rounds(9, 1, 1, 1), "penstock": rounds(9, 2, 2, 4), "paddle_pe": rounds(99, 6, 8, 8)}
    startup.add(report, "lenet", raced)
    assert report.ratios == {"lenet_paddle_pe": 3.0, "lenet_paddle_pe_wall": 3.0}
    assert report.figures["lenet_beyond_torch_cpu_s"] == 1
    assert report.figures["lenet_penstock_cold_cpu_s"] == 9
    assert report.figures["lenet_paddle_pe_first_run_cpu_s"] == 8


def test_a_peer_without_environment_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    report = Report("startup", 2)
    assert startup.race(["paddle_pe"], tmp_path / "no workload", 2, report) == {}
    assert "make peers" in report.missing["paddle_pe"]


def test_a_process_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"penstock ended with 1:(.|\n)*FileNotFoundError"):
        startup.first_step("penstock", tmp_path / "none.npz", tmp_path)


def test_every_contender_has_an_environment() -> None:
    assert KINDS.keys() == startup.ENVIRONMENTS.keys()


def test_a_peer_that_is_not_known_is_an_error() -> None:
    with pytest.raises(SystemExit, match="--peers has torch_egaer; expected torch_eager"):
        startup.main(1, json=True, extra=argparse.Namespace(workload=["criteo"], peers=["torch_egaer"]))
