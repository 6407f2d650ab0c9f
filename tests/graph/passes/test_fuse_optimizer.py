"""Fused updates: one operator for those of one kind on a replica, with the results of single ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.property.networks import NETWORKS, Feed, Network
from tests.property.oracle import assert_passes_keep_results

import penstock as fluid
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PassChoice
from penstock.graph.passes.fuse_optimizer import fuse_updates
from penstock.graph.ssa import Graph, Mode
from penstock.program.ir import Operator, Ref
from penstock.program.optimizers.adam import TorchAdamOptimizer
from penstock.program.program import Program

FUSED = PassChoice(fuse_all_reduce=False, fuse_optimizer=True, matrix_kernels=False, reuse_buffers=False, inplace=False)
MODES: tuple[Mode, ...] = ("all_reduce", "reduce")
Make = Callable[[], fluid.optimizer.Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda: fluid.optimizer.SGD(0.1),
    "momentum": lambda: fluid.optimizer.Momentum(0.1, 0.9),
    "nesterov": lambda: fluid.optimizer.Momentum(0.1, 0.9, use_nesterov=True),
    "adagrad": lambda: fluid.optimizer.Adagrad(0.1),
    "adam": lambda: fluid.optimizer.Adam(0.01),
    "torch's adam": lambda: TorchAdamOptimizer(0.01),
}
EXACT = {"sgd", "adam", "torch's adam"}


def tower(make: Make, dtype: str = "float32", *, regularized: str = "", clipped: bool = False) -> Network:
    """Three layers. `regularized`: the name of the one parameter with a regulariser of its own."""
    main, startup = Program(seed=7), Program(seed=7)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[5], dtype=dtype)
        y = fluid.layers.data(name="y", shape=[1], dtype=dtype)
        hidden = x
        for number, width in enumerate((6, 4, 1)):
            decay = fluid.regularizer.L2Decay(0.1) if regularized == f"w{number}" else None
            attribute = fluid.ParamAttr(name=f"w{number}", regularizer=decay)
            hidden = fluid.layers.fc(hidden, width, param_attr=attribute, act="tanh" if width > 1 else None)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(hidden, y))
        if clipped:
            fluid.clip.set_gradient_clip(fluid.clip.GradientClipByNorm(0.05), program=main)
        make().minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {"x": random.normal(size=(rows, 5)).astype(dtype), "y": random.normal(size=(rows, 1)).astype(dtype)}

    return Network("tower", main, startup, loss.name, feed)


def fused(network: Network, *, mode: Mode = "all_reduce", replicas: int = 2) -> Graph:
    graph = fuse_updates(build_graph(network.main, mode=mode, num_replicas=replicas, active=replicas), network.main)
    check(graph)
    return graph


def groups(graph: Graph, replica: int = 0) -> list[tuple[str, list[str]]]:
    """The parameters of every fused update of a replica."""
    return [
        (h.op.type.split(".")[1], [p for p, _ in h.op.role_vars])
        for h in graph.handles
        if h.replica == replica and h.op.type.startswith("penstock.fused_")
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fused_updates_train_as_single_ones(kind: str, dtype: str) -> None:
    tolerance = None if kind in EXACT else {"float32": 1e-6, "float64": 1e-12}[dtype]
    for mode in MODES:
        assert_passes_keep_results(
            tower(KINDS[kind], dtype), FUSED, mode=mode, num_replicas=2, batches=(7, 1, 6), rtol=tolerance
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_keeps_its_bits(name: str) -> None:
    for mode, replicas in (("all_reduce", 2), ("reduce", 3), ("all_reduce", 1)):
        assert_passes_keep_results(NETWORKS[name](), FUSED, mode=mode, num_replicas=replicas, batches=(7, 1))  # type: ignore[arg-type]  # literals


@pytest.mark.parametrize("kind", KINDS)
def test_all_updates_of_a_replica_are_one_operator(kind: str) -> None:
    network = tower(KINDS[kind])
    graph = fused(network)
    for replica in range(2):
        ((operator, parameters),) = groups(graph, replica)
        assert operator.removeprefix("fused_").rstrip("_") == kind.replace("nesterov", "momentum").removeprefix(
            "torch's "
        )
        assert len(parameters) == 6
    assert not [h for h in graph.handles if h.op.role_vars and h.op.type == "aten.sub_.Tensor"]


def test_owners_fuse_their_own_updates_in_reduce_mode() -> None:
    graph = fused(tower(KINDS["adam"]), mode="reduce")
    first, second = (groups(graph, replica) for replica in range(2))
    assert len(first) == len(second) == 1
    assert {*first[0][1]} & {*second[0][1]} == set()
    assert len(first[0][1]) + len(second[0][1]) == 6


def test_sparse_updates_stay_as_they_are() -> None:
    graph = fused(NETWORKS["ctr_dnn"]())
    assert (
        sorted(h.op.type for h in graph.handles if "sparse_adam" in h.op.type) == ["penstock.sparse_adam_.default"] * 4
    )
    (_, parameters) = groups(graph)[0]
    assert "shared_table" not in parameters


def test_regularised_or_clipped_momentum_keeps_its_results() -> None:
    for network in (tower(KINDS["momentum"], regularized="w1"), tower(KINDS["sgd"], clipped=True)):
        assert groups(fused(network))
        assert_passes_keep_results(network, FUSED, mode="all_reduce", num_replicas=2, batches=(7, 1), rtol=1e-6)


def test_other_hyper_parameters_make_another_group() -> None:
    main, startup = Program(seed=7), Program(seed=7)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[5], dtype="float32")
        slow = fluid.ParamAttr(name="slow", learning_rate=0.5)
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.fc(x, 4, param_attr=slow), 2))
        fluid.optimizer.SGD(0.1).minimize(loss)
    network = Network("rates", main, startup, loss.name, lambda rows, seed: {"x": np.ones((rows, 5), "float32")})
    ((_, parameters),) = groups(fused(network))
    assert len(parameters) == 3
    assert "slow" not in parameters


def test_an_update_does_not_move_past_a_reader_of_its_parameter() -> None:
    network = tower(KINDS["sgd"])
    main = network.main
    main.variables["square"] = replace(main.variables["w0"], name="square", storage="square", persistable=False)
    position = next(i for i, op in enumerate(main.operators) if "w1" in op.writes)
    main.operators.insert(position, Operator("square_w0", "aten.square.default", (Ref("w0"),), ("square",)))
    graph = fused(network)
    assert [len(parameters) for _, parameters in groups(graph)] == [2, 4]
    read = next(h.index for h in graph.handles if h.op.name == "square_w0")
    assert next(h.index for h in graph.handles if "w0#0" in h.op.writes) < read


def test_a_parameter_updated_twice_keeps_the_order_of_updates() -> None:
    network = tower(KINDS["sgd"])
    main = network.main
    updates = [op for op in main.operators if op.type == "penstock.sgd_.default"]
    main.operators += [replace(op, name=op.name + "_again") for op in updates]
    graph = fused(network)
    assert [len(parameters) for _, parameters in groups(graph)] == [6, 6]
    assert_passes_keep_results(network, FUSED, mode="all_reduce", num_replicas=2, batches=(7, 1))


def test_a_chain_whose_values_others_read_is_left_alone() -> None:
    network = tower(KINDS["momentum"])
    main = network.main
    change = next(op for op in main.operators if op.role_vars and op.type == "aten.mul.Tensor" and "w1" in str(op.args))
    made = change.output_names()[0]
    main.variables["copy"] = replace(main.variables[made], name="copy", storage="copy")
    main.operators.append(Operator("copy_change", "aten.clone.default", (Ref(made),), ("copy",)))
    graph = fused(network)
    assert all("w1" not in parameters for _, parameters in groups(graph))
    assert sum(len(parameters) for _, parameters in groups(graph)) == 5
