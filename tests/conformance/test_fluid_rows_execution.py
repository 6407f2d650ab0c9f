"""Rows 1 to 6 and 29 to 31 of the parity table: what is built, in which order it runs, on how many threads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conformance.trainers import MEETING, MODES, Trainers, assert_near, persistables, two_that_meet
from tests.property.networks import Network, conv_net, ctr_dnn, fit_a_line, transformer
from tests.property.oracle import copy_of, same_bits, started
from tests.support.capabilities import pretend_cores
from tests.support.nursery import Forked, Nursery

import penstock as fluid
from penstock.program.ir import Role
from penstock.program.program import Program


def two_layers() -> Network:
    """Two fully connected layers, so four parameters, trained by SGD."""
    main, startup = Program(seed=2), Program(seed=2)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4])
        loss = fluid.layers.mean(fluid.layers.fc(fluid.layers.fc(x, 3, act="relu"), 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
    return Network("two_layers", main, startup, loss.name, lambda rows, _: {"x": np.ones((rows, 4), "float32")})


@pytest.mark.parametrize(("mode", "updates"), [("AllReduce", 3), ("Reduce", 1)])
def test_row_1_operators_are_per_replica_exchanges_per_gradient(mode: str, updates: int, trainers: Trainers) -> None:
    network = two_layers()
    core = trainers(network, replicas=3, mode=mode, fuse_all_reduce_ops=False).core
    operators = network.main.operators
    updating = sum(bool(op.role & (Role.OPTIMIZE | Role.LR_SCHED)) for op in operators)
    exchanges = {"AllReduce": "all_reduce", "Reduce": "reduce"}[mode]
    kinds = Counter(h.kind for h in core.graph(3).handles)
    assert updating == 4
    assert kinds.pop(exchanges) == 4  # one a parameter: two weights, two biases
    assert kinds.pop("scale_loss_grad") == 3
    assert kinds == {"computation": 3 * (len(operators) - updating - 1) + updates * updating}
    assert core.num_threads == 12


@pytest.mark.parametrize(("threads", "at_once"), [(2, 2), (1, 1)])
def test_row_2_independent_operators_run_at_the_same_time(threads: int, at_once: int, trainers: Trainers) -> None:
    network = two_that_meet()
    executor = trainers(network, program=network.main, replicas=1, num_threads=threads)
    MEETING.start(at_once)
    (got,) = executor.run([network.loss], network.feed(2, 0))
    assert (MEETING.most, MEETING.calls) == (at_once, 2)
    assert got.tolist() == [[5.0, 5.0], [5.0, 5.0]]


@pytest.mark.parametrize(
    "make",
    [fit_a_line, ctr_dnn, lambda: conv_net(dtype="float64"), lambda: transformer(dtype="float64")],
    ids=["fit_a_line", "ctr_dnn", "conv_net", "transformer"],
)
def test_row_3_fifty_steps_in_any_order_equal_the_executor(make: Callable[[], Network], trainers: Trainers) -> None:
    """One replica, four threads. Sums of a kernel may be split over another number of threads, which batch-norm and
    attention blow up over fifty steps in float32: those two in float64."""
    network = make()
    ours = started(network.startup)
    theirs = copy_of(ours)
    executor, judge = trainers(network, ours, replicas=1, num_threads=4), fluid.Executor()
    for step in range(50):
        executor.run([], network.feed(6, step))
        judge.run(network.main, network.feed(6, step), scope=theirs)
    assert_near(persistables(network.main, ours), persistables(network.main, theirs), 1e-6)


def test_row_6_replicas_default_to_cores_with_a_warning(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, nursery: Nursery, tmp_path: Path
) -> None:
    network = fit_a_line()
    pretend_cores(monkeypatch, 5)
    monkeypatch.delenv("CPU_NUM", raising=False)
    executors = [fluid.ParallelExecutor(False, network.loss, network.main, scope=fluid.Scope()) for _ in range(2)]
    for executor in executors:
        executor.close()
    assert [executor.device_count for executor in executors] == [5, 5]
    code = "import penstock as fluid; print(len(fluid.cpu_places()), len(fluid.cpu_places()))"
    process = Forked(nursery, tmp_path / "process", ["-c", code], {"CPU_NUM": None})
    assert process.end() == 0
    cores = process.output.split()[0]
    assert process.output == f"{cores} {cores}\n"
    assert process.errors == f"penstock: CPU_NUM is not set; {cores} replicas run, one for each core\n"
    assert "CPU_NUM" not in fluid.get_flags([])


def test_row_29_num_threads_bounds_concurrent_operators(trainers: Trainers) -> None:
    network = two_that_meet()
    for threads, most in ((1, 1), (2, 2), (4, 2)):
        executor = trainers(network, program=network.main, replicas=1, num_threads=threads)
        MEETING.start(most)
        executor.run([], network.feed(1, 0))
        assert (threads, MEETING.most) == (threads, most)


def test_row_30_num_threads_is_four_a_replica_unless_it_is_set(trainers: Trainers) -> None:
    network = fit_a_line()
    assert fluid.ExecutionStrategy().num_threads == 0
    assert [trainers(network, replicas=n).core.num_threads for n in (1, 2, 3)] == [4, 8, 12]
    assert [trainers(network, replicas=2, num_threads=n).core.num_threads for n in (1, 5)] == [1, 5]


@pytest.mark.parametrize("mode", MODES)
def test_row_31_one_thread_gives_the_same_bits_in_any_order(mode: str, trainers: Trainers) -> None:
    network = ctr_dnn()
    start = started(network.startup)
    found: list[dict[str, Any]] = []
    for schedule in (0, 0, 1, 2):  # 0: the order of the plan; others: a random one
        scope = copy_of(start)
        core = trainers(network, scope, mode=mode, num_threads=1).core
        for step in range(4):
            core.run(network.feed(5, step), [network.loss], schedule_seed=schedule)
        found.append(persistables(network.main, scope))
    for one, other in itertools.pairwise(found):
        assert all(same_bits(one[name], other[name]) for name in one)
