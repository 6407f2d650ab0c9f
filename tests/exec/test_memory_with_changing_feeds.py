"""Planned memory when what is fed changes from run to run: its layout, and its size."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.networks import NETWORKS, Feed
from tests.property.oracle import Interpreted, copy_of, same_bits, started

import penstock as fluid
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.program.program import Program

SIDE = 8
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda a: a,
    "transposed": lambda a: np.ascontiguousarray(a.swapaxes(0, 1)).swapaxes(0, 1),
    "spaced": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "columns first": np.asfortranarray,
    "channels last": lambda a: np.ascontiguousarray(np.moveaxis(a, 1, -1)).swapaxes(-1, 1) if a.ndim == 4 else a,
    "expanded": lambda a: np.broadcast_to(a[:1], a.shape),
    "shifted": lambda a: np.concatenate((a[:1], a))[1:],
}


@pytest.fixture(autouse=True)
def one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # torch, of an expanded one


def pointwise(shape: tuple[int, ...]) -> tuple[Program, list[str]]:
    """Operators whose results may lie over either operand, with operands that are fed, made, and broadcast."""
    main, start = Program(), Program()
    with fluid.program_guard(main, start):
        a, b, c = (
            fluid.layers.data(name=n, shape=list(shape), dtype="float32", append_batch_size=False) for n in "abc"
        )
        tripled, doubled = b * 3.0, a * 2.0
        total = tripled + doubled
        gated = torch.where(c > 0, total, tripled)
        mixed = (c - gated) * (a.mean(0) + b)
        results = [total - 1.0, tripled * 5.0, torch.tanh(mixed) + c, torch.lerp(doubled, c, 0.3) * a]
    return main, [r.name for r in results]


def fed(shape: tuple[int, ...], layouts: tuple[str, ...], seed: int) -> Feed:
    random = np.random.default_rng(seed)
    arrays = (random.normal(size=shape).astype("float32") for _ in "abc")
    return {name: LAYOUTS[layout](array) for name, layout, array in zip("abc", layouts, arrays, strict=True)}


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    layouts=st.lists(st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3), min_size=4, max_size=8),
    shape=st.sampled_from([(SIDE, SIDE), (4, 4, 4, 4)]),
)
def test_results_are_the_same_however_feeds_are_laid_out(
    layouts: list[tuple[str, ...]], shape: tuple[int, ...]
) -> None:
    main, names = pointwise(shape)
    core = DataParallel(main, ReplicaMemory(fluid.Scope()), mode="all_reduce", num_replicas=1)
    expected = Interpreted(core, fluid.Scope())
    first = ("contiguous",) * 3
    for number, each in enumerate((first, first, *layouts, first)):
        feed = fed(shape, each, number)
        wanted = expected.run(feed)
        for name, (part,) in zip(names, core.run(feed, names), strict=True):
            assert same_bits(part, wanted[f"{name}#0"]), (number, each, name)
    (plan,) = core.statistics().plans
    assert plan.in_place > 0 and plan.missed == 0  # the last run is laid out as the first
    core.close()


def test_a_transposed_feed_after_straight_ones_changes_no_result() -> None:
    main, names = pointwise((SIDE, SIDE))
    pe = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope())
    for number in range(6):
        feed = fed((SIDE, SIDE), ("transposed" if number >= 3 else "contiguous", "contiguous", "contiguous"), number)
        (found, *_) = pe.run(names, feed)
        a, b = (torch.from_numpy(feed[name]) for name in "ab")
        torch.testing.assert_close(torch.from_numpy(found), b * 3 + a * 2 - 1)
    pe.close()


def test_a_parameter_set_in_another_layout_keeps_the_result() -> None:
    main, start = Program(), Program()
    with fluid.program_guard(main, start):
        x = fluid.layers.data(name="x", shape=[SIDE, SIDE], dtype="float32", append_batch_size=False)
        weight = fluid.layers.create_parameter([SIDE, SIDE], "float32", name="weight")
        tripled = x * 3.0
        result = (weight + tripled) - 1.0
    scope = started(start)
    pe = fluid.ParallelExecutor(False, main_program=main, scope=scope)
    random = np.random.default_rng(0)
    for number in range(6):
        value = torch.rand(SIDE, SIDE)
        scope.set("weight", value.t() if number >= 3 else value)
        array = random.normal(size=(SIDE, SIDE)).astype("float32")
        (found,) = pe.run([result.name], {"x": array})
        expected = ((value.t() if number >= 3 else value) + torch.from_numpy(array) * 3.0) - 1.0
        assert np.array_equal(found, expected.numpy()), number
    pe.close()


def test_a_program_of_which_everything_is_fetched_runs_again() -> None:
    main = Program()
    with fluid.program_guard(main, Program()):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        y = -x
        z = fluid.layers.relu(y)
    pe = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope())
    for number in range(3):
        array = np.full((2, 4), number, "float32")
        negative, positive = pe.run([y.name, z.name], {"x": array})
        assert np.array_equal(negative, -array) and np.array_equal(positive, np.maximum(-array, 0))
    (plan,) = pe.statistics()["plans"]
    assert (plan["planned"], plan["unplanned"]) == (0, 2)
    pe.close()


def sums(length: int = 64) -> tuple[Program, str]:
    """Results that take over nothing, so that an arena has to hold two at once."""
    main = Program()
    with fluid.program_guard(main, Program()):
        y = fluid.layers.data(name="x", shape=[length], dtype="float32")
        for _ in range(4):
            y = torch.cos(torch.cumsum(y, 1))
        z = y.mean()
    return main, z.name


def test_sizes_that_grow_leave_one_arena() -> None:
    main, name = sums()
    pe = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope())
    for rows in range(100, 1100, 100):
        for _ in range(2):
            pe.run([name], {"x": np.ones((rows, 64), "float32")})
    found = pe.statistics()
    assert found["steady_bytes"] == max(p["arena_bytes"] for p in found["plans"]) == found["plans"][-1]["arena_bytes"]
    held = pe.core.temporaries.arena_bytes
    pe.drop_local_exe_scopes()
    assert held > 0 == pe.core.temporaries.arena_bytes
    pe.close()


def test_plans_that_did_not_run_last_hold_no_feed() -> None:
    main, name = sums()
    pe = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope())
    for rows in (2, 3, 4, 2, 2):
        pe.run([name], {"x": np.ones((rows, 64), "float32")})
    held: list[bool] = []
    for lowered in pe.core._plans.values():
        (slots,) = lowered.feed_slots
        held += [lowered.plan.get(slot) is not None for slot in slots.values()]
    assert held == [False, False, True]  # the one that ran last is the last one
    pe.close()


def test_the_peak_counts_the_arena_while_a_size_is_observed() -> None:
    main, name = sums()
    pe = fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope())
    for rows in (1000, 1000, 900):
        pe.run([name], {"x": np.ones((rows, 64), "float32")})
    found = pe.statistics()
    whole, second = found["plans"][0]["arena_bytes"], found["plans"][1]["observed_bytes"]
    assert second > 0.8 * whole * 900 / 1000
    assert found["peak_bytes"] == whole + second
    pe.drop_local_exe_scopes()
    assert pe.statistics()["peak_bytes"] == found["peak_bytes"]  # plans that are gone have had their peak
    pe.close()


@pytest.mark.parametrize("name", ["conv_net", "transformer", "ctr_dnn"])
def test_a_mark_raises_no_memory_over_several_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")
    network = NETWORKS[name]()
    start = started(network.startup)
    steady, peak, losses = {}, {}, {}
    for mark in (None, True, False):
        program = network.main.clone()
        if mark is not None:
            fluid.memory_optimize(program, skip_grads=mark)
        pe = fluid.ParallelExecutor(False, loss_name=network.loss, main_program=program, scope=copy_of(start))
        losses[mark] = [pe.run([network.loss], network.feed(rows, 1))[0].tolist() for rows in (64, 48, 32) * 3]
        found = pe.statistics()
        steady[mark], peak[mark] = found["steady_bytes"], found["peak_bytes"]
        assert steady[mark] == max(p["arena_bytes"] for p in found["plans"])
        pe.close()
    assert losses[True] == losses[None] == losses[False]
    assert steady[True] <= steady[None] == steady[False], steady
    assert peak[True] <= peak[None] == peak[False], peak


@pytest.mark.parametrize(("flag", "every", "warns"), [(0.0, 7, True), (0.0, 1, False), (-1.0, 7, False)])
def test_a_number_of_runs_without_effect_is_warned_of_once(
    flag: float, every: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    main, _ = sums()
    execution = fluid.ExecutionStrategy()
    execution.num_iteration_per_drop_scope = every
    fluid.set_flags({"FLAGS_eager_delete_tensor_gb": flag})
    try:
        for _ in range(2):
            fluid.ParallelExecutor(False, main_program=main, scope=fluid.Scope(), exec_strategy=execution).close()
    finally:
        fluid.set_flags({"FLAGS_eager_delete_tensor_gb": 0.0})
    assert caplog.text.count("num_iteration_per_drop_scope = 7 has no effect") == (1 if warns else 0)


def test_a_feed_with_gaps_trains_as_a_copy_of_it_does() -> None:
    losses = []
    ids_of_a_step = np.arange(16, dtype=np.int64).reshape(16, 1) % 10
    for fed in (ids_of_a_step[::2], ids_of_a_step[::2].copy()):
        main, startup = fluid.Program(), fluid.Program()
        main.random_seed = startup.random_seed = 3
        with fluid.program_guard(main, startup):
            ids = fluid.layers.data("ids", [1], dtype="int64")
            rows = fluid.layers.embedding(ids, [10, 4], is_sparse=True)
            loss = fluid.layers.mean(fluid.layers.fc(rows, 1))
            fluid.optimizer.SGD(0.1).minimize(loss)
        executor, scope = fluid.Executor(), fluid.Scope()
        executor.run(startup, scope=scope)
        feed = {"ids": fed}
        parallel = fluid.ParallelExecutor(False, loss.name, main, scope=scope)
        losses.append([executor.run(main, feed, [loss], scope=scope)[0], parallel.run([loss.name], feed)[0].mean()])
        parallel.close()
    assert np.array_equal(losses[0][0], losses[1][0])
    assert losses[0][1] == losses[1][1]
