"""Run lowered graphs on the native engine.

A `TorchPlan` is a graph of operator calls over numbered slots; an `Engine` is a pool of threads that runs plans, and
the always-on trace of what it ran. The interpreter lock is not held while a step runs, except inside the Python
functions of host instructions. Nothing here knows Programs or graphs: `penstock.exec` lowers them.
On failure: the first error wins, the rest of the step is skipped, slots that are not kept are emptied, kept ones
hold whatever was written before, and the engine runs the next step as if nothing had happened.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from penstock.errors import PenstockError, SpecError
from penstock.native import check_built

check_built("_engine")

from penstock.native import _engine  # noqa: E402 - a library built for another torch must not be loaded
from penstock.native import intra_op as _  # noqa: E402, F401 - has the engine use the runtimes that it has probed
from penstock.native._engine import (  # noqa: E402 - as above
    AllocationMeter,
    Arena,
    DevicePlan,
    EngineStateError,
    FedShares,
    FeedReader,
    PretendedDevices,
    TorchPlan,
)

__all__ = [
    "AllocationMeter",
    "Arena",
    "DevicePlan",
    "Engine",
    "EngineError",
    "EngineStateError",
    "FedShares",
    "FeedReader",
    "PretendedDevices",
    "TorchPlan",
]


class EngineError(PenstockError):
    """An instruction failed. Fields: instruction, op_index (-1: the step was interrupted), inputs.

    `message` is the operator's own; `inputs` describes what it was called with, as `Float[2, 3], Long[5], 1`.
    `penstock.exec` knows the operator's name and the user's line, and raises `OperatorError` from this.
    """

    code = "engine_error"
    instruction: int
    op_index: int
    inputs: str


class Engine:
    """A pool of threads that runs plans, one step at a time; the caller of `run` is one of them.

    `num_threads` workers, but no more than `max_running`: one that could never run is not started. Each operator may
    use `intra_op_threads` threads; the setting is each worker's own and touches no other thread of the process.
    `ring_capacity` is the number of trace events that each thread keeps between two drains.
    After a fork the child has to make its own. At interpreter exit open engines are closed.
    """

    def __init__(
        self, num_threads: int, *, max_running: int, intra_op_threads: int, ring_capacity: int = 1 << 16
    ) -> None:
        given = {"num_threads": num_threads, "max_running": max_running, "intra_op_threads": intra_op_threads}
        for name, value in given.items():
            if value < 1:
                raise SpecError(f"{name} is {value}, but at least 1 was expected", got=value, expected=">= 1")
        self.num_workers = min(num_threads, max_running)
        self._native = _engine.Engine(self.num_workers, intra_op_threads, ring_capacity)
        # Also before the interpreter goes: a pool thread that asks for its lock after that would never return.
        weakref.finalize(self, self._native.close)

    def run(self, plan: TorchPlan, step: int, *, schedule_seed: int = 0) -> None:
        """Run every instruction of `plan` once and wait for the last; `step` is reported in trace events.

        A `schedule_seed` other than 0 picks at random among what is ready and delays instructions at random: for
        tests, since results must not depend on it.
        Raises: EngineError if an instruction failed; EngineStateError if the engine is closed, running a step of
        another thread, or inherited through a fork.
        """
        failure = self._native.run(plan, step, schedule_seed)
        if failure is None:
            return
        instruction, op_index, message, inputs = failure
        raise EngineError(message, instruction=instruction, op_index=op_index, inputs=inputs)

    def prepared(self, plan: TorchPlan, fed: Sequence[int]) -> object:
        """Return a capsule by which other native code feeds these slots and runs `plan`, without Python.

        The caller holds engine and plan as long; no other run of the engine goes on meanwhile.
        """
        return self._native.prepared(plan, fed)

    def drain(self) -> dict[str, Any]:
        """Return the trace events written since the last drain as columns, grouped by thread.

        `start_ns` i64 (Unix time), `duration_ns` u32, `op` u32, `step` u64, `thread` u16 (workers first, then host
        threads); and `lost`, the number of events that were overwritten before this drain.
        Any thread may call it, also during a step.  Cost: about 20 ns an event.
        """
        return dict(self._native.drain())

    def set_tracing(self, *, on: bool) -> None:
        """Record the runs that start from now on, or do not: for `bench tracing`, which measures what the trace costs.

        A run that is not recorded is missing in the trace, in what is made of it, and in `statistics()['executed']`.
        """
        self._native.set_tracing(on=on)

    def statistics(self) -> dict[str, int]:
        """Return counts since the start: runs, failed_runs, executed, host_executed, steals, parks, wakes, workers."""
        return self._native.statistics()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; a step that was running then has been asked to end."""
        return self._native.closed

    def close(self) -> None:
        """Stop the pool. A step that another thread is running fails. Idempotent."""
        self._native.close()
