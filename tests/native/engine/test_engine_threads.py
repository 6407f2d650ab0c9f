"""Who runs at the same time as whom: workers, host threads, the interpreter, other callers, a fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from penstock.native.engine import Engine, EngineError, EngineStateError, TorchPlan

WAIT_S = 30


@pytest.fixture(scope="module")
def python_operator() -> Callable[[Callable[[Tensor], Tensor]], None]:
    """An operator `penstock_engine_test::call` that runs a Python function on whichever thread calls it."""
    current: list[Callable[[Tensor], Tensor]] = []

    @torch.library.custom_op("penstock_engine_test::call", mutates_args=())
    def call(x: Tensor) -> Tensor:
        return current[0](x)

    def use(function: Callable[[Tensor], Tensor]) -> None:
        current[:] = [function]

    return use


def calls(count: int) -> TorchPlan:
    """Make a plan of `count` independent calls of the Python operator."""
    plan = TorchPlan(1)
    plan.keep(0)
    plan.set(0, torch.ones(1))
    for i in range(count):
        plan.add("penstock_engine_test::call", "", [("slot", 0)], [None], i)
    plan.seal()
    return plan


Use = Callable[[Callable[[Tensor], Tensor]], None]


def test_independent_operators_run_at_the_same_time(python_operator: Use) -> None:
    barrier = threading.Barrier(2)

    def meet(x: Tensor) -> Tensor:
        barrier.wait(WAIT_S)  # returns only if another operator runs meanwhile
        return x.clone()

    python_operator(meet)
    engine = Engine(2, max_running=2, intra_op_threads=1)
    engine.run(calls(10), 1)
    engine.close()
    assert not barrier.broken


@pytest.mark.parametrize(("num_threads", "max_running"), [(4, 2), (3, 1), (2, 4)])
def test_no_more_operators_run_at_once_than_allowed(python_operator: Use, num_threads: int, max_running: int) -> None:
    lock = threading.Lock()
    running: list[int] = [0, 0]
    pause = threading.Event()

    def counted(x: Tensor) -> Tensor:
        with lock:
            running[0] += 1
            running[1] = max(running[1], running[0])
        pause.wait(0.002)  # lets the other threads in
        with lock:
            running[0] -= 1
        return x.clone()

    python_operator(counted)
    engine = Engine(num_threads, max_running=max_running, intra_op_threads=1)
    engine.run(calls(30), 1)
    assert engine.statistics()["workers"] == min(num_threads, max_running)
    engine.close()
    assert running[1] <= min(num_threads, max_running)


def test_only_workers_use_the_given_intra_op_threads(python_operator: Use) -> None:
    before = torch.get_num_threads()
    seen: list[tuple[str, int, bool]] = []

    def look(x: Tensor) -> Tensor:
        seen.append((threading.current_thread().name, torch.get_num_threads(), torch.is_grad_enabled()))
        return x.clone()

    def look_on_host(tensors: list[Tensor]) -> Sequence[Tensor]:
        seen.append(("host", torch.get_num_threads(), torch.is_grad_enabled()))
        return []

    python_operator(look)
    wanted = before + 1
    engine = Engine(2, max_running=2, intra_op_threads=wanted)
    plan = calls(20)
    engine.run(plan, 1)
    host = TorchPlan(0)
    host.add_python(look_on_host, [], [], 0)
    host.seal()
    engine.run(host, 2)
    engine.close()
    assert {(threads, grad) for _, threads, grad in seen} == {(wanted, False)}
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


def test_an_operators_intra_op_threads_affect_itself_alone(python_operator: Use) -> None:
    # as the first at::parallel_for of a library compiled with OpenMP does, on every thread
    before = torch.get_num_threads()
    seen: list[int] = []

    def look_and_set(x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        torch.set_num_threads(before + 2)
        return x.clone()

    python_operator(look_and_set)
    engine = Engine(1, max_running=1, intra_op_threads=before + 1)
    try:
        engine.run(calls(3), 1)
    finally:
        engine.close()
        torch.set_num_threads(before)
    assert seen == [before + 1] * 3


def test_host_functions_take_tensors_and_give_tensors() -> None:
    plan = TorchPlan(4)
    plan.keep(3)
    plan.set(0, torch.ones(2))
    first = plan.add("aten::neg", "", [("slot", 0)], [1], 0)
    host = plan.add_python(lambda tensors: [tensors[0] * 10, tensors[0]], [1], [2, None], 1)
    last = plan.add("aten::add", "Scalar", [("slot", 2), ("const", 1)], [3], 2)
    plan.edge(first, host)
    plan.edge(host, last)
    plan.seal()
    engine = Engine(1, max_running=1, intra_op_threads=1)
    for step in range(5):
        plan.set(0, torch.ones(2))
        engine.run(plan, step)
        result = plan.get(3)
        assert result is not None
        assert result.tolist() == [-9.0, -9.0]
    statistics = engine.statistics()
    engine.close()
    assert (statistics["executed"], statistics["host_executed"]) == (10, 5)
    assert plan.get(2) is None


def test_host_functions_overlap_each_other_and_operators() -> None:
    barrier = threading.Barrier(3)
    operator_ran = threading.Event()

    def meet(tensors: list[Tensor]) -> Sequence[Tensor]:
        barrier.wait(WAIT_S)  # all three at the same time, on an engine of one worker
        assert operator_ran.wait(WAIT_S)
        return []

    def note(tensors: list[Tensor]) -> Sequence[Tensor]:
        operator_ran.set()
        return []

    plan = TorchPlan(2)
    plan.set(0, torch.ones(1))
    for i in range(3):
        plan.add_python(meet, [], [], i)
    operator = plan.add("aten::neg", "", [("slot", 0)], [1], 3)
    after = plan.add_python(note, [1], [], 4)
    plan.edge(operator, after)
    plan.seal()
    engine = Engine(1, max_running=1, intra_op_threads=1)
    engine.run(plan, 1)
    engine.close()


def test_an_operator_can_be_sent_to_a_host_thread(python_operator: Use) -> None:
    barrier = threading.Barrier(2)

    def meet(x: Tensor) -> Tensor:
        barrier.wait(WAIT_S)
        return x.clone()

    python_operator(meet)
    plan = TorchPlan(1)
    plan.keep(0)
    plan.set(0, torch.ones(1))
    plan.add("penstock_engine_test::call", "", [("slot", 0)], [None], 0, host=True)
    plan.add("penstock_engine_test::call", "", [("slot", 0)], [None], 1)
    plan.seal()
    engine = Engine(1, max_running=1, intra_op_threads=1)
    engine.run(plan, 1)
    engine.close()


def test_other_python_threads_go_on_while_a_step_runs() -> None:
    asked, answered = threading.Event(), threading.Event()

    def answer() -> None:
        assert asked.wait(WAIT_S)
        answered.set()

    def ask(tensors: list[Tensor]) -> Sequence[Tensor]:
        asked.set()
        assert answered.wait(WAIT_S)  # never, if the caller of run() kept the interpreter lock
        return []

    thread = threading.Thread(target=answer)
    thread.start()
    plan = TorchPlan(0)
    plan.add_python(ask, [], [], 0)
    plan.seal()
    engine = Engine(1, max_running=1, intra_op_threads=1)
    engine.run(plan, 1)
    thread.join()
    engine.close()


def test_a_second_caller_is_refused_while_a_step_runs() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold(tensors: list[Tensor]) -> Sequence[Tensor]:
        inside.set()
        assert leave.wait(WAIT_S)
        return []

    plan = TorchPlan(1)
    plan.add_python(hold, [], [], 0)
    plan.seal()
    other = TorchPlan(0)
    other.seal()
    engine = Engine(2, max_running=2, intra_op_threads=1)
    thread = threading.Thread(target=lambda: engine.run(plan, 1))
    thread.start()
    assert inside.wait(WAIT_S)
    try:
        with pytest.raises(EngineStateError, match="one engine runs one step at a time"):
            engine.run(other, 2)
        with pytest.raises(ValueError, match="the plan is running"):
            plan.get(0)
    finally:
        leave.set()
        thread.join()
    engine.run(other, 3)
    engine.close()


def test_closing_during_a_step_fails_that_step() -> None:
    inside, leave = threading.Event(), threading.Event()
    raised: list[EngineError] = []

    def hold(tensors: list[Tensor]) -> Sequence[Tensor]:
        inside.set()
        assert leave.wait(WAIT_S)
        return []

    plan = TorchPlan(2)
    plan.set(0, torch.ones(1))
    held = plan.add_python(hold, [], [], 0)
    plan.edge(held, plan.add("aten::neg", "", [("slot", 0)], [1], 1))
    plan.seal()
    engine = Engine(2, max_running=2, intra_op_threads=1)

    def run() -> None:
        with pytest.raises(EngineError) as caught:
            engine.run(plan, 1)
        raised.append(caught.value)

    runner, closer = threading.Thread(target=run), threading.Thread(target=engine.close)
    runner.start()
    assert inside.wait(WAIT_S)
    closer.start()
    while not engine.closed:  # the step has been told before the flag is seen
        closer.join(0.001)
    leave.set()
    runner.join()
    closer.join()
    assert [error.message for error in raised] == ["the engine was closed during the step"]


FORK = """
import os, torch
from penstock.native.engine import Engine, EngineStateError, TorchPlan
plan = TorchPlan(2)
plan.set(0, torch.ones(2))
plan.keep(0)
plan.add("aten::neg", "", [("slot", 0)], [1], 0)
plan.seal()
engine = Engine(2, max_running=2, intra_op_threads=1)
engine.run(plan, 1)
child = os.fork()
if child == 0:
    try:
        engine.run(plan, 2)
    except EngineStateError as error:
        assert "fork" in str(error), error
        engine.close()
        del engine
        fresh = Engine(2, max_running=2, intra_op_threads=1)
        fresh.run(plan, 3)
        fresh.close()
        os._exit(0)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
