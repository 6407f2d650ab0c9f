"""The original parameter server of paddlepaddle 2.6.2 (brpc), asynchronous: one server and one trainer.

fleet with `a_sync=True`, the table by `static.nn.sparse_embedding`, all else by plain layers. The servers make the
table's rows by themselves and keep them in an accessor of their own, so this contender starts from other values of the
table than the others, and what it learns is not compared.

Runs in the peer's own environment, which has no torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.contender import Options, fetches
from bench.workloads.fingerprint import Movement
from bench.workloads.workload import Workload


class FleetTrainer:
    """A trainer of fleet, with the role and the servers that the process's environment names."""

    def __init__(self, workload: Workload, *, asynchronous: bool = True) -> None:
        self._fleet, self._program, self._loss, startup = recorded(workload, asynchronous=asynchronous)
        import paddle  # only the peer's own environment has it

        self._executor = paddle.static.Executor(paddle.CPUPlace())
        self._executor.run(startup)
        self._fleet.init_worker()
        self._feeds = list(feeds(workload))
        self._next = 0

    def run(self, num_steps: int) -> float:
        """Train; return the last loss."""
        loss = 0.0
        for step in range(num_steps):
            wanted = [self._loss] if fetches(step, num_steps) else []
            feed = self._feeds[self._next % len(self._feeds)]
            fetched = self._executor.run(self._program, feed=feed, fetch_list=wanted)
            self._next += 1
            if wanted:
                loss = float(np.mean(fetched[0]))
        return loss

    def check(self) -> None:
        """There is one copy of everything."""

    def movements(self) -> dict[str, Movement]:
        """Say nothing: it starts from other values."""
        return {}

    def close(self) -> None:
        """Leave the servers, which go on."""
        self._fleet.stop_worker()


class PaddleTrainer(FleetTrainer):
    """The trainer. Owns the server's process."""

    def __init__(self, options: Options) -> None:
        environment = _environment(options.cores)
        command = [sys.executable, "-m", "bench.peers.paddle_brpc", str(options.workload)]
        server = environment | {"TRAINING_ROLE": "PSERVER"}
        self._server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=os.environ | server, cwd=options.folder
        )
        os.environ |= environment | {"TRAINING_ROLE": "TRAINER"}
        super().__init__(Workload.load(options.workload))

    def close(self) -> None:
        """End the server, which would go on without trainers."""
        super().close()
        self._server.kill()
        self._server.wait()


def recorded(workload: Workload, *, asynchronous: bool = True) -> tuple[Any, Any, Any, Any]:
    """Record CTR-DNN for fleet; return fleet, the program to run, the loss's name, the startup program."""
    import paddle
    from paddle import static
    from paddle.distributed import fleet

    from bench.peers import paddle_programs

    paddle.enable_static()
    fleet.init(fleet.PaddleCloudRoleMaker())
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup):
        rows, width = workload.weights["table"].shape
        parts = []
        for slot in range(workload.feeds["ids"].shape[2]):
            ids = static.data(f"C{slot + 1}", [None, 1], "int64")
            row = static.nn.sparse_embedding(ids, [rows, width], param_attr=paddle.ParamAttr(name="table"))
            parts.append(paddle.reshape(row, [-1, width]))
        parts.append(static.data("dense", [None, workload.feeds["dense"].shape[2]], "float32"))
        logits = paddle_programs.tower(workload, paddle.concat(parts, axis=1))
        label = static.data("label", [None, 1], "int64")
        loss = paddle.mean(paddle.nn.functional.softmax_with_cross_entropy(logits, label))
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = asynchronous
        fleet.distributed_optimizer(paddle.optimizer.SGD(workload.learning_rate), strategy).minimize(loss)
        # fleet rewrites copies, and makes those the current programs
        return fleet, static.default_main_program(), loss.name, static.default_startup_program()


def feeds(workload: Workload) -> Any:
    """Give every batch as its data layers want it."""
    from bench.peers import paddle_programs

    return paddle_programs.feeds(workload)


def _environment(cores: int) -> dict[str, str]:
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return {
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": str(ports[0]),
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{ports[0]}",
        "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{ports[1]}",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "CPU_NUM": str(cores),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }


def make(options: Options) -> PaddleTrainer:
    """Build it."""
    return PaddleTrainer(options)


def main() -> None:
    """Serve: `python -m bench.peers.paddle_brpc WORKLOAD`, with the environment that the trainer made."""
    from bench.peers.serve import end_with_parent

    end_with_parent()
    fleet, _, _, _ = recorded(Workload.load(Path(sys.argv[1])))
    fleet.init_server()
    fleet.run_server()


if __name__ == "__main__":
    main()
