"""What is exchanged with servers is read where it arises and where it arrives, and the training is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.remotes import remotes_of_a_test
from tests.transpile.fake_servers import FakeServers, trained
from tests.transpile.recorded import Recorded, sgd

import penstock as fluid
from penstock.graph.check import check
from penstock.graph.choice import PassChoice
from penstock.graph.ssa import Graph
from penstock.ps.remote import SEND_STEP

SLOTS = ["a", "b", "c", "d"]
SERVERS = "127.0.0.1:6170,10.0.0.2:6171"


@pytest.fixture(autouse=True)
def _own_remotes() -> Iterator[None]:
    """Remotes of this test alone."""
    with remotes_of_a_test():
        yield


def clicks(again: str = "") -> Recorded:
    """Slots of one table beside numbers, of which the last stands between two slots.

    `again`: the first three slots are concatenated a second time, here or in a second layer.
    """
    main, startup = fluid.Program(), fluid.Program()
    main.random_seed = startup.random_seed = 7
    with fluid.program_guard(main, startup):
        ids = [fluid.layers.data(name, [1], dtype="int64") for name in SLOTS]
        parts: list[Any] = [fluid.layers.embedding(i, [30, 4], is_sparse=True, param_attr="table") for i in ids]
        dense = fluid.layers.data("dense", [3], dtype="float32")
        parts.insert(3, dense)
        wide = [*parts[:3], dense]
        out = fluid.layers.fc(fluid.layers.concat(parts + (wide if again == "here" else []), axis=1), 2)
        if again == "in a second layer":
            out = out * fluid.layers.fc(fluid.layers.concat(wide, axis=1), 2)
        loss = fluid.layers.mean(fluid.layers.square(out))
        sgd().minimize(loss)
    return Recorded(main, startup, loss.name)


def batch(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 9, (6, 1)) for name in SLOTS} | {"dense": rng.random((6, 3), np.float32)}


def served(*, fused: bool, kept: bool = False, again: str = "") -> tuple[Graph, dict[str, torch.Tensor]]:
    """Train three steps; return the graph and what servers have. `kept`: the table's gradient is fetched."""
    recorded, before = clicks(again), clicks(again).startup
    made = fluid.DistributeTranspiler()
    made.transpile(0, recorded.main, SERVERS, 1, startup_program=recorded.startup)
    fetched = ["table@GRAD@VALUES"] if kept else []
    feeds, choice = [batch(seed) for seed in range(3)], PassChoice(fuse_sparse=fused)
    fakes, _, graph = trained(recorded, made, before, feeds, choice, fetched)
    return graph, {**fakes.values, **{f"{name} sent": value for name, (_, value) in [_last(fakes)]}}


def _last(fakes: FakeServers) -> tuple[str, list[Any]]:
    return "table", fakes.sent["table"]


def concatenations(graph: Graph) -> list[list[str]]:
    return [list(h.op.input_names()) for h in graph.handles if h.op.type == "aten.cat.default"]


def test_training_is_the_same_to_the_bit() -> None:
    _, expected = served(fused=False)
    _, found = served(fused=True)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("again", ["here", "in a second layer"])
def test_neighbours_that_are_read_twice_are_one_view(again: str) -> None:
    _, expected = served(fused=False, again=again)
    graph, found = served(fused=True, again=again)
    check(graph)
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    views = [h.op.outputs[0] for h in graph.handles if h.op.outputs and str(h.op.outputs[0]).endswith("@BESIDE")]
    assert len(views) == len(set(views)) > 0


def test_only_what_is_apart_is_concatenated() -> None:
    before, _ = served(fused=False)
    graph, _ = served(fused=True)
    check(graph)
    assert len(concatenations(before)) > 2
    assert [len(names) for names in concatenations(graph)] == [3, 3], "three slots, numbers, a slot; for each replica"
    push = next(h for h in graph.handles if h.op.type == SEND_STEP)
    ((width, pieces),) = json.loads(str(push.op.args[-1]))["pieces"]
    assert width == 4
    assert [column for _, _, column in pieces] == [0, 4, 8, 15] * 2


def test_a_gradient_that_is_fetched_is_still_made() -> None:
    graph, _ = served(fused=True, kept=True)
    check(graph)
    assert any(h.op.type == "aten.cat.default" and "table@GRAD@VALUES" in "".join(h.makes()) for h in graph.handles)
