"""Max pooling by 2 x 2 in operators of our own: the same bits, no relu and no positions but where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.property.networks import Feed, Network
from tests.property.oracle import assert_passes_keep_results

import penstock as fluid
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.passes.fuse_max_pool import fuse_max_pool
from penstock.graph.ssa import Graph
from penstock.program.program import Program

FUSED = PassChoice(matrix_kernels=False)
POOL, TORCHS = "penstock.max_pool_2x2.default", "aten.max_pool2d_with_indices.default"
BACK = "penstock.max_pool_2x2_backward.default"
Layers = Callable[[Any], Any]


def pool(x: Any, size: int = 2, stride: int = 2, padding: int = 0) -> Any:
    """Max pooling."""
    return fluid.layers.pool2d(x, size, "max", stride, padding)


def convolution(x: Any, act: str | None = "relu") -> Any:
    """A convolution of three channels that keeps the image's size."""
    return fluid.layers.conv2d(x, 3, 3, padding=1, act=act)


def network(layers: Layers, *, dtype: str = "float32", size: int = 8) -> Network:
    """Layers on images of one channel, then a linear layer and SGD."""
    main, startup = Program(seed=6), Program(seed=6)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[1, size, size], dtype=dtype)
        y = fluid.layers.data(name="y", shape=[1], dtype=dtype)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(layers(x), 1), y))
        fluid.optimizer.SGD(0.05).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        images = random.normal(size=(rows, 1, size, size)).round(1)  # with equal values
        return {"x": images.astype(dtype), "y": random.normal(size=(rows, 1)).astype(dtype)}

    return Network("pooled", main, startup, loss.name, feed)


def types(graph: Graph) -> list[str]:
    """Return the types of a graph's operators."""
    return [h.op.type for h in graph.handles]


def built(layers: Layers, **settings: Any) -> tuple[Graph, Program]:
    """Return a network's graph without passes, and its program."""
    main = network(layers, **settings).main
    return build_graph(main, mode="all_reduce", num_replicas=1, active=1), main


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
def test_two_layers_keep_every_bit(dtype: str, mode: Any) -> None:
    two = network(lambda x: pool(convolution(pool(convolution(x)))), dtype=dtype)
    core = assert_passes_keep_results(two, FUSED, mode=mode, num_replicas=2)
    found = types(core.sized_graph(core.shares([{core.program.symbols[0]: 3}] * 2, [3, 3])))
    assert found.count(POOL) == found.count(BACK) == 4
    assert not {TORCHS, "aten.relu.default", "aten.threshold_backward.default"} & set(found)


def test_relu_joins_if_only_the_pooling_reads_it() -> None:
    def twice(x: Any) -> Any:
        rectified = convolution(x)
        return fluid.layers.concat([pool(rectified), pool(rectified, stride=1, size=1)[:, :, :4, :4]], axis=1)

    core = assert_passes_keep_results(network(twice), FUSED, mode="all_reduce", num_replicas=1)
    found = types(core.sized_graph(core.shares([{core.program.symbols[0]: 3}], [3])))
    assert [found.count(t) for t in (POOL, BACK, TORCHS, "aten.relu.default")] == [1, 1, 1, 1]


def test_a_relu_that_something_without_a_gradient_reads_is_made() -> None:
    def watched(x: Any) -> Any:
        rectified = convolution(x)
        fluid.layers.reduce_max(rectified)
        return pool(rectified)

    core = assert_passes_keep_results(network(watched), FUSED, mode="all_reduce", num_replicas=1)
    found = types(core.sized_graph(core.shares([{core.program.symbols[0]: 3}], [3])))
    assert [found.count(t) for t in (POOL, BACK, "aten.relu.default", "aten.threshold_backward.default")] == [1] * 4


@pytest.mark.parametrize("first", [lambda x: convolution(x, None), lambda x: convolution(x, "tanh"), lambda x: x])
def test_without_a_relu(first: Layers) -> None:
    core = assert_passes_keep_results(network(lambda x: pool(first(x))), FUSED, mode="all_reduce", num_replicas=1)
    found = [h.op for h in core.sized_graph(core.shares([{core.program.symbols[0]: 3}], [3])).handles]
    assert [op.args[1] for op in found if op.type == POOL] == [False]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: pool(x, size=3),
        lambda x: pool(x, stride=1),
        lambda x: pool(x, padding=1),
        lambda x: fluid.layers.pool2d(x, 2, "avg", 2),
    ],
)
def test_other_windows_are_torchs(other: Layers) -> None:
    graph, main = built(lambda x: other(convolution(x)))
    assert fuse_max_pool(graph, main) is graph


def test_images_of_odd_size_are_torchs() -> None:
    graph, main = built(lambda x: pool(convolution(x)), size=7)
    assert fuse_max_pool(graph, main) is graph


def test_what_is_fetched_is_made() -> None:
    graph, main = built(lambda x: pool(convolution(x)))
    made = {h.op.type: [graph.variables[n].name for n in h.makes()] for h in graph.handles}
    positions, rectified = made[TORCHS][1], made["aten.relu.default"][0]
    assert fuse_max_pool(graph, main, [positions]) is graph
    for fetched in (rectified, made["aten.max_pool2d_with_indices_backward.default"][0]):
        fused = fuse_max_pool(graph, main, [fetched])
        check(fused)
        assert fetched in {fused.variables[n].name for h in fused.handles for n in h.makes()}
        assert types(fused).count(POOL) == types(fused).count("aten.relu.default") == 1
    whole = fuse_max_pool(graph, main, [made[TORCHS][0]])
    assert POOL in types(whole)
    assert "aten.relu.default" not in types(whole)


def test_a_program_that_does_not_train() -> None:
    main = Program(seed=1)
    with fluid.program_guard(main, Program(seed=1)):
        x = fluid.layers.data(name="x", shape=[1, 8, 8], dtype="float32")
        made = pool(fluid.layers.relu(x))
    graph = build_graph(main, mode="all_reduce", num_replicas=1, active=1)
    fused = fuse_max_pool(graph, main, [made.name])
    check(fused)
    assert types(fused) == [POOL]
    assert fused.handles[0].op.args[1] is True


def test_the_plain_graph_is_torchs() -> None:
    assert not PLAIN.fuse_max_pool