engine.run(plan, 2)
"""

EXIT = """
import sys, threading, torch
from penstock.native.engine import Engine, TorchPlan
plan = TorchPlan(1)
plan.add_python(lambda tensors: [torch.ones(1)], [], [0], 0)
plan.seal()
engines = [Engine(2, max_running=2, intra_op_threads=1) for _ in range(3)]
for engine in engines:
    engine.run(plan, 1)
print("ran")
"""

INTERRUPT = """
import threading, torch
from penstock.native.engine import Engine, TorchPlan
inside, leave = threading.Event(), threading.Event()
def hold(tensors):
    print("inside", flush=True)
    assert leave.wait(30)
    return []
plan = TorchPlan(2)
plan.set(0, torch.ones(1))
held = plan.add_python(hold, [], [], 0)
plan.edge(held, plan.add("aten::neg", "", [("slot", 0)], [1], 1))
plan.seal()
import signal
def handler(number, frame):
    leave.set()
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
engine = Engine(2, max_running=2, intra_op_threads=1)
try:
    engine.run(plan, 1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_a_forked_engine_raises_and_the_parents_goes_on() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]  # of fork beside threads, since 3.12
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_interpreter_exits_with_engines_left_open() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], check=False, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_ctrl_c_reaches_python_while_a_step_waits() -> None:
    with subprocess.Popen([sys.executable, "-c", INTERRUPT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "inside\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=150)
    assert (process.returncode, out) == (0, "interrupted\n")
