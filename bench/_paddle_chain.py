"""The chain of `bench engine` in the original ParallelExecutor: one process in the peer's own environment.

Run as a script there (`serve`), it has no torch; `PaddleChain` is the parent's end. The graph is the same: x + 1 + 1 …
on one element, on one CPU place with one thread and the executor that 2.6.2 takes by default, which are its best
settings for a chain. The floor of its operator is the cheapest call of the same kernel that it offers, from Python, in
place and without gradients; the dispatch of that call counts as kernel, in its favour.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TextIO

import numpy as np

from bench.peers import environment
from bench.peers.timed import TimedPeer


class PaddleChain(TimedPeer):
    """The process. Raises PeerMissing at once if the environment is not there."""

    def __init__(self, length: int) -> None:
        super().__init__([str(environment("paddle")), "-m", "bench._paddle_chain", str(length)], threads=1)

    def chain(self) -> float:
        """Return the seconds of one run of the chain."""
        return self.ask("chain")

    def direct(self) -> float:
        """Return the seconds of as many direct calls of the kernel."""
        return self.ask("direct")


class Chain:
    """Both measurements, in the peer's process."""

    def __init__(self, length: int) -> None:
        # only the peer's own environment has it
        import paddle
        from paddle import static
        from paddle.base import compiler, core

        self._paddle, self._length = paddle, length
        paddle.enable_static()
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            value = static.create_global_var([1], 1.0, "float32", persistable=True, name="x")
            one = static.create_global_var([1], 1.0, "float32", persistable=True, name="one")
            for _ in range(length):
                value = paddle.add(value, one)
        static.Executor(paddle.CPUPlace()).run(startup)
        scope, strategy = static.global_scope(), static.ExecutionStrategy()
        strategy.num_threads = 1
        self._compiled = static.CompiledProgram(main)  # owns the graph that the executor runs
        self._compiled._scope, self._compiled._exec_strategy = scope, strategy
        places = [core.CPUPlace()]
        self._executor = self._compiled._compile_data_parallel(places, compiler.DeviceType.CPU, scope)
        self._last = value.name
        (result,) = self._executor.run([self._last], True)._move_to_list()
        if float(np.asarray(result).item()) != length + 1:
            raise RuntimeError(f"the chain gave {np.asarray(result)}, but {length + 1} was expected")

    def chain(self) -> float:
        """Run the chain once."""
        begin = time.perf_counter()
        self._executor.run([self._last], True)
        return time.perf_counter() - begin

    def direct(self) -> float:
        """Call the kernel `length` times in place; static mode is what it was afterwards."""
        self._paddle.disable_static()
        try:
            with self._paddle.no_grad():
                value, one, add_ = self._paddle.ones([1]), self._paddle.ones([1]), self._paddle._C_ops.add_
                begin = time.perf_counter()
                for _ in range(self._length):
                    add_(value, one)
                return time.perf_counter() - begin
        finally:
            self._paddle.enable_static()


def serve(length: int, replies: TextIO) -> None:
    """Answer each line of stdin, `"chain"` or `"direct"`, with {"seconds"}; the end of stdin ends the process."""
    chain = Chain(length)
    print(json.dumps({"ready": chain._paddle.__version__}), file=replies)
    for line in sys.stdin:
        seconds = chain.chain() if json.loads(line) == "chain" else chain.direct()
        print(json.dumps({"seconds": seconds}), file=replies)


if __name__ == "__main__":
    stdout = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # libraries print what they like
    serve(int(sys.argv[1]), stdout)
