"""A real Ray on this machine, for the tests: a head that runs no pilots, and a raylet for each node.

All of it is in one folder and on free ports. Each node has a loopback address of its own, so that Ray takes it for a
host, and a mark in the environment of its processes, by which it can be lost whole.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import until

from penstock.process import proc

CPUS, MEMORY = 2, 2000 << 20
HEAD = "127.0.7.1"
LIMIT_S = 120.0
NOTICE = {"health_check_period_ms": 500}
"""A killed raylet is noticed within some 5 s instead of 20."""


class RayCluster:
    """`num_nodes` nodes of `cpus` CPUs and 2000 MiB each, at 127.0.7.2, 127.0.7.3, …"""

    def __init__(self, num_nodes: int, cpus: int = CPUS) -> None:
        self.num_nodes, self.cpus = num_nodes, cpus
        # Unix sockets are below it, whose paths have 107 characters at most
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        marks = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_OF_TEST": str(self.folder)}
        # where Ray writes the address of the machine's head, in a folder that it expects to be there
        environ = {**os.environ, **marks, "RAY_TMPDIR": str(self.folder)}
        (self.folder / "ray").mkdir()
        argv = [sys.executable, "-m", "tests.engines.ray_nodes", str(self.folder), str(self.num_nodes), str(self.cpus)]
        root = Path(__file__).resolve().parents[2]
        with (self.folder / "nodes.log").open("w") as log:
            self._process = subprocess.Popen(
                argv, env=environ, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self.address = self._said()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def processes(self, index: int) -> list[int]:
        """Return every process of a node, those of its pilots and their jobs included."""
        return proc.with_environment(self.mark(index))

    def mark(self, index: int) -> str:
        return f"RAY_NODE_OF_TEST={self.folder}/node{index}"

    def crash_node(self, index: int) -> None:
        """Kill raylet, workers, agents and all that they started at once, as when a machine loses its power."""
        while found := self.processes(index):
            proc.send(found, signal.SIGKILL)

    def kill_raylet(self, index: int) -> int:
        """Kill the raylet of a node, and nothing else; returns its pid."""
        (pid,) = [pid for pid in self.processes(index) if _command(pid).endswith("/raylet")]
        os.kill(pid, signal.SIGKILL)
        return pid

    def add_node(self) -> None:
        """Start a further node."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write("add\n")
        self._process.stdin.flush()
        self._said()

    def _said(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, (self.folder / "nodes.log").read_text()
        return line

    def _end(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()
        mark = f"RAY_OF_TEST={self.folder}"
        until(lambda: not self._kill(mark), "nothing is left of Ray")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill(self, mark: str) -> bool:
        found = proc.with_environment(mark)
        proc.send(found, signal.SIGKILL)
        return bool(found)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    except OSError:
        return ""


def start(cluster: Any, index: int, folder: Path, cpus: int) -> None:
    """Start a node; index 0 is the head."""
    host = HEAD.rpartition(".")[0] + f".{index + 1}"
    marks = {"RAY_NODE_OF_TEST": f"{folder}/node{index}", "NODE_OF_TEST": f"{folder}/node{index}"}
    cluster.add_node(
        num_cpus=cpus if index else 0, memory=MEMORY, object_store_memory=80_000_000, node_ip_address=host,
        temp_dir=str(folder / "t"), include_dashboard=False, include_log_monitor=False, env_vars=marks,
        **({} if index else {"_system_config": NOTICE}),
    )  # fmt: skip
