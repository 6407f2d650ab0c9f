"""Processes of one contender on several hosts: servers and trainers, each started on the host that it has.

The ranks of trainers come first, then those of servers. Rank 0 is the process that the parent of a race talks to, on
the first trainer's host: it starts all others, passes every command on to the trainers, and waits for their answers.
Written for peers' environments too, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers.contender import Options

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Host:
    """`enter`: what precedes a command line that is to run there. `address`: where its processes listen."""

    enter: tuple[str, ...]
    address: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts of a job's trainers and servers. `port` is free on every host, and those after it up to 9 more.

    `cores`: of the machine, which the hosts share: each host has one of them. `interface`: of each host's address.
    """

    key: str
    trainers: tuple[Host, ...]
    servers: tuple[Host, ...]
    sync: bool
    port: int
    cores: tuple[int, ...]
    interface: str

    @property
    def server_endpoints(self) -> list[str]:
        return [f"{host.address}:{self.port}" for host in self.servers]

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Return the host of every rank."""
        return (*self.trainers, *self.servers)

    def core(self, rank: int) -> int:
        """Return the core of a rank's host. Trainers take cores from the first on, servers from the last on."""
        server = rank - len(self.trainers)
        return self.cores[rank % len(self.cores) if server < 0 else -1 - server % len(self.cores)]

    def save(self, path: Path) -> None:
        """Write it for the job's processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Read what `save` wrote."""
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for role in ("trainers", "servers"):
            fields[role] = tuple(Host(tuple(host["enter"]), host["address"]) for host in fields[role])
        return cls(**fields | {"cores": tuple(fields["cores"])})


def of(options: Options) -> Cluster:
    """Return the cluster that a contender was started with. Raises ValueError without one."""
    if options.cluster is None:
        raise ValueError("this contender needs --cluster")
    return Cluster.load(options.cluster)


def stay_on_core(path: Path, rank: int) -> None:
    """Restrict this process, and what it starts, to the core of its host. Before any framework counts cores."""
    os.sched_setaffinity(0, {Cluster.load(path).core(rank)})


class OtherRanks:
    """All ranks but the first, which owns them. They end with it, however it ends."""

    def __init__(self, options: Options, cluster: Cluster) -> None:
        self._processes = [_start(options, cluster, rank) for rank in range(1, len(cluster.hosts))]
        self._trainers = self._processes[: len(cluster.trainers) - 1]
        self._servers = self._processes[len(cluster.trainers) - 1 :]

    @property
    def pids(self) -> list[int]:
        """All processes, those of trainers first."""
        return [process.pid for process in self._processes]

    @property
    def server_pids(self) -> list[int]:
        """Those of the servers."""
        return [process.pid for process in self._servers]

    def pass_on(self, command: dict[str, Any]) -> None:
        """Send a command to every other trainer."""
        pass_on(self._trainers, command)

    def losses(self) -> list[float]:
        """Wait until every other trainer has run; return their losses. Raises RuntimeError."""
        return losses(self._trainers)

    def end_trainers(self) -> None:
        """Close the input of the other trainers, which end. Their ends are waited for by `wait`."""
        for trainer in self._trainers:
            assert trainer.stdin is not None
            trainer.stdin.close()

    def kill_servers(self) -> None:
        """End servers that would go on without trainers."""
        for server in self._servers:
            server.kill()

    def wait(self) -> None:
        """Wait until all have ended."""
        for process in self._processes:
            process.wait()


def mean_loss(loss: float, others: OtherRanks | None) -> float:
    """Wait for the other trainers, if this rank owns them; return the mean loss of all: their shares are equal."""
    losses = [loss] if others is None else [loss, *others.losses()]
    return sum(losses) / len(losses)


def _start(options: Options, cluster: Cluster, rank: int) -> Process:
    assert options.cluster is not None
    command = [*cluster.hosts[rank].enter, sys.executable, "-m", "bench.peers.serve", cluster.key]
    command += ["--workload", str(options.workload), "--folder", str(options.folder), "--cores", str(options.cores)]
    command += ["--rank", str(rank), "--cluster", str(options.cluster)]
    if rank >= len(cluster.trainers):
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def pass_on(trainers: Sequence[Process], command: dict[str, Any]) -> None:
    """Send a command to trainers."""
    for trainer in trainers:
        assert trainer.stdin is not None
        trainer.stdin.write(json.dumps(command).encode() + b"\n")
        trainer.stdin.flush()


def losses(trainers: Sequence[Process]) -> list[float]:
    """Wait until these trainers have run; return their losses. Raises RuntimeError."""
    return [_loss_of(trainer) for trainer in trainers]


def _loss_of(trainer: Process) -> float:
    assert trainer.stdout is not None
    for line in trainer.stdout:
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"another trainer ended: {answer['error']}")
        if "loss" in answer:
            return float(answer["loss"])
    raise RuntimeError("another trainer has ended without a result")


def share(batch: Mapping[str, Any], rank: int, trainers: int) -> dict[str, Any]:
    """Return a trainer's rows of a batch of arrays or tensors, as many as every other's."""
    rows = len(next(iter(batch.values()))) // trainers
    return {name: values[rank * rows : (rank + 1) * rows] for name, values in batch.items()}


class Served:
    """What `make` returns for a rank that serves, when it has served. Nothing is asked of it."""

    def run(self, num_steps: int) -> float:
        """Not called."""
        raise RuntimeError(f"a server is asked to train {num_steps} steps")

    def check(self) -> None:
        """Not called."""

    def movements(self) -> dict[str, Any]:
        """Not called."""
        return {}

    def close(self) -> None:
        """It has ended."""
