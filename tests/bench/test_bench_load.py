"""Reports say how busy the machine was before: `load_before`."""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

import pytest
from bench.peers.contender import OURS
from bench.peers.race import Results

from bench import workloads


def raced(keys: list[str], **_: Any) -> Results:
    """Return what every contender would come to, without a race."""
    return Results(10, {key: [1.0] for key in keys}, dict.fromkeys(keys, 1.0), {key: [0.5] for key in keys})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ctr", {"workload": "criteo", "steps": 10, "peers": "", "column": "installed"}),
        ("pserver", {"hosts": False, "steps": 10, "peers": ""}),
    ],
)
def test_a_race_reports_the_load_before_it(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"bench.{name}")
    loads = iter([(0.25, 9.0, 9.0)])
    monkeypatch.setattr(os, "getloadavg", lambda: next(loads, (8.0, 9.0, 9.0)))
    small = workloads.criteo(num_batches=2, batch_size=16, rows=101)
    monkeypatch.setattr(workloads, "build", lambda name: small)
    monkeypatch.setattr(module, "race", raced)
    monkeypatch.setattr(module, "check_same_training", lambda results, workload: [])
    report = module.main(1, True, argparse.Namespace(**options))
    assert report.figures["load_before"] == 0.25
    assert report.figures[f"{OURS}_samples_per_s"] > 0
