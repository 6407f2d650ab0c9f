"""What the row tests share: ParallelExecutors by a few words, and operators that meet. Imported by tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.property.networks import Network
from tests.property.oracle import started, value

import penstock as fluid
from penstock.program.program import Program
from penstock.scope import Scope

MODES = ("AllReduce", "Reduce")
_EXECUTION = ("num_threads", "num_iteration_per_drop_scope", "allow_op_delay")


class Trainers:
    """Makes ParallelExecutors: `trainers(network, replicas=3, mode="Reduce", num_threads=2, field=…)`."""

    def __init__(self, set_environment: Callable[[str, Any], None]) -> None:
        self._set, self._made = set_environment, list[fluid.ParallelExecutor]()

    def __call__(
        self,
        network: Network,
        scope: Scope | None = None,
        *,
        replicas: int = 2,
        mode: str = "AllReduce",
        program: Program | None = None,
        **fields: Any,
    ) -> fluid.ParallelExecutor:
        """Return one for the network's training program, started unless a scope is given; `program`: another one."""
        self._set("CPU_NUM", replicas)
        build, execution = fluid.BuildStrategy(), fluid.ExecutionStrategy()
        build.reduce_strategy = getattr(fluid.BuildStrategy.ReduceStrategy, mode)
        for name, field in fields.items():
            setattr(execution if name in _EXECUTION else build, name, field)
        self._made.append(
            fluid.ParallelExecutor(
                use_cuda=False,
                loss_name=network.loss if program is None else None,
                main_program=program or network.main,
                exec_strategy=execution,
                build_strategy=build,
                scope=scope or started(network.startup),
            )
        )
        return self._made[-1]

    def close(self) -> None:
        """Close all of them."""
        for executor in self._made:
            executor.close()


def listed(executor: fluid.ParallelExecutor, feed: Any, name: str) -> list[np.ndarray]:
    """Run a step; return a fetch of each replica."""
    (parts,) = executor.core.run(feed, [name])
    return [part.numpy().copy() for part in parts]


def persistables(program: Program, scope: Scope) -> dict[str, torch.Tensor]:
    """Return copies of what a program keeps in its scope."""
    kept = (v.name for v in program.variables.values() if v.persistable and v.storage == v.name)
    return {name: value(scope, name).clone() for name in kept if scope.find(name) is not None}


def assert_near(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    """Compare every tensor of two scopes."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        apart = float((tensor.double() - right[name].double()).abs().max())
        assert apart <= atol, f"{name}: {apart} apart"


class Meeting:
    """What the operator `penstock.test_meet` sees: how many of its calls were inside it at one time.

    A call waits until as many are inside as are expected; `patience_s` is how long it does before the test has failed.
    """

    patience_s = 60.0

    def __init__(self) -> None:
        self._changed, self._inside, self.most, self.calls, self._expected = threading.Condition(), 0, 0, 0, 1

    def start(self, expected: int) -> None:
        """Forget what was seen; calls wait for so many. With 1 nobody waits: who runs alone has nobody to meet."""
        self.most, self.calls, self._expected = 0, 0, expected

    def meet(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        """Wait for another call; return x + turn."""
        with self._changed:
            self._inside, self.calls = self._inside + 1, self.calls + 1
            self.most = max(self.most, self._inside)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._expected, self.patience_s)
            self._inside -= 1
        return x + turn


MEETING = Meeting()
_library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has not typed it
_library.define("test_meet(Tensor x, int turn) -> Tensor")
_library.impl("test_meet", MEETING.meet, "CPU")
_library.impl("test_meet", lambda x, turn: torch.empty_like(x), "Meta")


def two_that_meet() -> Network:
    """A program of two independent slow operators, added up."""
    main, startup = Program(seed=1), Program(seed=1)
    with fluid.program_guard(main, startup):
        x = fluid.layers.data(name="x", shape=[2])
        out = torch.ops.penstock.test_meet(x, 1) + torch.ops.penstock.test_meet(x, 2)
    return Network("two_that_meet", main, startup, out.name, lambda rows, _: {"x": np.ones((rows, 2), "float32")})
