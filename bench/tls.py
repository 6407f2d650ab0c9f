"""`bench tls`: steps with a parameter server over TCP, in the clear, encrypted, and encrypted by gRPC.

Three jobs of one server and one trainer each, sync, on this host but without shared memory: `plain` and `tls` take
channels, `grpc` takes gRPC with the same certificate. Four layers of 512 × 512 float32 in a batch of 16: 4 MiB of
gradients and 4 MiB of values a step, little to compute. Jobs take turns. Times are a step's: wall time at the trainer,
and processor time of both processes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import socket
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.report import Report

ROUNDS = 9
STEPS = 20
WIDTH, LAYERS, BATCH = 512, 4, 16
START_S = 120
JOBS = {"plain": ("tcp", False), "tls": ("tcp", True), "grpc": ("grpc", True)}
"""Name → (PENSTOCK_PS_TRANSPORT, whether TLS is configured)."""


def certificates(folder: Path) -> dict[str, str]:
    """Write those of a server at 127.0.0.1; return the settings that name them."""
    import trustme  # of the development environment alone

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    texts = {
        "ca": authority.cert_pem.bytes(),
        "cert": b"".join(part.bytes() for part in issued.cert_chain_pems),
        "key": issued.private_key_pem.bytes(),
    }
    for name, text in texts.items():
        (folder / f"{name}.pem").write_bytes(text)
    return {f"PENSTOCK_PS_TLS_{name.upper()}": str(folder / f"{name}.pem") for name in texts}


def transpiled(endpoint: str) -> tuple[Any, Any]:
    """Record the network; return the transpiler and the loss."""
    import penstock as fluid  # in the process of a job, whose settings are set

    inputs = fluid.data("x", [None, WIDTH], "float32")
    found = inputs
    for _ in range(LAYERS):
        found = fluid.layers.fc(found, WIDTH, bias_attr=False)
    loss = fluid.layers.reduce_mean(fluid.layers.square(found))
    fluid.optimizer.SGD(1e-4).minimize(loss)
    transpiler = fluid.DistributeTranspiler()
    transpiler.transpile(0, pservers=endpoint, trainers=1, sync_mode=True)
    return transpiler, loss


def serve(endpoint: str, settings: Mapping[str, str]) -> None:
    """Run the server until its trainer has left."""
    os.environ.update(settings)
    import penstock as fluid  # after the settings

    transpiler, _ = transpiled(endpoint)
    program = transpiler.get_pserver_program(endpoint)
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(transpiler.get_startup_program(endpoint, program))
    executor.run(program)


def train(endpoint: str, settings: Mapping[str, str], pipe: Connection) -> None:
    """Make as many steps as each message asks for, and send the seconds of each; 0 ends it."""
    os.environ.update({**settings, "CPU_NUM": "1"})
    import numpy as np  # after the settings, as all below

    import penstock as fluid
    from bench.engine import timed

    transpiler, loss = transpiled(endpoint)
    executor = fluid.Executor(fluid.CPUPlace())
    executor.run(fluid.default_startup_program())
    program = transpiler.get_trainer_program()
    compiled = fluid.CompiledProgram(program).with_data_parallel(loss_name=loss.name)
    feed = {"x": np.ones((BATCH, WIDTH), np.float32)}
    pipe.send([])
    while num_steps := pipe.recv():
        run = functools.partial(executor.run, compiled, feed=feed, fetch_list=[loss])
        pipe.send([timed(run) for _ in range(num_steps)])
    executor.close()


class Job:
    """A server and a trainer, each a process."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._processes = [
            context.Process(target=serve, args=(endpoint, settings), daemon=True),
            context.Process(target=train, args=(endpoint, settings, theirs), daemon=True),
        ]
        for process in self._processes:
            process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the trainer has joined. Raises RuntimeError."""
        if not self._pipe.poll(START_S):
            raise RuntimeError(f"the job is not ready after {START_S} s")
        self._pipe.recv()

    def cpu_s(self) -> float:
        """Return the processor time of both so far."""
        fields = [Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2].split() for p in self._processes]
        return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")

    def steps(self, num: int) -> tuple[float, float]:
        """Make steps; return the median's seconds, and the processor seconds a step."""
        before = self.cpu_s()
        self._pipe.send(num)
        seconds = self._pipe.recv()
        return statistics.median(seconds), (self.cpu_s() - before) / num

    def close(self) -> None:
        """End both."""
        with contextlib.suppress(OSError):
            self._pipe.send(0)
        for process in self._processes:
            process.join(10)
            process.terminate()
            process.join()


@contextlib.contextmanager
def started() -> Iterator[dict[str, Job]]:
    """Start all jobs; end them at the end."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder, contextlib.ExitStack() as stack:
        with_tls = certificates(Path(folder))
        jobs = {}
        for name, (transport, encrypts) in JOBS.items():
            settings = {"PENSTOCK_PS_TRANSPORT": transport, "PENSTOCK_PS_STATE_DIR": f"{folder}/{name}"}
            settings |= with_tls if encrypts else {}
            jobs[name] = Job(settings)
            stack.callback(jobs[name].close)
            jobs[name].ready()
        yield jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of one turn (%(default)s)")


def main(rounds: int, json: bool, extra: argparse.Namespace) -> Report:
    """Measure the three in turn, after a turn to warm up."""
    report = Report("tls", rounds)
    report.figures["load_before"] = round(os.getloadavg()[0], 2)  # of other work, if it is not near 0
    wall: dict[str, list[float]] = {name: [] for name in JOBS}
    processor: dict[str, list[float]] = {name: [] for name in JOBS}
    with started() as jobs:
        for turn in range(rounds + 1):
            for name in list(JOBS) if turn % 2 else list(reversed(JOBS)):
                step_s, cpu_s = jobs[name].steps(extra.steps)
                if turn:
                    wall[name].append(step_s)
                    processor[name].append(cpu_s)
    for name in JOBS:
        report.add(f"{name}_step_ms", [1e3 * s for s in wall[name]], digits=2)
        report.add(f"{name}_cpu_ms_per_step", [1e3 * s for s in processor[name]], digits=2)
    for peer in ("plain", "grpc"):
        report.ratios[f"tls_of_{peer}"] = round(report.figures[f"{peer}_step_ms"] / report.figures["tls_step_ms"], 3)
    return report
