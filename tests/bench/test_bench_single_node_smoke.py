"""The benchmarks of the engine, the exchange, the trace and the grid: that they measure what they say, and end."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from bench._gloo import GlooPair
from bench._paddle_chain import PaddleChain
from bench.engine import add_costs, original_executor, script_chain
from bench.report import Report
from bench.workloads import Workload, criteo

from bench import advise, grid, peers, sync, tracing
from penstock.native.engine import Engine


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Workload:
    """CTR-DNN over a table of 500 rows, two batches of 16."""
    monkeypatch.setenv("CPU_NUM", "2")
    return criteo(num_batches=2, batch_size=16, rows=500)


def test_sync_reports_every_size_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    report = sync.main(1, True, argparse.Namespace(sizes=[1], width=64))
    assert report.ratios["gloo_1mb"] > 0
    assert report.figures["penstock_1mb_ms"] > 0
    assert report.figures["program_exchange_handles"] >= 1
    assert multiprocessing.active_children() == []


def test_a_dead_gloo_process_fails_the_measurement_and_its_peer() -> None:
    pair = GlooPair()
    pair.__enter__()
    victim = multiprocessing.active_children()[0].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="Gloo process has ended"):
        pair.all_reduce(1 << 20, 1)
    pair.__exit__(RuntimeError, None, None)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_measured_exchange_leaves_the_sum_on_both_replicas(parts: int) -> None:
    engine = Engine(2, max_running=2, intra_op_threads=1)
    sync.check_sum(engine, parts)
    engine.close()


def test_pairs_lead_in_turns_and_divide_the_first_by_the_second() -> None:
    calls: list[str] = []

    def block(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    ratios = tracing.paired_ratios(lambda: block("a", 3.0), lambda: block("b", 2.0), 3)
    assert ratios == [1.5, 1.5, 1.5]
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"


def test_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    few = [0.9, 1.0, 1.1, 1.2, 0.8]
    wide, narrow = tracing.confidence(few), tracing.confidence(few * 40)
    assert wide[0] <= 1.0 <= wide[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_blocks_without_trace_emit_no_events_and_reenable_it(workload: Workload) -> None:
    training = tracing.Training(workload)
    engine = training.executor.core.engine
    training.steps(1)
    engine.drain()
    assert training.traced(2, on=False) > 0
    assert len(engine.drain()["op"]) == 0
    training.steps(1)
    assert len(engine.drain()["op"]) > 0
    training.executor.close()


def test_watched_steps_are_drained_by_a_session_whose_agent_ends(workload: Workload) -> None:
    training = tracing.Training(workload)
    training.steps(1)
    report = Report("tracing", 1)
    tracing.measure_watched(training, 1, report)
    assert report.figures["ctr_watched_over_unwatched"] > 0
    assert report.figures["watched_drain_cpu_s"] > 0
    assert multiprocessing.active_children() == []
    training.executor.close()


def test_profiled_eager_trains_the_same_model(workload: Workload) -> None:
    eager = tracing.EagerCtr(workload)
    before = eager.model.dense_parameters()[0].detach().clone()
    assert eager.profiled(1) > 0
    assert not torch.equal(before, eager.model.dense_parameters()[0])


def test_overhead_is_wall_time_less_the_frameworks_kernel_time() -> None:
    report = Report("engine", 1)
    cost = {"direct": 0.4, "engine_1_thread": 0.45, "engine_2_threads": 0.46, "torch_eager": 0.9, "torch_script": 0.6}
    add_costs({**cost, "program": 0.5, "paddle_pe": 9.0, "paddle_direct": 1.0}, report)
    assert report.figures["added_us_per_operator"] == pytest.approx(0.05)
    assert report.figures["program_added_us_per_operator"] == pytest.approx(0.1)
    assert report.ratios["paddle_pe"] == pytest.approx(18.0)
    assert report.ratios["paddle_pe_overhead"] == pytest.approx(80.0)
    assert report.ratios["paddle_pe_bare"] == pytest.approx(20.0)
    assert report.ratios["paddle_pe_bare_overhead"] == pytest.approx(160.0)
    assert "cross_thread_edge_us" not in report.figures


def test_scripted_chain_adds_as_often_as_the_others() -> None:
    one = torch.ones(1)
    assert script_chain(7, one)(torch.zeros(1), one).item() == 7.0


def test_missing_peer_environment_is_said_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    report = Report("engine", 1)
    with original_executor(report) as contenders:
        assert contenders == {}
    assert "make peers" in report.missing["paddle_pe"]


def test_a_peer_process_that_cannot_start_fails_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench._paddle_chain.environment", lambda name: Path(sys.executable))  # it has no paddle
    with pytest.raises(RuntimeError, match=r"bench\._paddle_chain 10"), PaddleChain(10):
        pass


def test_grid_has_the_recommended_cell_and_no_mode_for_1_replica() -> None:
    cells = grid.cells(2)
    assert grid.best_practice(2) in cells
    assert len(cells) == 15
    assert {cell.mode for cell in cells if cell.cpu_num == 1} == {"reduce"}


def test_grid_runs_every_cell_and_marks_the_best(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [grid.best_practice(1), grid.Cell(2, 2, "all_reduce")]
    monkeypatch.setattr(grid, "build", lambda name, **options: workload)
    monkeypatch.setattr(grid, "cells", lambda cores: cells)
    report = grid.main(1, False, argparse.Namespace(workload="criteo", steps=1, cores=1))
    assert all(report.figures[f"{cell.name}_samples_per_s"] > 0 for cell in cells)
    assert 0 < report.figures["best_practice_of_best"] <= 1
    assert capsys.readouterr().out.count("*") == 1


def test_advise_predicts_and_measures_every_setting(
    workload: Workload, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise, "build", lambda name, **options: workload)
    monkeypatch.setattr(advise, "RECORDED_STEPS", 4)
    report = advise.main(1, False, argparse.Namespace(workload=["ctr"], steps=2))
    assert report.figures["ctr_settings"] >= 4
    assert report.figures["ctr_error"] >= 0 and 0 < report.ratios["ctr_advised_of_best"] <= 1
    printed = capsys.readouterr().out
    assert printed.count("(recorded)") == 1 and "median error" in printed
