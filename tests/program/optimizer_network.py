"""A small network for tests of optimizers, and three ways to train it: Executor, two replicas in each mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import penstock as fluid
from penstock.scope import Scope

Array = NDArray[np.float64]
Parts = tuple[Any, Any, Any]
HOWS = ["executor", "AllReduce", "Reduce"]
HEIGHT, WIDTH, ROWS, STEPS = 9, 3, 6, 10
UNUSED = [7, 8]  # rows that no batch asks for


def batches(number: int = STEPS) -> Iterator[dict[str, Any]]:
    draw = np.random.default_rng(2)
    for _ in range(number):
        yield {
            "ids": draw.integers(0, min(UNUSED), size=(ROWS, 2)),
            "label": draw.normal(size=(ROWS, 2)),
        }


@functools.cache  # recording takes longer than all that is done with it
def network(make: Callable[[], Any], *, is_sparse: bool, weight: Any = "weight") -> Parts:
    """Return (main, startup, loss) of a network whose parameters are `table` and `weight`; nobody may change it."""
    main, startup = fluid.Program(), fluid.Program()
    startup.random_seed = 4
    with fluid.program_guard(main, startup):
        L: Any = fluid.layers
        ids, label = fluid.data("ids", [-1, 2], "int64"), fluid.data("label", [-1, 2], "float64")
        rows = fluid.embedding(ids, [HEIGHT, WIDTH], is_sparse, param_attr="table", dtype="float64")
        out = L.fc(L.reduce_sum(rows, 1), 2, param_attr=weight, bias_attr=False)
        loss = L.mean(L.square_error_cost(out, label))
        make().minimize(loss)
    return main, startup, loss


def numpy_of(scope: Scope, name: str) -> Array:
    found = scope.find(name)
    assert found is not None, name
    return np.array(found.numpy(), dtype=np.float64)


def trained(monkeypatch: pytest.MonkeyPatch, parts: Parts, how: str) -> tuple[Scope, dict[str, Array]]:
    """Run all batches; return (scope afterwards, parameters before)."""
    main, startup, loss = parts
    scope, exe = Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    before = {n: numpy_of(scope, n) for n in ("table", "weight")}
    if how == "executor":
        for feed in batches():
            exe.run(main, feed, [loss], scope=scope)
        return scope, before
    monkeypatch.setenv("CPU_NUM", "2")
    build = fluid.BuildStrategy()
    build.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, how)
    parallel = fluid.ParallelExecutor(False, loss.name, main, build_strategy=build, scope=scope)
    for feed in batches():
        parallel.run([loss], feed)
    parallel.close()
    return scope, before
