"""What may be captured as a CUDA graph, told from a plan alone; that a replay is right takes a card: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.property.networks import ctr_dnn, fit_a_line
from tests.property.oracle import started

import penstock as fluid
from penstock.exec.card_feeds import CardFeeds
from penstock.exec.data_parallel import DataParallel
from penstock.exec.lowering import Lowered
from penstock.exec.memory import ReplicaMemory
from penstock.exec.step_graphs import obstacle
from penstock.program.program import Program
from penstock.program.sequences import row_symbols

L: Any = fluid.layers


def lowered_of(build: Callable[[], tuple[Any, dict[str, Any]]]) -> Lowered:
    """Return the plan of a program, as for a card, after a run on CPU. `build` returns what is fetched, and a feed."""
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        fetched, feed = build()
    memory = ReplicaMemory(started(startup), (torch.device("cpu"),))
    core = DataParallel(main, memory, mode="all_reduce", num_replicas=1)
    core.run(feed, [fetched.name])
    (plan,) = core._plans.values()
    plan.card_feeds = CardFeeds([list(own.values()) for own in plan.feed_slots], [], vary=any(row_symbols(main)))
    core.engine.close()
    return plan


X = {"x": np.ones((4, 3), "float32")}


def test_a_plain_step_has_no_obstacle() -> None:
    assert obstacle(lowered_of(lambda: (L.fc(L.data("x", [3]), 2, act="relu"), X))) == ""


def test_training_steps_have_no_obstacle_but_dropouts_state() -> None:
    for network, wanted in ((fit_a_line(), ""), (ctr_dnn("adam"), "random numbers")):
        memory = ReplicaMemory(started(network.startup), (torch.device("cpu"),))
        core = DataParallel(network.main, memory, mode="all_reduce", num_replicas=1, loss_name=network.loss)
        core.run(network.feed(4, 0), [network.loss])
        (plan,) = core._plans.values()
        assert wanted in obstacle(plan)
        assert bool(wanted) == bool(obstacle(plan))
        plan.random_slots = (0,) * len(plan.random_states)  # they are on the card
        assert obstacle(plan) == ""
        core.close()


def test_rows_that_differ_between_steps_are_an_obstacle() -> None:
    def build() -> tuple[Any, dict[str, Any]]:
        ids = L.data("ids", [1], dtype="int64", lod_level=1)
        return L.fc(L.embedding(ids, [9, 2]), 2), {
            "ids": np.ones((5, 1), "int64"),
            "ids@LENGTHS": np.array([[2], [3]]),
        }

    plan = lowered_of(build)
    assert plan.varying == []  # no constant follows from the rows, but the feeds do
    assert "sizes differ" in obstacle(plan)


def test_an_operator_that_looks_at_values_is_one_too() -> None:
    def build() -> tuple[Any, dict[str, Any]]:
        ids = L.data("ids", [3], dtype="int64")
        return L.hash(ids, 100), {"ids": np.ones((4, 3), "int64")}

    assert "may look at values" in obstacle(lowered_of(build))
