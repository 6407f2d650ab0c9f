"""A real Slurm on this machine, for the tests: slurmctld, a slurmd for each of its nodes, and a munged of its own.

All of it is in one folder and on free ports; nothing that the machine may have of Slurm or munge is touched. Needs
root, since munged and slurmd start processes of other users.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.waiting import until

from penstock.distributed.ports import free_ports
from penstock.process import proc

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge", "sbatch": "slurm-client"}
SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
CONF = Path(__file__).with_name("slurm.conf")


def missing() -> str:
    """Return what this machine lacks for a Slurm of its own; nothing if it has all."""
    absent = [f"{name} (Debian package {package})" for name, package in PROGRAMS.items() if not _path(name)]
    if absent:
        return f"no {', no '.join(absent)}: tools/prerequisites.sh test installs them"
    return "" if os.geteuid() == 0 else "a Slurm of its own needs root: munged and slurmd start processes as others"


class SlurmCluster:
    """`num_nodes` nodes of 2 CPUs and 2000 MiB each, called node0, node1, …, on this host."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder, self.num_nodes = folder, num_nodes
        self.mark = f"SLURM_OF_TEST={folder}"
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "SLURM_OF_TEST": str(folder)}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        lacks = missing()
        assert not lacks, lacks
        self.folder.mkdir(parents=True)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        control, *ports = free_ports("127.0.0.1", 1 + self.num_nodes)
        fields = {"folder": self.folder, "host": socket.gethostname().partition(".")[0], "control": control}
        text = CONF.read_text().format(**fields)
        for index, port in enumerate(ports):
            text += f"NodeName=node{index} NodeHostname={fields['host']} NodeAddr=127.0.0.1 Port={port}"
            text += " CPUs=2 RealMemory=2000 State=UNKNOWN\n"
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        try:
            self._start_munge()
            self._start("slurmctld", "-D")
            for index in range(self.num_nodes):
                self.start_node(index)
            until(lambda: self.states() == ["idle"] * self.num_nodes, "the nodes of Slurm are idle")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def run(self, *command: str) -> str:
        """Run a command of Slurm."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def states(self) -> list[str]:
        """Return the state of every node; none while slurmctld does not answer."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%t"], env=self.environ, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout.split()

    def tasks(self, handle: str) -> dict[str, tuple[str, str]]:
        """Return state and node of each task of an array."""
        lines = self.run("squeue", "-h", "-r", "-t", "all", "-j", handle, "-o", "%K|%T|%N").splitlines()
        return {index: (state, node) for index, state, node in (line.split("|") for line in lines)}

    def start_node(self, index: int) -> None:
        """Start the slurmd of a node."""
        mark = {"SLURMD_OF_TEST": f"{self.folder}/node{index}"}
        self._start("slurmd", "-D", "-N", f"node{index}", name=f"slurmd{index}", environ=mark)

    def crash_node(self, index: int) -> None:
        """Kill slurmd, its stepds and all that they started at once, as when a machine loses its power.

        slurmctld notices that within half a minute; here an operator does, and sets the node down.
        """
        slurmd = self._started.pop(f"slurmd{index}")
        slurmd.kill()
        slurmd.wait()
        # its stepds first: they would report that the task ended
        proc.send(proc.with_environment(f"SLURMD_OF_TEST={self.folder}/node{index}"), signal.SIGKILL)
        tasks = proc.with_environment(f"SLURMD_NODENAME=node{index}")
        proc.send(set(tasks) & set(proc.with_environment(self.mark)), signal.SIGKILL)  # not another cluster's
        self.run("scontrol", "update", f"NodeName=node{index}", "State=DOWN", "Reason=crashed")

    def restore_node(self, index: int) -> None:
        """Start the slurmd of a node that had crashed."""
        self.start_node(index)
        self.resume(f"node{index}")

    def resume(self, node: str) -> None:
        """Take a node that was set down back, unless it has registered meanwhile, and is back already."""
        command = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0 or "Invalid node state" in done.stderr, done.stderr

    def _start_munge(self) -> None:
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        names = ("munge.sock", "munge.key", "munge.pid", "munge.log", "munge.seed")
        options = [f"--{option}={self.folder / name}" for option, name in zip(files, names, strict=True)]
        self._start("munged", "--foreground", "--force", *options)
        until((self.folder / "munge.sock").exists, "munged listens")

    def _start(self, program: str, *arguments: str, name: str = "", environ: Mapping[str, str] | None = None) -> None:
        path = _path(program)
        assert path is not None
        with (self.folder / f"{name or program}.out").open("ab") as out:
            self._started[name or program] = subprocess.Popen(
                [path, *arguments],
                env={**self.environ, **(environ or {})},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    def _end(self) -> None:
        for process in reversed(self._started.values()):
            process.terminate()
        for process in self._started.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        proc.send(proc.with_environment(self.mark), signal.SIGKILL)


def _path(program: str) -> str | None:
    return shutil.which(program, path=SEARCHED)
