"""Ragged sequences on a GPU: batches whose rows differ from step to step train as on CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.property.oracle import copy_of, started

import penstock as fluid
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.program.program import Program

pytestmark = pytest.mark.gpu


def feed(step: int) -> dict[str, Any]:
    random = np.random.default_rng(step)
    lengths = random.integers(0, 5, (8, 1))
    lengths[0] = 1
    return {
        "ids": random.integers(0, 50, (int(lengths.sum()), 1)),
        "ids@LENGTHS": lengths,
        "label": random.normal(size=(8, 1)).astype("float32"),
    }


@pytest.mark.parametrize("kind", ["sum", "average", "sqrt", "max", "first", "last"])
def test_a_pool_over_clicks_trains_as_on_cpu(kind: str) -> None:
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
        label = fluid.layers.data("label", [1])
        pooled = fluid.layers.sequence_pool(fluid.layers.embedding(ids, [50, 6], is_sparse=True), kind)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(pooled, 1), label))
        fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
    start, sides = started(startup), []
    for devices in ((), (torch.device("cuda", 0),)):
        memory = ReplicaMemory(copy_of(start), devices)
        core = DataParallel(main, memory, mode="all_reduce", num_replicas=1, loss_name=loss.name)
        try:
            sides.append([float(core.run(feed(step), [loss.name])[0][0]) for step in range(12)])
        finally:
            core.close()
    assert np.allclose(sides[1], sides[0], rtol=1e-4)


def test_other_rows_in_each_step_are_those_that_were_fed() -> None:
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data("ids", [1], dtype="int64", lod_level=1)
        found = fluid.layers.fc(fluid.layers.embedding(ids, [50, 6]), 2)
    start, sides = started(startup), []
    for devices in ((), (torch.device("cuda", 0),)):
        core = DataParallel(main, ReplicaMemory(copy_of(start), devices), mode="all_reduce", num_replicas=1)
        try:
            feeds = [{name: value for name, value in feed(step).items() if name != "label"} for step in range(6)]
            sides.append([core.run(given, [found.name])[0][0].clone() for given in feeds])
        finally:
            core.close()
    for wanted, got in zip(*sides, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)
