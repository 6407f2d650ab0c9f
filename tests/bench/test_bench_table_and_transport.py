"""`bench table` and `bench transport`: that contenders do the same work, that both report, and leave no process."""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bench._transport_servers import Servers
from bench.peers.hash_map import ArrayRows, MapTable
from bench.report import Report
from bench.transport import calls

from bench import peers, table, transport

Array = npt.NDArray[Any]


def test_ids_of_rows_are_different_and_from_all_of_int64() -> None:
    ids = table.ids_of(np.arange(100_000))
    assert len(np.unique(ids)) == len(ids)
    assert ids.min() < -9e18
    assert ids.max() > 9e18


@pytest.mark.parametrize("rule", table.RULES)
def test_map_is_updated_as_the_table_is(rule: str) -> None:
    ours = table.filled(500, 4, rule, Report("table", 1), rule)
    ids = table.ids_of(np.arange(500))
    gradients = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    out = np.empty((500, 4), np.float32)
    with MapTable(4) as theirs:
        for _ in range(3):
            table.push(ours, rule, ids, gradients)
            theirs.push(rule, ids, gradients, table.LR)
        theirs.pull(ids, out)
    assert np.abs(out).max() > 0.01
    assert np.allclose(ours.pull(ids), out, rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [4, 16, 20])
def test_array_gathers_rows_by_their_number(width: int) -> None:
    out = np.ones((100, width), np.float32)
    with ArrayRows(1000, width) as array:
        array.gather(np.arange(100), out)
    assert (out == 0.0).all()


def test_table_reports_rates_overhead_and_the_missing_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(table, "BATCH", 1000)
    report = table.main(1, True, argparse.Namespace(rows=300_000.0, width=16, rules=["sgd"]))
    assert report.figures["sgd_1_penstock_pull_m_rows_per_s"] > 0
    assert report.ratios["sgd_1_map_train"] > 0
    assert 10 < report.figures["sgd_overhead_bytes"] < report.figures["sgd_overhead_bytes_worst"] + 1 < 30
    assert "make peers" in report.missing["fbgemm"]


def test_maps_too_large_for_the_heap_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGEST_MAP", 10)
    report = Report("table", 1)
    with table.map_contenders(11, 4, "sgd", table.Batches(11, 4, 8), report) as contenders:
        assert contenders == {}
    assert "11 rows" in report.missing["map"]


def test_every_transport_answers_as_many_bytes_as_are_asked_for() -> None:
    size = 1 << 20
    with Servers(size) as servers, calls(servers) as contenders:
        for call in contenders.values():
            assert call(memoryview(bytes(size)), size) == size
            assert call(memoryview(bytes(8)), 0) == 0
    assert multiprocessing.active_children() == []


def test_transport_reports_every_shape() -> None:
    report = transport.main(1, True, argparse.Namespace(sizes=[1]))
    assert {f"grpcio_{shape}_1mb" for shape in transport.SHAPES} <= set(report.ratios)
    assert multiprocessing.active_children() == []
