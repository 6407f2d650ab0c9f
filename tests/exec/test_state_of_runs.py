"""Counters of runs, and learning rates chosen by them, on replicas that have no rows in some batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as fluid
from penstock.exec.parallel import ParallelExecutor
from penstock.graph.across import Across
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes.without_rows import without_rows

L = fluid.layers


def number(value: float, dtype: str = "float64") -> Any:
    return L.fill_constant([1], dtype, value)


class Model:
    """The mean of squares of a product, trained at a rate that a Switch halves from the fourth run on."""

    def __init__(self, *, normalised: bool) -> None:
        self.main, self.startup, self.scope = fluid.Program(), fluid.Program(), fluid.Scope()
        with fluid.program_guard(self.main, self.startup):
            x = L.data("x", [3], dtype="float64")
            x = torch.nn.BatchNorm1d(3, dtype=torch.float64)(x) if normalised else x
            self.loss = L.mean(L.square(L.matmul(x, L.create_parameter([3, 1], "float64", name="w"))))
            step = L.autoincreased_step_counter(begin=0)
            rate = L.create_global_var([1], 0.0, "float64", persistable=True, name="rate")
            with L.Switch() as switch:
                with switch.case(L.less_than(step, number(3, "int64"))):
                    L.assign(number(0.1), rate)
                with switch.default():
                    L.assign(rate * 0.5, rate)
            fluid.optimizer.SGD(rate).minimize(self.loss)
        fluid.Executor(fluid.CPUPlace()).run(self.startup, scope=self.scope)

    def value(self, name: str) -> np.ndarray:
        return np.array(self.scope.find_var(name))


@pytest.mark.parametrize("reduce", [False, True])
def test_a_batch_of_one_row_leaves_no_replica_behind(reduce: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    model, strategy = Model(normalised=False), fluid.BuildStrategy()
    if reduce:
        strategy.reduce_strategy = fluid.BuildStrategy.ReduceStrategy.Reduce
    expected, rate = model.value("w"), 0.1
    executor = ParallelExecutor(False, model.loss.name, model.main, build_strategy=strategy, scope=model.scope)
    for run, batch in enumerate(np.random.default_rng(0).normal(size=(6, 4, 3))):
        rows = batch[: 1 if run in (1, 4) else 4]
        executor.run([model.loss.name], {"x": rows})
        rate = 0.1 if run < 3 else rate * 0.5
        expected = expected - rate * 2.0 * rows.T @ (rows @ expected) / len(rows)
        np.testing.assert_allclose(model.value("w"), expected, rtol=1e-10)
    executor.close()
    assert model.value("rate").tolist() == [rate]


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
def test_what_rows_reach_is_left_to_replicas_with_rows(mode: Any) -> None:
    program = Model(normalised=True).main
    graph = build_graph(program, mode=mode, num_replicas=3, active=1)
    check(graph)
    replicas: dict[str, list[int]] = {}
    for handle in graph.handles:
        replicas.setdefault(handle.op.name, []).append(handle.replica)
    counts = [op.name for op in program.operators if op.writes and "STEP_COUNTER" in op.writes[0]]
    (normalises,) = [op.name for op in program.operators if "batch_norm" in op.type and "backward" not in op.type]
    assert [sorted(replicas[name]) for name in counts] == [[0, 1, 2]]
    switches = [op.name for op in program.operators if op.type == "penstock.control.default"]
    assert len(switches) == 2
    assert all(sorted(replicas[name]) == [0, 1, 2] for name in switches)
    assert replicas[normalises] == [0]


def test_a_rank_without_rows_counts_its_runs() -> None:
    program = Model(normalised=True).main
    graph = build_graph(program, mode="all_reduce", num_replicas=1, active=1, across=Across("ring", ("ring",)))
    kept = {handle.op.name for handle in without_rows(graph, program, updates=True).handles}
    assert {op.name for op in program.operators if "control" in op.type} <= kept
    assert not any("batch_norm" in name for name in kept)
