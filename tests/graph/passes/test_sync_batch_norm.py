"""Batch-norm over all replicas: they train like one replica on the whole batch, and without it they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.property.networks import NETWORKS, Feed, Network, conv_net
from tests.property.oracle import assert_engine_equals_interpreter, assert_passes_keep_results, copy_of, started, value

import penstock as fluid
from penstock.errors import ProgramError
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.graph.build import build_graph
from penstock.graph.check import check
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.passes.sync_batch_norm import synchronize_batch_norm
from penstock.graph.ssa import Mode
from penstock.program.program import Program
from penstock.scope import Scope

SYNC = replace(PLAIN, sync_batch_norm=True)
STEPS = 20
BATCHES = (6, 7, 11, 6, 9)


def flat_network() -> Network:
    """Batch-norm over [n, channels], without scale and shift in one place, by Fluid's layer in the other."""
    main, startup = Program(seed=13), Program(seed=13)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[5], dtype="float64")
        y = fluid.layers.data(name="y", shape=[1], dtype="float64")
        hidden = fluid.layers.batch_norm(fluid.layers.fc(x, 6, bias_attr=False), act="tanh")
        hidden = torch.nn.BatchNorm1d(6, affine=False).double()(hidden)
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), y))
        fluid.optimizer.Adam(0.01).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {"x": 5 + random.normal(size=(rows, 5)), "y": random.normal(size=(rows, 1))}

    return Network("flat", main, startup, loss.name, feed)


def double_conv_net() -> Network:
    """The convolutions of `networks`, in float64."""
    return conv_net("sgd", "float64")


def trained(
    network: Network, start: Scope, num_replicas: int, mode: Mode, choice: PassChoice
) -> dict[str, torch.Tensor]:
    """Return parameters and running statistics after training."""
    scope = copy_of(start)
    core = DataParallel(
        network.main, ReplicaMemory(scope), mode=mode, num_replicas=num_replicas, loss_name=network.loss, choice=choice
    )
    try:
        for step in range(STEPS):
            core.run(network.feed(BATCHES[step % len(BATCHES)], step), [])
    finally:
        core.close()
    return {name: value(scope, name).clone() for name in scope.names()}


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each tensor."""
    return {name: float((left[name].double() - right[name].double()).abs().max()) for name in left}


@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("make", [double_conv_net, flat_network])
def test_uneven_shares_train_like_the_whole_batch(make: Callable[[], Network], num_replicas: int, mode: Mode) -> None:
    network = make()
    start = started(network.startup)
    whole = trained(network, start, 1, mode, SYNC)
    statistics = [n for n in whole if "running" in n or n.endswith((".mean", ".variance"))]
    assert len(statistics) == 4
    apart = distance(trained(network, start, num_replicas, mode, SYNC), whole)
    assert max(apart.values()) < 1e-9, apart


def test_without_it_shares_do_not() -> None:
    network = double_conv_net()
    start = started(network.startup)
    apart = distance(trained(network, start, 2, "all_reduce", PLAIN), trained(network, start, 1, "all_reduce", PLAIN))
    assert max(apart.values()) > 1e-3


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_engine_equals_the_interpreter(num_replicas: int) -> None:
    assert_engine_equals_interpreter(
        NETWORKS["conv_net"](), mode="all_reduce", num_replicas=num_replicas, batches=(6, 7, 2, 1), choice=SYNC,
        schedule_seeds=(0, 3, 5), num_threads=3,
    )  # fmt: skip


def test_one_replica_and_other_networks_keep_their_bits() -> None:
    assert_passes_keep_results(NETWORKS["conv_net"](), SYNC, mode="all_reduce", num_replicas=1)
    assert_passes_keep_results(NETWORKS["transformer"](), SYNC, mode="reduce", num_replicas=2, batches=(7, 1))


def test_it_goes_with_fused_exchanges_and_updates() -> None:
    network = double_conv_net()
    start = started(network.startup)
    choice = replace(SYNC, fuse_all_reduce=True, fuse_optimizer=True, sequential=True)
    apart = distance(trained(network, start, 2, "all_reduce", choice), trained(network, start, 1, "all_reduce", PLAIN))
    assert max(apart.values()) < 1e-9, apart


def test_each_batch_norm_is_exchanged_once_in_each_direction() -> None:
    network = NETWORKS["conv_net"]()
    built = build_graph(network.main, mode="all_reduce", num_replicas=3, active=3)
    graph = synchronize_batch_norm(built, network.main)
    check(graph)
    kinds = [h.op.type.split(".")[1] for h in graph.handles if h.op.name.startswith("native_batch_norm")]
    assert {k: kinds.count(k) for k in kinds} == {
        "batch_norm_stats": 6, "sync_batch_norm": 6, "batch_norm_grad_stats": 6, "sync_batch_norm_backward": 6,
    }  # fmt: skip
    assert sum(h.kind == "gather" for h in graph.handles) == 4
    assert len(graph.handles) == len(built.handles) + 4 * (3 + 1)


def test_running_statistics_are_equal_on_all_replicas() -> None:
    network = NETWORKS["conv_net"]()
    memory = ReplicaMemory(started(network.startup))
    core = DataParallel(network.main, memory, mode="all_reduce", num_replicas=2, loss_name=network.loss, choice=SYNC)
    core.run(network.feed(7, 0), [])
    copies = [v for v in core.graph(2).variables.values() if "running" in v.name]
    core.close()
    found = {v.key: memory.tensor(network.main, v) for v in copies}
    assert len(found) == 8
    for key in (k for k in found if k.endswith("#0")):
        assert torch.equal(found[key], found[key.replace("#0", "#1")])


def test_a_test_program_keeps_its_running_statistics() -> None:
    program = NETWORKS["conv_net"]().main.clone(for_test=True)
    built = build_graph(program, mode="all_reduce", num_replicas=2, active=2)
    assert [h.op for h in synchronize_batch_norm(built, program).handles] == [h.op for h in built.handles]


def test_another_dtype_is_refused_by_name() -> None:
    network = NETWORKS["conv_net"]()
    for name, var in network.main.variables.items():
        if name.startswith("convolution_"):
            network.main.variables[name] = replace(var, dtype="float16")
    built = build_graph(network.main, mode="all_reduce", num_replicas=2, active=2)
    with pytest.raises(ProgramError, match=r"native_batch_norm_0.*float16.*float32 and float64"):
        synchronize_batch_norm(built, network.main)


def rows_apart(normalise: Callable[[torch.Tensor], torch.Tensor]) -> Network:
    """A network in which every row is normalised by itself: the shares' rows differ in size."""
    main, startup = Program(seed=13), Program(seed=13)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4, 8], dtype="float64")
        weight = fluid.layers.create_parameter([4, 8], "float64", name="weight")
        loss = fluid.layers.mean(torch.tanh(normalise(x * weight)) * x)
        fluid.optimizer.SGD(0.1).minimize(loss)

    def feed(rows: int, seed: int) -> Feed:
        random = np.random.default_rng(seed)
        return {"x": random.normal(size=(rows, 4, 8)) * (1 + np.arange(rows)).reshape(rows, 1, 1)}

    return Network("rows apart", main, startup, loss.name, feed)


