"""Penstock on several hosts, each trainer with batches of its own: what a turn exchanges is recorded.

That is what the telemetry of a job has: waits and bytes by server, processor time of trainers and servers. Rank 0 reads
that of servers from /proc. Each process is made on one core, so that it has one thread that computes, and may then use
all cores of the machine, which the kernel shares among the hosts.

Mode "pauses": after each layer of the tower a trainer sleeps, forward and backward. With a small batch that is most of
a step, so emulated hosts do not compete for cores, as real ones do not; the exchange is real.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import penstock as fluid
from bench.models import programs
from bench.peers.cluster import Cluster, Served, mean_loss, of
from bench.peers.contender import Options, fetches
from bench.peers.penstock_hosts import HostsTrainer, serve
from bench.workloads.workload import Workload
from penstock.advice.exchanged import ahead_of
from penstock.advice.recorded import Event
from penstock.ps.communicator import remotes

PAUSE_S, BACKWARD_PAUSE_S = 0.008, 0.016
"""After each layer: the backward pass of a linear layer has two matmuls, the forward pass one."""


class RecordedTrainer(HostsTrainer):
    """One trainer. Rank 0 owns the other processes, and records."""

    def __init__(self, workload: Workload, options: Options, cluster: Cluster) -> None:
        super().__init__(workload, options, cluster)
        self._cores = set(cluster.cores)
        self._is_free = False
        self._recording: dict[str, Any] = {}

    @staticmethod
    def record(workload: Workload, options: Options) -> programs.Recorded:
        """Return the program to train."""
        return programs.record_ctr(workload, after=paused) if options.mode else programs.record_ctr(workload)

    @staticmethod
    def own(feed: Mapping[str, Any], rank: int, trainers: int) -> dict[str, Any]:
        """Return the whole batch: more trainers are more rows a step."""
        return dict(feed)

    def run(self, num_steps: int) -> float:
        """Train on every trainer and record; return the last loss, the mean of all trainers."""
        if self._others is not None:
            self._free(self._others.pids)
            self._others.pass_on({"run": num_steps})
        engine = self._executor.core.engine
        engine.drain()
        before, servers, own = self._exchanged(), self._server_ns(), time.process_time_ns()
        ends = [time.perf_counter_ns()]
        loss = 0.0
        for step in range(num_steps):
            wanted = [self._loss] if fetches(step, num_steps) else []
            fetched = self._executor.run(fetch_list=wanted, feed=self._feeds[self._next % len(self._feeds)])
            self._next += 1
            ends.append(time.perf_counter_ns())
            if wanted:
                loss = float(fetched[0].mean())
        own = time.process_time_ns() - own
        servers = [now - then for now, then in zip(self._server_ns(), servers, strict=True)]
        after = self._exchanged()
        exchanged = {peer: [b - a for a, b in zip(before[peer], sums, strict=True)] for peer, sums in after.items()}
        self._recording = {
            "turn_ns": np.diff(ends).tolist(), "exchanged": exchanged, "trainer_cpu_ns": own / num_steps,
            "server_cpu_ns": [ns / num_steps for ns in servers], "ahead_ns": self._ahead_ns(),
        }  # fmt: skip
        return mean_loss(loss, self._others)

    def recording(self) -> dict[str, Any]:
        """Return what the last turn exchanged; the fields are those of `bench.advise_servers`."""
        return self._recording

    def exposed_share(self) -> float:
        """Not measured here."""
        return float("nan")

    def _free(self, pids: Iterable[int]) -> None:
        """Let all processes use all cores, once."""
        if self._is_free:
            return
        self._is_free = True
        for pid in (os.getpid(), *pids):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), self._cores)

    def _exchanged(self) -> dict[str, list[int]]:
        """Return [bytes sent, bytes received, wait in ns] by server."""
        found: dict[str, list[int]] = {}
        for descriptor in remotes.opened():
            client = remotes.find_client(descriptor)
            if client is None:
                continue
            for (peer, _), sums in client.counters.rows().items():
                mine = found.setdefault(peer, [0, 0, 0])
                for at, amount in enumerate((sums.sent_bytes, sums.received_bytes, sums.wait_ns)):
                    mine[at] += amount
        return found

    def _server_ns(self) -> list[int]:
        return [] if self._others is None else [cpu_ns(pid) for pid in self._others.server_pids]

    def _ahead_ns(self) -> float:
        """Return for how long a step of the turn sent gradients while it computed."""
        core = self._executor.core
        trace = core.engine.drain()
        graph = core.newest_graph
        assert graph is not None
        kinds = {handle.index: handle.op.type for handle in graph.handles}
        columns = [trace[name].tolist() for name in ("step", "op", "thread", "start_ns", "duration_ns")]
        steps: dict[int, list[Event]] = {}
        for step, op, thread, start, duration in zip(*columns, strict=True):
            steps.setdefault(step, []).append((op, thread, start, duration))
        return ahead_of(kinds, list(steps.values()))


def paused(hidden: Any) -> Any:
    """Record an operator that sleeps and returns its input, and in the backward pass its gradient."""
    block = fluid.default_main_program().current_block()
    out = block.create_var(name=f"{hidden.name}.paused", shape=[-1, hidden.shape[1]], dtype="float32")

    def forward(value: Any) -> Any:
        time.sleep(PAUSE_S)
        return np.array(value)

    def backward(value: Any, result: Any, gradient: Any) -> Any:
        time.sleep(BACKWARD_PAUSE_S)
        return np.array(gradient)

    return fluid.layers.py_func(forward, hidden, out, backward)


def cpu_ns(pid: int) -> int:
    """Return the processor time of a process's threads that run, in ns: /proc/PID/stat has it in ticks of 10 ms."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text(encoding="ascii").split()[0])
    return total


def make(options: Options) -> RecordedTrainer | Served:
    """Build one trainer, or serve; rank 0 starts the others."""
    cluster, workload = of(options), Workload.load(options.workload)
    if options.rank < len(cluster.trainers):
        return RecordedTrainer(workload, options, cluster)
    serve(workload, cluster, options.rank - len(cluster.trainers))
    return Served()
