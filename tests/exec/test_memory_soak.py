"""Long runs: memory stays where it was. Not part of `make test`; see `make soak`."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as fluid

SLOTS, ROWS, STEPS, WARM = 26, 10_001, 10_000, 500
SIZES = [1, 2, 3, 7, *range(30, 62)]  # more combinations than plans are kept for


def network() -> tuple[Any, Any, str]:
    """CTR-DNN with one shared table, small enough for ten thousand steps."""
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 5
    with fluid.program_guard(main, startup):
        table = fluid.ParamAttr(name="table")
        parts = [
            fluid.layers.embedding(
                fluid.layers.data(f"c{i}", [1], dtype="int64"), [ROWS, 10], is_sparse=True, param_attr=table
            )
            for i in range(SLOTS)
        ]
        hidden = fluid.layers.concat(parts, axis=1)
        for _ in range(3):
            hidden = fluid.layers.fc(hidden, 32, act="relu")
        predict = fluid.layers.fc(hidden, 2, act="softmax")
        label = fluid.layers.data("label", [1], dtype="int64")
        loss = fluid.layers.mean(fluid.layers.cross_entropy(predict, label))
        fluid.optimizer.Adam(1e-3).minimize(loss)
    return main, startup, loss.name


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["AllReduce", "Reduce"])
def test_resident_memory_is_flat_over_ten_thousand_steps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    main, startup, loss = network()
    scope = fluid.Scope()
    with fluid.scope_guard(scope):
        fluid.Executor().run(startup)
        strategy = fluid.BuildStrategy()
        strategy.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
        trainer = fluid.ParallelExecutor(False, loss_name=loss, main_program=main, build_strategy=strategy)
        random = np.random.default_rng(0)
        process = psutil.Process()
        resident: list[int] = []
        for step in range(STEPS):
            rows = SIZES[step % len(SIZES)]
            feed = {f"c{i}": random.integers(0, ROWS, size=(rows, 1)) for i in range(SLOTS)}
            feed["label"] = random.integers(0, 2, size=(rows, 1))
            trainer.run([loss] if step % 10 == 0 else [], feed=feed)
            if step >= WARM and step % 100 == 0:
                gc.collect()
                resident.append(process.memory_info().rss)
        trainer.close()
    early, late = np.median(resident[:5]), np.median(resident[-5:])
    assert abs(late - early) / early < 0.02, f"resident memory went from {early / 2**20:.1f} to {late / 2**20:.1f} MiB"
