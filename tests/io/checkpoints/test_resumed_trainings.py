"""A training that goes on from a checkpoint equals one that was never interrupted, to the bit, on this machine."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.io.checkpoints.folders import kills_itself, names
from tests.property.networks import Network, conv_net, ctr_dnn, fit_a_line
from tests.property.oracle import copy_of, intra_op_threads, same_bits, started, value

import penstock as fluid
from penstock.errors import SpecError, Unavailable, UserError
from penstock.io.checkpoints.fence import StaleAttempt
from penstock.scope import Scope

STEPS, STOP = 7, 5
Run = Callable[[Network, Scope], Callable[[int], object]]


def by_executor(network: Network, scope: Scope) -> Callable[[int], object]:
    """Return what runs a step, one operator after another."""
    exe = fluid.Executor(fluid.CPUPlace())
    return lambda step: exe.run(network.main, network.feed(6, step), [network.loss], scope=scope)


def by_replicas(mode: str) -> Run:
    """Return the same on two replicas."""

    def run(network: Network, scope: Scope) -> Callable[[int], object]:
        build = fluid.BuildStrategy()
        build.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
        places = [fluid.CPUPlace()] * 2
        compiled = fluid.CompiledProgram(network.main).with_data_parallel(network.loss, build, places=places)
        exe = fluid.Executor(fluid.CPUPlace())
        return lambda step: exe.run(compiled, network.feed(6, step), [network.loss], scope=scope)

    return run


RUNS: dict[str, Run] = {
    "executor": by_executor, "all_reduce": by_replicas("AllReduce"), "reduce": by_replicas("Reduce"),
}  # fmt: skip
NETWORKS: dict[str, Callable[[], Network]] = {"ctr_dnn": ctr_dnn, "conv_net": lambda: conv_net("adam")}


def assert_same(got: Scope, wanted: Scope, network: Network) -> None:
    """Check every persistable variable, to the bit."""
    kept = [v.name for v in network.main.variables.values() if v.persistable]
    assert kept
    for name in kept:
        assert same_bits(value(got, name), value(wanted, name)), name


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("run", RUNS)
def test_a_training_goes_on_as_if_it_had_not_stopped(run: str, network: str, tmp_path: Path) -> None:
    first, second, again = (NETWORKS[network]() for _ in range(3))  # the last is recorded anew, and never started
    whole = started(first.startup)
    stopped, scope = copy_of(whole), Scope()
    with intra_op_threads(1):
        one = RUNS[run](first, whole)
        for step in range(STEPS):
            one(step)
        other = RUNS[run](second, stopped)
        with fluid.io.CheckpointManager(tmp_path, second.main, scope=stopped, every_steps=2) as manager:
            assert manager.restore() is None
            for step in range(STOP):
                other(step)
                assert manager.step(position={"batch": step + 1}) == (step % 2 == 1)

        manager = fluid.io.CheckpointManager(tmp_path, again.main, scope=scope, every_steps=2)
        restored = manager.restore()
        assert restored is not None
        assert (restored.step, restored.position, restored.positions) == (4, {"batch": 4}, ({"batch": 4},))
        third = RUNS[run](again, scope)
        for step in range(restored.position["batch"], STEPS):
            third(step)
            manager.step(position={"batch": step + 1})
        manager.close()
    assert_same(scope, whole, again)
    assert manager.num_steps == STEPS


def decayed() -> Network:
    """A network whose learning rate falls by a counter of steps."""
    main, startup = fluid.Program(seed=3), fluid.Program(seed=3)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[4], dtype="float32")
        loss = fluid.layers.mean(fluid.layers.dropout(fluid.layers.fc(x, 8), 0.5))
        rate = fluid.layers.exponential_decay(0.5, decay_steps=2, decay_rate=0.5)
        fluid.optimizer.Adam(learning_rate=rate).minimize(loss)

    def feed(rows: int, seed: int) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(seed).normal(size=(rows, 4)).astype("float32")}

    return Network("decayed", main, startup, loss.name, feed)


def test_the_counter_of_a_decayed_rate_goes_on(tmp_path: Path) -> None:
    network, scope = decayed(), Scope()
    whole = started(network.startup)
    step = by_executor(network, whole)
    manager = fluid.io.CheckpointManager(tmp_path, network.main, scope=whole)
    for number in range(3):
        step(number)
    manager.save()
    for number in range(3, 6):
        step(number)
    manager.close()
    again = decayed()
    assert fluid.io.CheckpointManager(tmp_path, again.main, scope=scope).restore() is not None
    assert int(value(scope, "@LR_DECAY_COUNTER@")) == 2, "it counts from 0"
    step = by_executor(again, scope)
    for number in range(3, 6):
        step(number)
    assert_same(scope, whole, again)


def test_an_unseeded_program_and_the_users_random_numbers_resume(tmp_path: Path) -> None:
    def recorded() -> Network:
        network = ctr_dnn()
        network.main.random_seed = 0
        return network

    def drawn(network: Network, scope: Scope) -> Callable[[int], object]:
        exe = fluid.Executor(fluid.CPUPlace())

        def step(_: int) -> object:
            seed = np.random.randint(1000) + random.randrange(1000) + int(torch.randint(1000, ()))
            return exe.run(network.main, network.feed(6, seed), [network.loss], scope=scope)

        return step

    network, again, scope = recorded(), recorded(), Scope()
    whole = started(network.startup)
    step = drawn(network, whole)
    manager = fluid.io.CheckpointManager(tmp_path, network.main, scope=whole)
    for number in range(3):
        step(number)
    manager.save()
    for number in range(3):
        step(number)
    manager.close()
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(0)
    assert fluid.io.CheckpointManager(tmp_path, again.main, scope=scope).restore() is not None
    step = drawn(again, scope)
    for number in range(3):
        step(number)
    assert_same(scope, whole, again)


def trained(
    folder: Path, network: Network, steps: range, **settings: object
) -> tuple[fluid.io.CheckpointManager, Scope]:
    """Train from what is there; return the manager, closed, and the scope."""
    scope = started(network.startup)
    step = by_executor(network, scope)
    manager = fluid.io.CheckpointManager(folder, network.main, scope=scope, **settings)
    found = manager.restore()
    for number in range(found.step if found else steps.start, steps.stop):
        step(number)
        manager.step()
    manager.close()
    return manager, scope


@pytest.mark.parametrize("phase", ["begin", "values", "manifest", "commit", "committed", "removal"])
def test_a_process_killed_while_writing_resumes_bit_for_bit(phase: str, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", decayed(), range(9), every_steps=2)
    network = decayed()
    scope = started(network.startup)
    step = by_executor(network, scope)

    def work(at_phase: Callable[[str], None]) -> None:
        manager = fluid.io.CheckpointManager(tmp_path / "killed", network.main, scope=scope, every_steps=2, keep=1)
        manager.at_phase = at_phase
        for number in range(9):
            step(number)
            manager.step()
        manager.close()

    with intra_op_threads(1):
        assert kills_itself(work, phase, turn=2)
        _, again = trained(tmp_path / "killed", decayed(), range(9), every_steps=2)
    assert_same(again, whole, network)


def test_a_checkpoint_of_another_program_shows_the_difference(tmp_path: Path) -> None:
    trained(tmp_path, fit_a_line(), range(2), every_steps=1)
    other = fit_a_line("adam")
    before = started(other.startup)
    scope = copy_of(before)
    manager = fluid.io.CheckpointManager(tmp_path, other.main, scope=scope)
    with pytest.raises(UserError, match=r"is of another program. First difference"):
        manager.restore()
    assert_same(scope, before, other)


def test_without_a_value_nothing_is_written(tmp_path: Path) -> None:
    manager = fluid.io.CheckpointManager(tmp_path, fit_a_line().main, scope=Scope())
    with pytest.raises(UserError, match=r"has no value to save.*startup"):
        manager.save()
    manager.close()
    assert names(tmp_path) == []


class Clock:
    """A clock of the test: `read` once somebody has looked at it."""

    def __init__(self) -> None:
        self.now_s, self.read = 0.0, threading.Event()

    def perf_counter(self) -> float:
        found = self.now_s
        self.read.set()
        return found


def test_training_continues_during_a_write_and_the_next_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = fit_a_line()
    scope = started(network.startup)
    step = by_executor(network, scope)
    manager = fluid.io.CheckpointManager(tmp_path, network.main, scope=scope, every_steps=2)
    goes_on, reached = threading.Event(), threading.Event()

    def stop(phase: str) -> None:
        if phase == "manifest":
            reached.set()
            assert goes_on.wait(60)

    manager.at_phase = stop
    for number in range(3):
        step(number)
        manager.step()
    assert reached.wait(60)
    step(3)  # while the writer stands still
    assert manager.statistics.written == 0
    at_two = scope
    clock = Clock()
    monkeypatch.setattr("penstock.io.checkpoints.writer_thread.time", clock)

    def go_on_when_it_waits() -> None:
        assert clock.read.wait(60)
        clock.now_s = 7.0
        goes_on.set()

    going_on = threading.Thread(target=go_on_when_it_waits)
    going_on.start()
    manager.step()
    going_on.join()
    assert 7 <= manager.statistics.waited_s < 8
    manager.close()
    assert (manager.statistics.begun, manager.statistics.written) == (2, 2)
    again = Scope()
    reader = fluid.io.CheckpointManager(tmp_path, fit_a_line().main, scope=again)
    found = reader.restore()
    assert found is not None and found.step == 4
    assert_same(again, at_two, network)


def test_a_writers_error_is_raised_by_the_next_call_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = fit_a_line()
    scope = started(network.startup)
    step = by_executor(network, scope)
    manager = fluid.io.CheckpointManager(tmp_path, network.main, scope=scope, every_steps=1)

    def full(phase: str) -> None:
        if phase == "manifest":
            raise OSError(28, "No space left on device")

    manager.at_phase = full
    step(0)
    manager.step()
    with pytest.raises(Unavailable, match=r"checkpoint of step 1 was not written: .*No space left"):
        manager.wait()
    assert "No space left" in caplog.text
    manager.at_phase = lambda phase: None
    step(2)
    manager.step()
    manager.close()
    assert manager.statistics.written == 1


def test_an_attempt_that_was_followed_is_told_so(tmp_path: Path) -> None:
    network = fit_a_line()
    scope = started(network.startup)
    old = fluid.io.CheckpointManager(tmp_path, network.main, scope=scope)
    old.save()
    old.wait()
    new = fluid.io.CheckpointManager(tmp_path, fit_a_line().main, scope=Scope())
    assert new.restore() is not None

    def save_and_close() -> None:  # the one that first sees how the save has ended says so
        old.save()
        old.close()

    with pytest.raises(StaleAttempt, match="has taken over"):
        save_and_close()


def test_settings_come_from_the_job_where_nobody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="PENSTOCK_CHECKPOINT_DIR"):
        fluid.io.CheckpointManager()
    monkeypatch.setenv("PENSTOCK_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CHECKPOINT_EVERY_STEPS", "3")
    monkeypatch.setenv("PENSTOCK_CHECKPOINT_KEEP", "1")
    network = fit_a_line()
    scope = started(network.startup)
    step = by_executor(network, scope)
    manager = fluid.io.CheckpointManager(program=network.main, scope=scope)
    for number in range(7):
        step(number)
        manager.step()
    manager.close()
    assert [name[-3:] for name in names(tmp_path)] == ["006"]
    monkeypatch.setenv("PENSTOCK_CHECKPOINT_KEEP", "none")
    with pytest.raises(SpecError, match="PENSTOCK_CHECKPOINT_KEEP is 'none'"):
        fluid.io.CheckpointManager()


def test_wrong_settings_and_calls_are_named(tmp_path: Path) -> None:
    program = fit_a_line().main
    for wrong in ({"keep": 0}, {"keep_best": -1}, {"best": "largest"}, {"every_steps": 0}, {"every_s": -1.0}):
        with pytest.raises(SpecError, match=next(iter(wrong))):
            fluid.io.CheckpointManager(tmp_path, program, **wrong)
    manager = fluid.io.CheckpointManager(tmp_path, program)
    with pytest.raises(SpecError, match=r"position .* cannot be kept"):
        manager.save(position={"reader": object()})
    manager.close()
    for call in (manager.step, manager.save, manager.restore):
        with pytest.raises(UserError, match="was closed"):
            call()


ENDS_AT_ONCE = """
import sys
import penstock as fluid
from tests.property.networks import fit_a_line
from tests.property.oracle import started
network = fit_a_line()
manager = fluid.io.CheckpointManager(sys.argv[1], network.main, scope=started(network.startup))
manager.save()
"""


def test_a_process_without_close_has_written_its_last_checkpoint(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path)], check=True, timeout=120, env=os.environ)
    manager = fluid.io.CheckpointManager(tmp_path, fit_a_line().main, scope=Scope())
    assert manager.restore(strict=True) is not None
