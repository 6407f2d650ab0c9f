"""`fluid.install_check`: whether a training runs here. `penstock doctor` says what the machine has."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import Bug
from penstock.exec.executor import Executor
from penstock.exec.parallel import CompiledProgram
from penstock.exec.places import CPUPlace, CUDAPlace, is_compiled_with_cuda
from penstock.program import layers
from penstock.program.optimizers import SGDOptimizer
from penstock.program.program import Program
from penstock.program.record.context import program_guard
from penstock.scope import Scope

_STEPS = 3
_CLOSE = 1e-5  # float32; replicas add up in another order
_ROWS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], np.float32)


def run_check() -> None:
    """Train a layer on one replica and on two, and print that both agree. Raises Bug if they do not.

    On the first GPU if there is one, with two replicas on the processor.
    """
    place = CUDAPlace(0) if is_compiled_with_cuda() else CPUPlace()
    alone, shared = _trained(place, 1), _trained(CPUPlace(), 2)
    if not np.allclose(alone, shared, rtol=_CLOSE, atol=_CLOSE):
        raise Bug(f"run_check: one replica on {place!r} has the losses {alone}, two on the processor {shared}")
    print(f"Penstock works: {_STEPS} steps on {place!r} and on two replicas, the last loss is {alone[-1]:.6f}")  # noqa: T201 - what it is for


def _trained(place: Any, num_replicas: int) -> list[float]:
    main, startup, scope = Program(), Program(), Scope()
    with program_guard(main, startup):
        x = layers.data("x", [2])
        loss: Any = layers.mean(layers.square(layers.fc(x, 1)))
        SGDOptimizer(0.001).minimize(loss)
    startup.random_seed = 1
    executor = Executor(place)
    executor.run(startup, scope=scope)
    program: Any = main
    if num_replicas > 1:
        program = CompiledProgram(main).with_data_parallel(loss.name, places=[place] * num_replicas)
    fed = {"x": _ROWS}
    return [float(np.mean(executor.run(program, fed, [loss], scope=scope)[0])) for _ in range(_STEPS)]
