"""The original Fluid ParallelExecutor of paddlepaddle 2.6.2, one CPU place a core. `mode`: "all_reduce" or "reduce".

2.6.2 has no public way to it any more, but `CompiledProgram._compile_data_parallel` still builds one. It passes an
empty loss name to the C++ executor, which then inserts no gradient exchange, and replicas drift apart in silence; so
the constructor is wrapped while it is called, to pass the real one. `check` compares the parameters of all replicas
and refuses to go on if they differ.

Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement, movements
from bench.workloads.workload import Array, Workload

LOSS_NAME_ARGUMENT = 2


class PaddleTrainer:
    """Owned by one thread."""

    def __init__(self, workload: Workload, *, mode: str, cores: int) -> None:
        os.environ["CPU_NUM"] = str(cores)
        # only the peer's own environment has it
        import paddle
        from paddle import static
        from paddle.base import core

        from bench.peers import paddle_programs

        paddle.enable_static()
        self._workload, self._scope = workload, static.global_scope()
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            recorded = paddle_programs.record(workload)
        static.Executor(paddle.CPUPlace()).run(startup)
        for name, value in recorded.initial.items():
            self._scope.find_var(name).get_tensor().set(value, core.CPUPlace())
        self._parameters = [parameter.name for parameter in main.all_parameters()]
        strategy = static.BuildStrategy()
        modes = static.BuildStrategy.ReduceStrategy
        strategy.reduce_strategy = modes.Reduce if mode == "reduce" else modes.AllReduce
        self._compiled = static.CompiledProgram(main, build_strategy=strategy)  # owns the graph that the executor runs
        self._executor = _build(self._compiled, recorded.loss.name, cores, self._scope)
        self._loss, self._parts = recorded.loss.name, recorded.parts
        self._feeds = [_tensors(feed, core) for feed in paddle_programs.feeds(workload)]
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train; return the last loss, the mean over replicas."""
        loss = 0.0
        for step in range(num_steps):
            self._executor.feed_and_split_tensor_into_local_scopes(self._feeds[self._next % len(self._feeds)])
            self._next += 1
            if fetches(step, num_steps):
                [merged] = self._executor.run([self._loss], True)._move_to_list()
                loss = float(np.mean(np.asarray(merged)))
            else:
                self._executor.run([], True)
        return loss

    def check(self) -> None:
        """Raise RuntimeError if the parameters of two replicas differ."""
        scopes = self._executor.local_scopes()
        for name in self._parameters:
            values = [np.asarray(scope.find_var(name).get_tensor()) for scope in scopes]
            apart = max(float(np.abs(values[0] - value).max()) for value in values)
            if apart > 0.0:
                raise RuntimeError(f"parameter {name} differs between replicas by up to {apart:.3g}: no fair race")

    def movements(self) -> dict[str, Movement]:
        """Return how far each weight has moved on the first replica; `check` sees to the others."""
        scope = self._executor.local_scopes()[0]

        def value(name: str) -> Array:
            found: Array = np.asarray(scope.find_var(name).get_tensor())
            return found

        joined = {name: np.concatenate([value(part) for part in parts], -1) for name, parts in self._parts.items()}
        return movements(self._workload, joined)

    def close(self) -> None:
        """Threads end with the process."""


def _build(compiled: Any, loss_name: str, cores: int, scope: Any) -> Any:
    from paddle import static
    from paddle.base import compiler, core

    original = core.ParallelExecutor

    def with_loss_name(*arguments: Any) -> Any:
        return original(*arguments[:LOSS_NAME_ARGUMENT], loss_name, *arguments[LOSS_NAME_ARGUMENT + 1 :])

    compiled._scope = scope
    compiled._exec_strategy = static.ExecutionStrategy()
    compiled._exec_strategy.num_threads = cores  # its documents' best practice; it would take two a place
    core.ParallelExecutor = with_loss_name
    try:
        return compiled._compile_data_parallel([core.CPUPlace()] * cores, compiler.DeviceType.CPU, scope)
    finally:
        core.ParallelExecutor = original


def _tensors(feed: dict[str, Any], core: Any) -> dict[str, Any]:
    made = {}
    for name, values in feed.items():
        made[name] = core.LoDTensor()
        rows, lengths = values if isinstance(values, tuple) else (values, None)
        made[name].set(np.ascontiguousarray(rows), core.CPUPlace())
        if lengths is not None:
            made[name].set_recursive_sequence_lengths([lengths.tolist()])
    return made


def make(options: Options) -> PaddleTrainer:
    """Build it."""
    return PaddleTrainer(Workload.load(options.workload), mode=options.mode, cores=options.cores)
