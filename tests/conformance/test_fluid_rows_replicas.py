"""Rows 9 to 27 and 84 of the parity table, as far as no older test shows them: what replicas share and exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.trainers import MODES, Trainers, assert_near, persistables
from tests.property.networks import Network, ctr_dnn, fit_a_line, transformer
from tests.property.oracle import copy_of, same_bits, started, value

import penstock as fluid
from penstock.graph.interpret import interpret
from penstock.program.program import Program


def whole(network: Network, feed: dict[str, Any], name: str) -> np.ndarray:
    """Fetch from an Executor that sees the whole batch, from the start."""
    (got,) = fluid.Executor().run(network.main, feed, [name], scope=started(network.startup))
    return np.asarray(got)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [fit_a_line, lambda: ctr_dnn("sgd", metrics=False), lambda: transformer("sgd")])
def test_row_9_four_replicas_train_like_one_on_the_whole_batch(
    make: Callable[[], Network], mode: str, trainers: Trainers
) -> None:
    network = make()
    start = started(network.startup)
    found = []
    for replicas in (1, 4):
        scope = copy_of(start)
        executor = trainers(network, scope, replicas=replicas, mode=mode)
        for step in range(3):
            executor.run([], network.feed(8, step))
        found.append(persistables(network.main, scope))
    assert_near(found[0], found[1], 1e-6)
    moved = persistables(network.main, start)
    assert any(float((moved[n] - found[0][n]).abs().max()) > 1e-4 for n in moved)


@pytest.mark.parametrize(("mode", "runs"), [("AllReduce", 3), ("Reduce", 1)])
def test_rows_11_and_12_updates_of_each_mode_reach_all_replicas(mode: str, runs: int, trainers: Trainers) -> None:
    network = fit_a_line("adam")
    core = trainers(network, replicas=3, mode=mode).core
    core.run(network.feed(7, 0), None)
    for parameter in ("fc_0.w_0", "fc_0.b_0"):
        updates = [h for h in core.graph(3).handles if parameter in {p for p, _ in h.op.role_vars} and h.op.writes]
        updates = [h for h in updates if any(core.graph(3).variables[w].name == parameter for w in h.op.writes)]
        assert len(updates) == runs
        copies = {v.key: v for v in core.graph(3).variables.values() if v.name == parameter}
        tensors = [core.memory.tensor(network.main, v) for v in copies.values()]
        assert len(tensors) == runs
        assert all(same_bits(tensors[0], other) for other in tensors)


@pytest.mark.parametrize(("mode", "copies"), [("Reduce", [1, 1, 1]), ("AllReduce", [1, 2, 4])])
def test_rows_14_and_15_reduce_has_one_copy_all_reduce_has_n(mode: str, copies: list[int], trainers: Trainers) -> None:
    network = ctr_dnn(metrics=False)
    sizes = []
    for replicas in (1, 2, 4):
        core = trainers(network, replicas=replicas, mode=mode).core
        core.run(network.feed(8, 0), None)
        kept = [v for v in core.graph(replicas).variables.values() if network.main.variables[v.name].parameter]
        storages = [core.memory.tensor(network.main, v).untyped_storage() for v in kept if v.storage == v.key]
        sizes.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
    assert [size / sizes[0] for size in sizes] == copies


def test_row_22_fetches_are_ordered_arrays_with_a_loss_a_replica(
    trainers: Trainers,
) -> None:
    network = fit_a_line()
    names = [network.fetches[0], network.loss, "fc_0.b_0@GRAD"]
    executor = trainers(network, replicas=2)
    for order in (names, names[::-1]):
        got = dict(zip(order, executor.run(order, network.feed(6, 0)), strict=True))
        assert all(isinstance(array, np.ndarray) for array in got.values())
        assert [got[name].shape for name in names] == [(6, 1), (2,), (2,)]


@pytest.mark.parametrize("mode", MODES)
def test_row_24_batches_of_ten_and_nine_rows_count_each_row_once(mode: str, trainers: Trainers) -> None:
    network = fit_a_line()
    feed = network.feed(19, 0)
    parts = [{n: a[:10] for n, a in feed.items()}, {n: a[10:] for n, a in feed.items()}]
    executor = trainers(network, replicas=2, mode=mode)
    losses, predicted = executor.run([network.loss, network.fetches[0]], parts)
    assert (losses.shape, predicted.shape) == ((2,), (19, 1))
    np.testing.assert_allclose(losses @ [10 / 19, 9 / 19], whole(network, feed, network.loss)[0], rtol=1e-6)
    scope = started(network.startup)
    fluid.Executor().run(network.main, feed, scope=scope)
    np.testing.assert_allclose(
        value(executor.core.memory.scope, "fc_0.w_0"), value(scope, "fc_0.w_0"), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("mode", MODES)
def test_row_25_a_batch_of_one_row_trains_four_replicas_like_one(mode: str, trainers: Trainers) -> None:
    network = fit_a_line()
    start = started(network.startup)
    ours, theirs = copy_of(start), copy_of(start)
    executor = trainers(network, ours, replicas=4, mode=mode)
    for step, rows in enumerate((1, 3, 4)):
        (loss,) = executor.run([network.loss], network.feed(rows, step))
        fluid.Executor().run(network.main, network.feed(rows, step), scope=theirs)
        assert loss.shape == (rows,)
    assert_near(persistables(network.main, ours), persistables(network.main, theirs), 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_row_27_sparse_gradients_train_like_dense_ones(mode: str, trainers: Trainers) -> None:
    found = []
    for sparse in (True, False):
        network = ctr_dnn("sgd", sparse=sparse, metrics=False)
        scope = started(network.startup)
        executor = trainers(network, scope, replicas=2, mode=mode)
        for step in range(5):
            executor.run([], network.feed(7, step))
        kinds = {v.kind for v in network.main.variables.values() if v.name == "shared_table@GRAD"}
        assert kinds == {"selected_rows" if sparse else "dense"}
        found.append(persistables(network.main, scope))
    assert_near(found[0], found[1], 1e-6)


def table_of(height: int) -> Network:
    """A sparse table with `height` rows, and ids below ten."""
    main, startup = Program(seed=3), Program(seed=3)
    with fluid.program_guard(main, startup):
        ids = fluid.layers.data(name="ids", shape=[1], dtype="int64")
        table = fluid.ParamAttr(name="table", initializer=fluid.initializer.Normal(0.0, 1.0))
        rows = fluid.layers.embedding(ids, [height, 4], is_sparse=True, param_attr=table)
        loss = fluid.layers.mean(fluid.layers.square(rows))
        fluid.optimizer.SGD(0.5).minimize(loss)
    return Network("table", main, startup, loss.name, lambda rows, _: {"ids": np.arange(rows).reshape(-1, 1) % 10})


@pytest.mark.parametrize("mode", MODES)
def test_row_84_a_sparse_update_touches_only_the_used_rows(mode: str, trainers: Trainers) -> None:
    network = table_of(1000)
    scope = started(network.startup)
    before = value(scope, "table").clone()
    trainers(network, scope, replicas=2, mode=mode).run([], network.feed(7, 0))
    changed = (value(scope, "table") != before).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("mode", MODES)
def test_row_84_bytes_of_a_step_do_not_depend_on_table_height(mode: str, trainers: Trainers) -> None:
    """What operators make in a step, in elements: it is what time and traffic follow, and no clock can disturb it."""
    made = []
    for height in (10, 100_000):
        network = table_of(height)
        core = trainers(network, replicas=2, mode=mode).core
        feed = network.feed(8, 0)
        core.run(feed, None)
        (lowered,) = core._plans.values()
        tensors = {k: lowered.plan.get(slot) for k, slot in lowered.slots.items()}
        known = {k: t for k, t in tensors.items() if t is not None} | {
            f"ids#{r}": torch.from_numpy(feed["ids"][4 * r : 4 * r + 4]) for r in range(2)
        }
        values = interpret(lowered.graph, lowered.shares, known)
        made.append(sum(t.numel() for k, t in values.items() if k not in known and isinstance(t, torch.Tensor)))
    assert made[0] == made[1] > 0
