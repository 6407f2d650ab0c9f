"""Contenders that live in processes of their own, driven over pipes.

`Remote` is one of them: started in a session of its own, so that ending it ends every process that it started.
Invariant: after `close`, or after any failure, none of its processes is left; `close` is safe to call at any time.
Nothing waits for ever: starting and each turn have a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers import ROOT, environment
from bench.peers.contender import CONTENDERS
from bench.peers.kernels import Column, preloaded
from bench.peers.lines import LineReader
from bench.workloads.fingerprint import Movement

START_LIMIT_S = 300.0
TURN_LIMIT_S = 600.0
CLOSE_LIMIT_S = 30.0
LOG_TAIL = 2000
INHERITED = {
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "LD_LIBRARY_PATH",
    "CC",
    "CXX",
}
"""All that a contender takes over: settings of Penstock, paddle, torch, MKL, oneDNN or OpenMP would favour one side."""


class PeerFailed(Exception):
    """A contender's process failed or took too long. The text has the end of what it printed."""


class Remote:
    """A contender in its own process. Not thread-safe. `column`: who answers MKL's vendor check.

    `cluster`: the file of a contender on several hosts, and `enter` what takes its first process to its host.
    With `checkout` it runs the sources and the `.venv` of another checkout of the project. `label`: its key in results.
    The constructor returns at once; `wait_ready` returns when the contender can run. Raises PeerMissing.
    """

    def __init__(
        self,
        key: str,
        *,
        workload: Path,
        folder: Path,
        cores: int,
        column: Column,
        checkout: Path | None = None,
        label: str | None = None,
        cluster: Path | None = None,
        enter: Sequence[str] = (),
    ) -> None:
        self.key = label or key
        self._spins = CONTENDERS[key].spins
        self.versions: dict[str, str] = {}
        self.losses: list[float] = []
        self.exposed_shares: list[float] = []
        self.recordings: list[dict[str, Any]] = []
        self.movements: dict[str, Movement] = {}
        self._is_stopped = False
        self._log = folder / f"{self.key}.log"
        meet = folder / self.key
        meet.mkdir()
        python = checkout / ".venv/bin/python" if checkout else environment(CONTENDERS[key].environment)
        command = [*enter, str(python), "-m", "bench.peers.serve", key]
        command += ["--workload", str(workload), "--folder", str(meet), "--cores", str(cores)]
        command += [] if cluster is None else ["--cluster", str(cluster)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=checkout or ROOT,
                # times of matrix kernels are of this run, not of another day's load
                env=child_environment(os.environ, column) | {"PENSTOCK_CACHE": str(meet)},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._lines = LineReader(self._process.stdout)

    @property
    def session(self) -> int:
        """The id of the session that all its processes belong to, and of the first of them."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the contender is built. Raises PeerFailed."""
        self.versions = self._reply("ready", START_LIMIT_S)["ready"]

    def run(self, num_steps: int) -> float:
        """Train; return the seconds that it took, as the contender measured them. Raises PeerFailed."""
        self._send({"run": num_steps})
        reply = self._reply("seconds", TURN_LIMIT_S)
        self.losses.append(float(reply["loss"]))
        if "exposed" in reply:
            self.exposed_shares.append(float(reply["exposed"]))
        if "recorded" in reply:
            self.recordings.append(reply["recorded"])
        return float(reply["seconds"])

    def check(self) -> None:
        """Let the contender check itself, and take its `movements`. Raises PeerFailed."""
        self._send({"check": True})
        moved = self._reply("checked", TURN_LIMIT_S)["movements"]
        self.movements = {name: Movement(**fields) for name, fields in moved.items()}

    def cpu_seconds(self) -> float:
        """Return the processor time that all its processes have used."""
        return sum(_cpu_seconds(pid) for pid in session_members(self._process.pid))

    def rest(self) -> None:
        """Between turns: stop it if it spins. The next command wakes it."""
        if self._spins:
            self._signal(signal.SIGSTOP)
            self._is_stopped = True

    def _wake(self) -> None:
        if self._is_stopped:
            self._signal(signal.SIGCONT)
            self._is_stopped = False

    def _signal(self, number: signal.Signals) -> None:
        for pid in session_members(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End it: by the end of its input, and if that is not enough by a signal to its whole session."""
        self._wake()
        self._close_input()
        try:
            self._process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"bench: {self.key} did not end by itself; it is killed", file=sys.stderr)
        self.kill()

    def kill(self) -> None:
        """End all its processes at once."""
        self._signal(signal.SIGKILL)
        self._close_input()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _close_input(self) -> None:
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                return  # it was dead before it had read the last command, and the pipe is closed all the same

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._wake()
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed("ended") from error

    def _reply(self, wanted: str, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.line(limit_s)
        except TimeoutError as error:
            raise self._failed(str(error)) from error
        reply: dict[str, Any] = json.loads(line) if line else {}
        if wanted not in reply:
            raise self._failed(reply.get("error", "ended"))
        return reply

    def _failed(self, what: str) -> PeerFailed:
        self.kill()
        tail = self._log.read_bytes()[-LOG_TAIL:].decode(errors="replace")
        return PeerFailed(f"contender {self.key} {what}; the end of its output:\n{tail}")


def child_environment(base: Mapping[str, str], column: Column) -> dict[str, str]:
    """Return the environment of a contender: of the user's only what every process needs."""
    made = {name: value for name, value in base.items() if name in INHERITED or name.startswith("LC_")}
    made["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compile in the process itself: no pool of workers beside the race
    library = preloaded(column)
    return made if library is None else {**made, "LD_PRELOAD": str(library)}


def session_members(session: int) -> list[int]:
    """List the processes of a session, by /proc; where there is none, its leader."""
    proc = Path("/proc")
    if not (proc / "self" / "stat").exists():
        return [session]
    found = []
    for folder in proc.iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields and int(fields[3]) == session:
                found.append(int(folder.name))
    return found


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; none if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