@pytest.mark.parametrize(
    "normalise", [torch.nn.functional.instance_norm, lambda x: torch.nn.functional.group_norm(x, 2)]
)
def test_what_normalises_each_row_by_itself_is_left_alone(normalise: Callable[[torch.Tensor], torch.Tensor]) -> None:
    network = rows_apart(normalise)
    built = build_graph(network.main, mode="all_reduce", num_replicas=2, active=2)
    assert [h.op for h in synchronize_batch_norm(built, network.main).handles] == [h.op for h in built.handles]
    start = started(network.startup)
    whole = trained(network, start, 1, "all_reduce", PLAIN)
    apart = distance(trained(network, start, 2, "all_reduce", SYNC), whole)
    assert max(apart.values()) < 1e-9, apart


def test_rows_that_are_folded_into_the_batch_count() -> None:
    main = Program(seed=13)
    with fluid.program_guard(main, Program(seed=13)):
        x = fluid.layers.data(name="x", shape=[4, 8], dtype="float64")
        torch.nn.functional.batch_norm(x.reshape(-1, 8), None, None, training=True)
    graph = synchronize_batch_norm(build_graph(main, mode="all_reduce", num_replicas=2, active=2), main)
    inserted = [h.op for h in graph.handles if h.op.type == "aten.stack.default"]
    assert len(inserted) == 1
    assert __file__.rpartition("/")[2] in inserted[0].source


def test_one_within_a_branch_is_refused() -> None:
    main = fluid.Program()
    with fluid.program_guard(main, fluid.Program()):
        x = fluid.layers.data("x", [3])
        always = fluid.layers.less_than(fluid.layers.zeros([1], "int64"), fluid.layers.ones([1], "int64"))
        fluid.layers.cond(always, lambda: fluid.layers.batch_norm(x), lambda: x * 1.0)
    graph = build_graph(main, mode="all_reduce", num_replicas=2, active=2)
    with pytest.raises(ProgramError, match=r"batch_norm.*within a block of control flow.*sync_batch_norm = False"):
        synchronize_batch_norm(graph, main)
