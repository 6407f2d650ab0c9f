"""Temporaries of executors: planned memory changes no bit, is less, and what is said about it is so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.property.networks import NETWORKS, Network
from tests.property.oracle import assert_engine_equals_interpreter, copy_of, same_bits, started, value
from tests.property.random_programs import Recipe, build, recipes

import penstock as fluid
from penstock.errors import ProgramError, SpecError, Unavailable
from penstock.exec import temporaries
from penstock.exec.data_parallel import DataParallel
from penstock.exec.memory import ReplicaMemory
from penstock.exec.temporaries import ReleasePolicy, Temporaries
from penstock.graph.analysis.buffers import check
from penstock.graph.analysis.liveness import staying
from penstock.graph.passes import PassChoice
from penstock.graph.ssa import Mode
from penstock.native.engine import AllocationMeter

PLANNED = (6, 6, 7, 6, 7, 2, 6)  # sizes that come again: runs that are watched, and runs in planned memory


@pytest.fixture
def two_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_NUM", "2")


@pytest.fixture
def not_eager() -> Iterator[None]:
    fluid.set_flags({"FLAGS_eager_delete_tensor_gb": -1.0})
    yield
    fluid.set_flags({"FLAGS_eager_delete_tensor_gb": 0.0})


def executor(network: Network, scope: fluid.Scope, *, drop: int = 1, **fields: object) -> fluid.ParallelExecutor:
    """A ParallelExecutor with these fields of BuildStrategy."""
    strategy, execution = fluid.BuildStrategy(), fluid.ExecutionStrategy()
    for name, field in fields.items():
        setattr(strategy, name, field)
    execution.num_iteration_per_drop_scope = drop
    return fluid.ParallelExecutor(
        False, loss_name=network.loss, main_program=network.main, scope=scope, build_strategy=strategy,
        exec_strategy=execution,
    )  # fmt: skip


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", ["all_reduce", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_planned_memory_gives_the_same_bits_on_every_schedule(name: str, mode: Mode, num_replicas: int) -> None:
    assert_engine_equals_interpreter(
        NETWORKS[name](), mode=mode, num_replicas=num_replicas, batches=PLANNED, num_threads=4,
        schedule_seeds=range(1, 1 + len(PLANNED)),
    )  # fmt: skip


@pytest.mark.parametrize(("reuse", "inplace"), [(True, False), (False, True), (False, False)])
def test_each_choice_gives_the_same_bits(reuse: bool, inplace: bool) -> None:
    choice = PassChoice(reuse_buffers=reuse, inplace=inplace)
    assert_engine_equals_interpreter(
        NETWORKS["transformer"](), mode="reduce", num_replicas=2, batches=PLANNED, choice=choice, num_threads=3,
        schedule_seeds=(3, 4, 5),
    )  # fmt: skip


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(recipe=recipes())
def test_random_programs_give_the_same_bits_in_planned_memory(recipe: Recipe) -> None:
    network = build(recipe)
    for mode, num_replicas in (("all_reduce", 2), ("reduce", 3)):
        assert_engine_equals_interpreter(
            network, mode="reduce" if mode == "reduce" else "all_reduce", num_replicas=num_replicas,
            batches=(4, 4, 5, 4, 5), schedule_seeds=range(7, 12), num_threads=3,
        )  # fmt: skip


@pytest.mark.usefixtures("two_replicas")
@pytest.mark.parametrize("name", ["conv_net", "transformer"])
def test_memory_optimize_lowers_the_peak_at_equal_parameters(name: str) -> None:
    network = NETWORKS[name]()
    start, peaks, ends = started(network.startup), {}, {}
    for optimize in (None, True, False):
        scope = copy_of(start)
        pe = executor(network, scope, memory_optimize=optimize)
        for number in range(4):
            pe.run([], feed=network.feed(64, number))
        found = pe.statistics()
        assert found["plans"][0]["missed"] == 0
        peaks[optimize], ends[optimize] = found["peak_bytes"], scope
        pe.close()
    assert peaks[None] == peaks[True] < 0.6 * peaks[False], peaks
    for tensor in start.names():
        assert same_bits(value(ends[True], tensor), value(ends[False], tensor)), tensor
        assert same_bits(value(ends[None], tensor), value(ends[False], tensor)), tensor


@pytest.mark.usefixtures("two_replicas")
def test_enable_inplace_lowers_what_separate_temporaries_need() -> None:
    network = NETWORKS["transformer"]()
    arenas = {}
    for inplace in (True, False):
        pe = executor(network, started(network.startup), memory_optimize=False, enable_inplace=inplace)
        for number in range(2):
            pe.run([], feed=network.feed(64, number))
        (plan,) = pe.statistics()["plans"]
        assert (plan["in_place"] > 0) == inplace
        arenas[inplace] = plan["arena_bytes"]
        pe.close()
    assert arenas[True] < arenas[False]


@pytest.mark.usefixtures("two_replicas")
def test_steady_steps_of_the_ctr_model_allocate_no_temporary() -> None:
    network = NETWORKS["ctr_dnn"]()
    pe = executor(network, started(network.startup))
    for number in range(5):
        pe.run([], feed=network.feed(64, number))
    (plan,) = pe.statistics()["plans"]
    assert plan["planned"] > 100
    assert (plan["missed"], plan["unplanned"], plan["abandoned"]) == (0, 0, 0)
    pe.run([network.loss], feed=network.feed(64, 9))
    pe.run([network.loss], feed=network.feed(64, 9))
    fetching = pe.statistics()["plans"][1]
    assert (fetching["missed"], fetching["unplanned"]) == (0, 2)  # the loss of each replica goes to the script
    pe.close()


@pytest.mark.usefixtures("two_replicas")
def test_what_was_fetched_stays_as_it_was() -> None:
    network = NETWORKS["transformer"]()
    pe = executor(network, started(network.startup))
    runs = [pe.run(network.all_fetches, feed=network.feed(6, 0), return_numpy=False) for _ in range(2)]
    fetched = [[value.rows for value in one] for one in runs]
    before = [[t.clone() for t in one] for one in fetched]
    for number in range(4):
        pe.run([], feed=network.feed(6, number))
    for one, known in zip(fetched, before, strict=True):
        assert all(torch.equal(t, k) for t, k in zip(one, known, strict=True))
    pe.close()


@pytest.mark.usefixtures("two_replicas")
def test_eager_deletion_leaves_nothing_between_steps() -> None:
    network = NETWORKS["ctr_dnn"]()
    pe = executor(network, started(network.startup), drop=100)
    for number in range(3):
        pe.run([], feed=network.feed(8, number))
        assert pe.statistics()["temporaries"] == 0
    pe.close()


@pytest.mark.usefixtures("two_replicas", "not_eager")
def test_temporaries_are_cleared_every_n_runs_and_after_a_fetch() -> None:
    network = NETWORKS["ctr_dnn"]()
    start = started(network.startup)
    pe = executor(network, copy_of(start), drop=3)
    held = []
    for number in range(7):
        pe.run([network.loss] if number == 4 else [], feed=network.feed(8, number))
        held.append(pe.statistics()["temporaries"] > 0)
    #      1     2     3 clears  4     5 fetches 6 clears 7
    assert held == [True, True, False, True, False, False, True]
    assert pe.statistics()["plans"][0]["abandoned"] == 0
    pe.drop_local_exe_scopes()
    assert pe.statistics()["temporaries"] == 0 and pe.statistics()["steady_bytes"] == 0
    assert pe._need_create_local_exe_scopes()
    pe.close()


@pytest.mark.usefixtures("two_replicas")
def test_dropping_releases_the_arena_and_training_goes_on() -> None:
    network = NETWORKS["conv_net"]()
    pe = executor(network, started(network.startup))
    for number in range(3):
        pe.run([], feed=network.feed(8, number))
    assert not pe._need_create_local_exe_scopes() and pe.statistics()["steady_bytes"] > 0
    pe.drop_local_exe_scopes()
    assert pe._need_create_local_exe_scopes() and pe.statistics()["steady_bytes"] == 0
    pe.run([], feed=network.feed(8, 0))
    assert not pe._need_create_local_exe_scopes()
    pe.close()


def test_statistics_are_plain_and_count_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS["fit_a_line"]()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for number in ("1", "3"):
        monkeypatch.setenv("CPU_NUM", number)
        for mode in ("AllReduce", "Reduce"):
            reduce = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
            pe = executor(network, started(network.startup), reduce_strategy=reduce)
            for step in range(2):
                pe.run([], feed=network.feed(6, step))
            found[mode, number] = json.loads(json.dumps(pe.statistics()))
            pe.close()
    parameters = found["Reduce", "1"]["parameter_bytes"]
    assert parameters >= (13 + 1) * 4
    assert {s["parameter_bytes"] for s in found.values()} == {parameters}
    assert found["Reduce", "3"]["copy_bytes"] == 0
    assert found["AllReduce", "3"]["copy_bytes"] == 2 * (13 + 1) * 4
    assert all(s["steps"] == 2 for s in found.values())


def peak_of(network: Network, program: fluid.Program, scope: fluid.Scope) -> int:
    exe = fluid.Executor()
    meter = AllocationMeter()
    with meter:
        exe.run(program, feed=network.feed(64, 0), fetch_list=[network.loss], scope=scope)
    return meter.peak


@pytest.mark.parametrize("name", ["conv_net", "transformer"])
def test_a_marked_program_needs_less_memory_for_equal_results(name: str) -> None:
    network = NETWORKS[name]()
    start = started(network.startup)
    plain, scopes, peaks = network.main.clone(), {}, {}
    for kind in ("plain", "optimized", "released"):
        program = plain.clone()
        if kind == "optimized":
            fluid.memory_optimize(program, skip_grads=True)
        if kind == "released":
            fluid.release_memory(program)
        assert program.clone().memory_mark == program.memory_mark
        scopes[kind] = copy_of(start)
        peaks[kind] = peak_of(network, program, scopes[kind])
    assert peaks["released"] <= peaks["optimized"] < 0.7 * peaks["plain"], peaks
    for tensor in start.names():
        assert same_bits(value(scopes["plain"], tensor), value(scopes["optimized"], tensor)), tensor


@pytest.mark.usefixtures("two_replicas")
def test_a_marked_program_retains_gradients_and_reuses_the_rest() -> None:
    network = NETWORKS["conv_net"]()
    program = network.main.clone()
    fluid.memory_optimize(program, skip_grads=True)
    marked = Network(network.name, program, network.startup, network.loss, network.feed)
    pe = executor(marked, started(network.startup), memory_optimize=False)
    for number in range(2):
        pe.run([], feed=network.feed(8, number))
    (lowered,) = pe.core._plans.values()
    buffers = lowered.memory.buffers
    assert buffers is not None and buffers.arena_bytes < buffers.separate_bytes
    variables = lowered.graph.variables
    gradients = {g for op in program.operators for _, g in op.role_vars}
    kept = staying(lowered.graph, eager=True, kept=gradients)
    assert gradients <= {variables[n].name for n in kept}
    check(lowered.graph, buffers, lasting={variables[n].storage for n in kept})
    assert pe.statistics()["temporaries"] == 0
    pe.close()


def test_marks_name_what_is_wrong() -> None:
    network = NETWORKS["fit_a_line"]()
    with pytest.raises(ProgramError, match="nowhere"):
        fluid.memory_optimize(network.main, skip_opt_set={"nowhere"})
    with pytest.raises(SpecError, match="level is 7"):
        fluid.memory_optimize(network.main, level=7)


def test_print_log_says_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    network = NETWORKS["fit_a_line"]()
    fluid.memory_optimize(network.main, print_log=True)
    assert "temporaries at their last use" in capsys.readouterr().out


def test_shared_memory_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS["conv_net"]()
    core = DataParallel(network.main, ReplicaMemory(started(network.startup)), mode="all_reduce", num_replicas=1)
    core.temporaries = Temporaries(network.main, core.choice, ReleasePolicy(), shared=True)
    core.run(network.feed(8, 0), [])
    monkeypatch.setattr(temporaries, "usable_bytes", lambda: 4096)
    with pytest.raises(Unavailable, match="this process may use 0 MiB"):
        core.run(network.feed(8, 1), [])
    core.close()


def test_temporaries_of_a_large_watched_run_are_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the arena would be taken beside what the C library has free: twice the memory from the second run on."""
    calls: list[int] = []
    network = NETWORKS["fit_a_line"]()
    core = DataParallel(network.main, ReplicaMemory(started(network.startup)), mode="all_reduce", num_replicas=1)
    monkeypatch.setattr(temporaries, "return_freed", lambda: calls.append(core.temporaries.runs))
    for limit, rows in ((temporaries.RETURNED_FROM, 6), (1, 7)):
        monkeypatch.setattr(temporaries, "RETURNED_FROM", limit)
        for seed in range(3):
            core.run(network.feed(rows, seed), [])
    core.close()
    assert calls == [4], "as the plan of 7 rows runs a second time"
