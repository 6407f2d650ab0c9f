"""The chain of `bench engine` as a user has it: a Program that a ParallelExecutor runs.

The same as in the original executor's process (`_paddle_chain`): x + 1 + 1 … on one element, x and 1 being persistable,
nothing fed, the end fetched, one replica and one thread. So the time has all that `run` does besides its operators.
"""

from __future__ import annotations

import time

import torch

import penstock as fluid
from bench._environment import variable_set


class ProgramChain:
    """Owned by one thread. Raises RuntimeError if the chain does not add up, or if a pass has made it shorter."""

    def __init__(self, length: int) -> None:
        main, startup = fluid.Program(), fluid.Program()
        with fluid.program_guard(main, startup):
            value = fluid.layers.create_global_var([1], 1.0, "float32", persistable=True, name="x")
            one = fluid.layers.create_global_var([1], 1.0, "float32", persistable=True, name="one")
            for _ in range(length):
                value = torch.add(value, one)
        scope, execution = fluid.Scope(), fluid.ExecutionStrategy()
        fluid.Executor(fluid.CPUPlace()).run(startup, scope=scope)
        execution.num_threads = 1
        with variable_set("CPU_NUM", "1"):
            self._executor = fluid.ParallelExecutor(False, None, main, scope=scope, exec_strategy=execution)
        self._last = value.name
        (result,) = self._executor.run([self._last], {})
        handles = len(self._executor.core.graph(1).handles)
        if float(result[0]) != length + 1 or handles != length:
            raise RuntimeError(f"the chain gave {result} in {handles} operators; expected {length + 1} in {length}")

    def chain(self) -> float:
        """Run the chain once; return the seconds."""
        begin = time.perf_counter()
        self._executor.run([self._last], {}, return_numpy=False)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Stop the thread."""
        self._executor.close()
