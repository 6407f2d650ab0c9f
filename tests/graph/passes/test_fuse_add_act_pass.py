"""A sum and its activation as one operator: the same bits, one handle, and what is fetched is still there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.property.networks import NETWORKS, Feed, Network
from tests.property.oracle import assert_passes_keep_results

import penstock as fluid
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import MatrixKernels, PassChoice
from penstock.graph.passes.fuse_add_act import fuse_add_act
from penstock.graph.ssa import Graph, Mode
from penstock.program.program import Program
from penstock.scope import Scope

FUSED = PassChoice(fuse_add_act=True, matrix_kernels=False)
ACTS = ("relu", "sigmoid", "tanh", "scale")


def act(x: Any, name: str) -> Any:
    """Apply an activation by Fluid's name."""
    return fluid.layers.scale(x, 0.5) if name == "scale" else getattr(fluid.layers, name)(x)


def sums(name: str, dtype: str = "float32") -> Network:
    """A layer, a sum of two, a sum with a row, each followed by an activation."""
    main, startup = Program(seed=6), Program(seed=6)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[9], dtype=dtype)
        y = fluid.layers.data(name="y", shape=[1], dtype=dtype)
        left = act(fluid.layers.fc(x, 7), name)
        both = act(fluid.layers.elementwise_add(left, fluid.layers.fc(x, 7, bias_attr=False)), name)
        row = fluid.layers.create_parameter([7], dtype, name="row")
        last = fluid.layers.fc(act(both + row, name), 1)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(last, y))
        fluid.optimizer.SGD(0.05).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {"x": random.normal(size=(rows, 9)).astype(dtype), "y": random.normal(size=(rows, 1)).astype(dtype)}

    return Network(f"sums_{name}", main, startup, loss.name, feed, (last.name,))


def types(graph: Graph) -> list[str]:
    """Return the types of a graph's operators."""
    return [h.op.type for h in graph.handles]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ACTS)
def test_sums_keep_every_bit(name: str, dtype: str) -> None:
    core = assert_passes_keep_results(sums(name, dtype), FUSED, mode="all_reduce", num_replicas=2)
    symbol = core.program.symbols[0]
    found = types(core.sized_graph(core.shares([{symbol: 3}] * 2, [3, 3])))
    assert found.count("penstock.fused_add_act.default") == 4
    assert found.count("penstock.product.default") == (0 if name == "scale" else 2)


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_keep_every_bit(name: str, mode: Mode) -> None:
    assert_passes_keep_results(NETWORKS[name](), FUSED, mode=mode, num_replicas=2)


def test_a_layer_becomes_one_product() -> None:
    main = NETWORKS["ctr_dnn"]().main
    built = build_graph(main, mode="all_reduce", num_replicas=1, active=1)
    graph = fuse_add_act(built, main)
    check(graph)
    assert types(built).count("aten.relu.default") == types(graph).count("penstock.product.default") == 2
    assert "aten.relu.default" not in types(graph)
    assert len(graph.handles) == len(built.handles) - 2


def test_a_fetched_sum_is_left_alone() -> None:
    network = sums("relu")
    built = build_graph(network.main, mode="all_reduce", num_replicas=1, active=1)
    fetched = [h.op.input_names()[0] for h in built.handles if h.op.type == "aten.relu.default"]
    names = [built.variables[n].name for n in fetched]
    assert fuse_add_act(built, network.main, names) is built
    assert types(fuse_add_act(built, network.main, names[:1])).count("aten.relu.default") == 1


def test_a_sum_with_another_reader_is_left_alone() -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data(name="x", shape=[3], dtype="float32")
        total = x + x
        fluid.layers.mean(fluid.layers.relu(total) * total)
    built = build_graph(main, mode="all_reduce", num_replicas=1, active=1)
    assert fuse_add_act(built, main) is built


def scaled_sum(left: str, right: str) -> Network:
    """(a + b) * 2 of two dtypes, and relu of the sum of the first with itself."""
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        a = fluid.layers.data(name="a", shape=[3], dtype=left)
        b = fluid.layers.data(name="b", shape=[3], dtype=right)
        made = ((a + b) * 2, fluid.layers.relu(a + a))
        names = tuple(m.name for m in made)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {"a": random.integers(-5, 5, (rows, 3)).astype(left), "b": random.normal(size=(rows, 3)).astype(right)}

    return Network(f"scaled_{left}_{right}", main, Program(seed=1), names[0], feed, names)


@pytest.mark.parametrize(
    ("left", "right", "fused"),
    [
        ("int64", "int64", 0),
        ("int32", "int64", 0),
        ("int64", "float32", 0),
        ("float32", "float64", 1),
        ("float32", "float32", 2),
        ("float64", "float64", 2),
    ],
)
def test_only_sums_of_one_floating_dtype_are_fused(left: str, right: str, fused: int) -> None:
    network = scaled_sum(left, right)
    core = DataParallel(network.main, ReplicaMemory(Scope()), mode="all_reduce", num_replicas=1, choice=FUSED)
    try:
        feed = network.feed(4, 0)
        got = [replicas[0] for replicas in core.run(feed, list(network.fetches))]
        found = types(core.sized_graph(core.shares([{network.main.symbols[0]: 4}], [4])))
    finally:
        core.close()
    a, b = torch.from_numpy(feed["a"]), torch.from_numpy(feed["b"])
    for value, wanted in zip(got, ((a + b) * 2, (a + a).relu()), strict=True):
        assert value.dtype == wanted.dtype
        assert torch.equal(value, wanted)
    assert found.count("penstock.fused_add_act.default") == fused


def test_a_fused_layer_may_take_another_kernel() -> None:
    choice = PassChoice(fuse_add_act=True, matrix=MatrixKernels(forced="onednn"))
    core = assert_passes_keep_results(sums("relu"), choice, mode="reduce", num_replicas=2, rtol=1e-5)
    symbol = core.program.symbols[0]
    found = core.sized_graph(core.shares([{symbol: 3}] * 2, [3, 3])).handles
    products = [h.op.args[3:] for h in found if h.op.type == "penstock.product.default"]
    assert (False, False, "relu", "onednn") in products
    assert all(str(args[-1]).startswith("onednn") for args in products)
