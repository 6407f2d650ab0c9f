"""A save in the middle of a GEO training, over a server on another thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.endpoints import free_endpoint

import penstock as fluid
from penstock.fleet import saving
from penstock.io.saves.files import read_manifest, read_tensors
from penstock.io.saves.variables import manifest_path

ROWS, WAIT_S = 50, 100.0


class Trainer:
    """A trainer that exchanges after each step."""

    def __init__(self, number: int, endpoint: str) -> None:
        self.main, self.startup = fluid.Program(), fluid.Program()
        self.startup.random_seed = 3
        with fluid.program_guard(self.main, self.startup):
            ids, y = fluid.layers.data("ids", [1], dtype="int64"), fluid.layers.data("y", [4])
            rows: Any = fluid.layers.embedding(ids, [ROWS, 4], is_sparse=True, param_attr="table")
            loss = fluid.layers.mean(fluid.layers.square_error_cost(rows, y))
            fluid.optimizer.SGD(0.5).minimize(loss)
        self.origin = self.main.clone()
        config = fluid.DistributeTranspilerConfig()
        config.geo_sgd_mode, config.geo_sgd_need_push_nums = True, 1
        self.transpiler = fluid.DistributeTranspiler(config)
        self.transpiler.transpile(number, self.main, endpoint, 2, False, self.startup)
        self.scope, self.exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())

    def step(self, ids: Sequence[int]) -> None:
        feed = {"ids": np.array(ids).reshape(-1, 1), "y": np.full((len(ids), 4), 3.0, "float32")}
        self.exe.run(self.main, feed, scope=self.scope)

    def table(self) -> torch.Tensor:
        found: torch.Tensor | None = self.scope.find("table")
        assert found is not None
        return found


def serve(of: Trainer, endpoint: str) -> fluid.Scope:
    """Be the server until both trainers have left."""
    program, startup = of.transpiler.get_pserver_programs(endpoint)
    scope, exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    exe.run(program, scope=scope)
    return scope


def test_a_save_of_one_worker_has_the_updates_of_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_PS_SAVE_DIRS", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_PS_START_S", "60")
    endpoint = free_endpoint()
    first, second = Trainer(0, endpoint), Trainer(1, endpoint)
    with ThreadPoolExecutor(3) as pool:
        serving = pool.submit(serve, Trainer(0, endpoint), endpoint)
        for begun in [pool.submit(t.exe.run, t.startup, scope=t.scope) for t in (first, second)]:
            begun.result(WAIT_S)
        first.step([1])
        for _ in range(3):
            second.step([7])
        second.exe.close()  # everything that it did is told
        with fluid.scope_guard(first.scope):
            saving.save_persistables(tmp_path, first.main, first.startup, first.origin)
        for _ in range(3):
            first.step([1])
        first.exe.close()
        served = serving.result(WAIT_S).find("table")
    assert served is not None
    manifest = read_manifest(manifest_path(tmp_path, None))
    values = read_tensors(tmp_path / manifest.values.name, {v.name: v for v in manifest.variables})
    assert served[7].abs().max() > 0.1, "the other trainer has changed row 7"
    assert torch.equal(values["table"][7], served[7])
    assert torch.allclose(first.table()[7], served[7], rtol=0, atol=1e-6)
