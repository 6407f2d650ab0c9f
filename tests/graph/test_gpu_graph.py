"""The graph over devices that share no memory, run on CPU tensors: what it holds, and that it trains alike."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.property.networks import NETWORKS, Network, conv_net, ctr_dnn, fit_a_line
from tests.property.oracle import Interpreted, copy_of, same_bits, started, value

import penstock as fluid
from penstock.errors import Bug
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.graph.check import check
from penstock.graph.devices import build_device_graph
from penstock.graph.passes import PLAIN, PassChoice
from penstock.graph.ssa import Graph, Mode
from penstock.program.program import Program
from penstock.scope import Scope

MODES: list[Mode] = ["all_reduce", "reduce"]


def cards(number: int) -> tuple[torch.device, ...]:
    """As many devices, all of them the processor: replicas with copies of everything."""
    return (torch.device("cpu"),) * number


def on_cards(
    network: Network, scope: Scope, mode: Mode, num_replicas: int, choice: PassChoice = PLAIN, threads: int = 2
) -> DataParallel:
    """Return an executor over separate copies."""
    memory = ReplicaMemory(scope, cards(num_replicas))
    return DataParallel(
        network.main, memory, mode=mode, num_replicas=num_replicas, num_threads=threads, loss_name=network.loss,
        choice=choice,
    )  # fmt: skip


def of_kind(graph: Graph, kind: str) -> list[str]:
    return [h.op.name for h in graph.handles if h.kind == kind]


def copies(core: DataParallel, name: str) -> list[torch.Tensor]:
    """The tensors of a persistable variable on all replicas that have it."""
    graph = core.graph(core.num_replicas)
    keys = [f"{name}#{r}" for r in range(core.num_replicas) if f"{name}#{r}" in graph.variables]
    return [core.memory.tensor(core.program, graph.variables[k]) for k in keys]


def clipped() -> Network:
    """Global-norm clipping: one number goes from owner to owner."""
    network = fit_a_line()
    main, startup = Program(seed=11), Program(seed=11)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[13])
        y = fluid.layers.data(name="y", shape=[1])
        hidden = fluid.layers.fc(x, 8, act="relu")
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), y))
        rate = fluid.layers.exponential_decay(0.1, 3, 0.5)
        clip = fluid.clip.GradientClipByGlobalNorm(0.5)
        fluid.optimizer.Adam(learning_rate=rate, grad_clip=clip).minimize(loss)
    return Network("clipped", main, startup, loss.name, network.feed)


def changed() -> Network:
    """Gradients that layers compute with between the backward pass and the update, two of one parameter among them."""
    network = fit_a_line()
    main, startup = Program(seed=11), Program(seed=11)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[13])
        y = fluid.layers.data(name="y", shape=[1])
        hidden = fluid.layers.fc(x, 8, act="relu")
        loss = fluid.layers.mean(fluid.layers.square_error_cost(fluid.layers.fc(hidden, 1), y))
        rule = fluid.optimizer.SGD(0.05)
        pairs = rule.backward(loss)
        total = fluid.layers.sums([fluid.layers.reduce_sum(g * g) for _, g in pairs])
        rule.apply_gradients([(p, g / (total + 1.0)) for p, g in pairs])
        fluid.optimizer.SGD(0.01).minimize(fluid.layers.mean(hidden))
    return Network("changed", main, startup, loss.name, network.feed)


ALL: dict[str, Callable[[], Network]] = {**NETWORKS, "clipped": clipped, "changed": changed}


@functools.cache
def network_of(name: str) -> Network:
    """Recorded once: nothing here changes a program."""
    return ALL[name]()


# ---------------------------------------------------------------- what the graph holds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_every_built_graph_is_correct(name: str, mode: Mode) -> None:
    main = network_of(name).main
    for program in (main, main.clone(for_test=True)):
        for num_replicas in (1, 2, 3):
            for active in range(1, num_replicas + 1):
                check(build_device_graph(program, mode=mode, num_replicas=num_replicas, active=active))


@pytest.mark.parametrize("mode", MODES)
def test_each_missing_edge_is_seen(mode: Mode) -> None:
    graph = build_device_graph(fit_a_line("adam").main, mode=mode, num_replicas=2, active=2)
    unseen = []
    for before, after in graph.edges():
        graph.handles[after].before.remove(before)
        try:
            check(graph)
        except Bug:
            pass
        else:
            unseen.append((graph.handles[before].op.name, graph.handles[after].op.name))
        graph.handles[after].before.add(before)
    assert unseen == []


def test_in_reduce_mode_owners_update_once_and_broadcast() -> None:
    network = ctr_dnn()
    graph = build_device_graph(network.main, mode="reduce", num_replicas=3, active=3)
    updates = [h for h in graph.handles if "adam_." in h.op.type]
    parameters = [h.op.role_vars[0][0] for h in updates]
    assert sorted(parameters) == sorted(graph.owners)
    assert {p: h.replica for p, h in zip(parameters, updates, strict=True)} == graph.owners
    broadcasts = {h.op.name: h for h in graph.handles if h.kind == "broadcast"}
    assert set(broadcasts) == {f"broadcast.{p}" for p in graph.owners}
    for parameter, owner in graph.owners.items():
        handle = broadcasts[f"broadcast.{parameter}"]
        assert handle.replica == owner
        others = {f"{parameter}#{r}" for r in range(3)} - {f"{parameter}#{owner}"}
        assert set(handle.op.writes) == others


def test_in_reduce_mode_only_the_owner_has_optimizer_state() -> None:
    network = fit_a_line("adam")
    graph = build_device_graph(network.main, mode="reduce", num_replicas=2, active=2)
    for parameter, owner in graph.owners.items():
        held = {v.replica for v in graph.variables.values() if v.name == f"adam_0.moment1.{parameter}"}
        assert held == {owner}
        assert graph.homes.get(f"adam_0.moment1.{parameter}", 0) == owner


def test_in_all_reduce_mode_replicas_update_without_broadcast() -> None:
    network = conv_net()
    graph = build_device_graph(network.main, mode="all_reduce", num_replicas=3, active=3)
    updates = Counter(h.op.role_vars[0][0] for h in graph.handles if h.op.type == "penstock.sgd_.default")
    assert set(updates.values()) == {3}
    assert of_kind(graph, "broadcast") == []
    assert len(of_kind(graph, "all_reduce")) == len(updates)


def test_sparse_rows_are_gathered_on_the_owner_or_on_all() -> None:
    main = ctr_dnn(metrics=False).main
    sparse = ("shared_table", "embedding_2.w_0")
    reduced = build_device_graph(main, mode="reduce", num_replicas=2, active=2)
    assert {h.replica for h in reduced.handles if h.op.name == "gather.shared_table@GRAD@ROWS"} == {
        reduced.owners["shared_table"]
    }
    everywhere = build_device_graph(main, mode="all_reduce", num_replicas=2, active=2)
    assert {h.replica for h in everywhere.handles if h.kind == "gather"} == {0}
    assert sorted(of_kind(everywhere, "broadcast")) == sorted(
        f"broadcast.{p}@GRAD@{part}.1" for p in sparse for part in ("ROWS", "VALUES")
    )


def test_no_operator_reads_another_replicas_memory_but_exchanges() -> None:
    for name in ("ctr_dnn", "clipped"):
        for mode in MODES:
            for active in (1, 2, 3):
                graph = build_device_graph(network_of(name).main, mode=mode, num_replicas=3, active=active)
                for handle in graph.handles:
                    if handle.kind in ("computation", "scale_loss_grad"):
                        names = (*handle.reads(), *handle.makes(), *handle.op.writes)
                        assert {graph.variables[n].replica for n in names} <= {handle.replica}, handle.op.name


def test_a_program_for_test_exchanges_nothing() -> None:
    graph = build_device_graph(conv_net().main.clone(for_test=True), mode="reduce", num_replicas=2, active=2)
    assert {h.kind for h in graph.handles} == {"computation"}


# ---------------------------------------------------------------- what it computes

BATCHES = (6, 7, 2, 1, 6)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALL)
def test_it_trains_like_replicas_that_share_memory(name: str, mode: Mode, num_replicas: int) -> None:
    """To the bit: the same sums in the same order, wherever the copies are; batches without rows for some included."""
    network = network_of(name)
    start = started(network.startup)
    plain = DataParallel(
        network.main, ReplicaMemory(copy_of(start)), mode=mode, num_replicas=num_replicas, num_threads=2,
        loss_name=network.loss, choice=PLAIN,
    )  # fmt: skip
    plain.close()
    expected = Interpreted(plain, plain.memory.scope)
    scope = copy_of(start)
    core = on_cards(network, scope, mode, num_replicas)
    try:
        for number, rows in enumerate(BATCHES):
            feed = network.feed(rows, number)
            wanted = expected.run(feed)
            (losses,) = core.run(feed, [network.loss], schedule_seed=number)
            for replica, loss in enumerate(losses):
                assert same_bits(loss, wanted[f"{network.loss}#{replica}"])
            for persistable in scope.names():
                assert same_bits(value(scope, persistable), value(plain.memory.scope, persistable)), persistable
            for parameter in network.main.parameters():
                first, *others = copies(core, parameter.name)
                assert len(others) == num_replicas - 1
                assert all(same_bits(first, other) for other in others), parameter.name
    finally:
        core.close()


def test_replicas_start_from_one_startup_and_hold_copies_of_it() -> None:
    network = conv_net()
    core = on_cards(network, started(network.startup), "reduce", 3)
    try:
        before = {p.name: value(core.memory.scope, p.name).clone() for p in network.main.parameters()}
        for name, wanted in before.items():
            held = copies(core, name)
            assert len({t.data_ptr() for t in held}) == 3
            assert all(same_bits(t, wanted) for t in held)
    finally:
        core.close()


def test_a_fetched_state_is_its_owners() -> None:
    network = fit_a_line("adam")
    core = on_cards(network, started(network.startup), "reduce", 2)
    try:
        parameter = max(core.graph(2).owners, key=lambda p: core.graph(2).owners[p])
        assert core.graph(2).owners[parameter] == 1
        (state,) = core.run(network.feed(4, 0), [f"adam_0.moment1.{parameter}"])
        assert len(state) == 2
        assert all(float(t.abs().max()) > 0 for t in state)
        assert torch.equal(value(core.memory.scope, f"adam_0.moment1.{parameter}"), state[0])
    finally:
        core.close()


def test_a_test_program_shares_the_copies_of_training() -> None:
    network = fit_a_line()
    core = on_cards(network, started(network.startup), "reduce", 2)
    test = DataParallel(network.main.clone(for_test=True), core.memory, mode="reduce", num_replicas=2, num_threads=1)
    try:
        feed = network.feed(6, 0)
        losses = []
        for _ in range(3):
            losses.append(float(np.mean([float(t) for t in test.run(feed, [network.loss])[0]])))
            core.run(feed, [network.loss])
        assert losses[0] > losses[1] > losses[2]
    finally:
        test.close()
        core.close()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_writes_of_an_executor_between_steps_reach_every_copy(kind: str) -> None:
    network = fit_a_line(kind)
    core = on_cards(network, started(network.startup), "reduce", 2)
    try:
        core.run(network.feed(4, 0), None)
        name = network.main.parameters()[0].name
        found = core.memory.scope.find_var(name)
        assert found is not None
        found.set(np.zeros(found.shape(), dtype="float32"))
        (outputs,) = core.run(network.feed(4, 1), [network.fetches[0]])
        assert [t.shape[0] for t in outputs] == [2, 2]
        assert float(torch.cat(outputs).std()) < 1e-6, "both replicas predict the bias alone"
    finally:
        core.close()
