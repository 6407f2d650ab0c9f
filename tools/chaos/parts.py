"""The processes of a control plane under test: started, killed, stopped and started again, each with its own log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.process import proc

END_S = 15.0


class Part:
    """A process that can be started again."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], errors: Path) -> None:
        self._argv, self._environ, self._errors = list(argv), dict(environ), errors
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> None:
        """Start it, with other arguments or another environment if they are given (which `start` keeps)."""
        self._argv = self._argv if argv is None else list(argv)
        self._environ = self._environ if environ is None else dict(environ)
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )

    @property
    def pid(self) -> int:
        """Its process id. Raises RuntimeError if it was not started."""
        if self._process is None:
            raise RuntimeError(f"{self._argv[0]} was not started")
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it was started and is not there any more."""
        return self._process is not None and self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, limit_s: float = END_S) -> int | None:
        """Wait for its end; return its exit status, None if it goes on."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(limit_s)
        return None

    def close(self) -> None:
        """End it by SIGTERM, and if that takes too long by SIGKILL."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        if self.wait() is None:
            self.kill()

    def errors(self) -> str:
        """Return what it has written."""
        return self._errors.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class Running:
    """A replica that runs on a node: its guard, and its entrypoint."""

    replica_id: str
    guard: int
    child: int


def running_on(state_dir: Path) -> list[Running]:
    """Return the replicas that run under an agent's state folder, oldest first."""
    found = []
    for path in sorted((state_dir / "replicas").glob("*/guard.json")):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it ends meanwhile
            continue
        child = fields.get("child")
        if child is not None and proc.is_alive(fields["pid"], fields["start_ticks"]):
            found.append(Running(path.parent.name, fields["pid"], child))
    return found


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(condition: Callable[[], object], what: str, limit_s: float = 90.0) -> None:
    """Return once a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.05)
