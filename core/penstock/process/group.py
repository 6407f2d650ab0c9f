"""A process with everything that it starts: a process group in a session of its own.

A process that has ended is not reaped before `reap`, so that its number, which is the group's, is no other process's
when the group is signalled. What has left the group (setsid) is not signalled. Where SIGCHLD is ignored, the kernel
reaps: an ended process has no status that is known (0, as for `subprocess`), and its group is not signalled any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from penstock.process.end import open_process_end
from penstock.process.proc import end_with_parent

POLL_S = 0.05  # between looks at processes for whose ends no descriptor is left
_CHUNK = 1 << 16  # bytes of `new_output` at once
Output = IO[bytes] | int


class ProcessGroup:
    """One started process. `signal_all` may be called from any thread, the rest from one.

    `with_parent`: the kernel ends it (SIGTERM) when this process is gone, however that ends; only for a process with
    one thread.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: Output = subprocess.DEVNULL,
        stdout: Output,
        stderr: Output,
        with_parent: bool = True,
    ) -> None:
        self._end = -1
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=end_with_parent() if with_parent else None,  # noqa: PLW1509 one thread then
        )
        self.stdout, self.stderr = self._process.stdout, self._process.stderr

    @property
    def pid(self) -> int:
        """Number of the process, and of its group."""
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable from the end of the process on, until `reap`."""
        if self._end < 0:
            try:
                self._end = open_process_end(self.pid)
            except ProcessLookupError:  # reaped by the kernel
                self._end = _readable()
        return self._end

    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._status(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end of the process without reaping it, and return its exit status."""
        status = self._status(0)
        assert status is not None  # no WNOHANG
        return status

    def _status(self, option: int) -> int | None:
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | option)
        except ChildProcessError:  # reaped by the kernel
            return self._process.wait()
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and to what it has started, unless it was reaped."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            self.status()  # reaped by the kernel: the number may be another's
            if self._process.returncode is None:
                os.killpg(self.pid, number)

    def reap(self) -> None:
        """Wait for the end of the process, and free its number. Idempotent."""
        self.wait()
        with self._lock:
            self._process.wait()
        if self._end >= 0:
            os.close(self._end)
            self._end = -1


class LoggedGroup(ProcessGroup):
    """A group whose output goes to a log file. `appends`: behind what the file holds."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, appends: bool = False) -> None:
        self.log = log
        with log.open("ab" if appends else "wb") as output:
            self._start = self._read = output.tell()
            super().__init__(argv, env=env, stdout=output, stderr=output)

    def tail(self, num_lines: int) -> list[str]:
        """Return the last lines that it has written."""
        return self._from(self._start, -1).decode(errors="replace").splitlines()[-num_lines:]

    def new_output(self) -> bytes:
        """Return what it has written since the last call, at most 64 KiB."""
        found = self._from(self._read, _CHUNK)
        self._read += len(found)
        return found

    def _from(self, start: int, num_bytes: int) -> bytes:
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)


def wait_for_an_end(groups: Sequence[ProcessGroup], timeout_s: float) -> None:
    """Return when the process of one of the groups, which have not been seen to end, has ended, or after a while."""
    ends = select.poll()
    for group in groups:
        ends.register(group, select.POLLIN)
    ends.poll(timeout_s * 1000)


def _readable() -> int:
    """Return a descriptor that is readable at once."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    os.close(writable)
    return readable


def stop(groups: Sequence[ProcessGroup], timeout_s: float) -> None:
    """End groups together: SIGTERM, and SIGKILL for what is left after `timeout_s`. Returns when they are reaped.

    On failure: raises what went wrong after each group was sent SIGKILL.
    """
    with contextlib.ExitStack() as ends:
        for group in reversed(groups):
            ends.callback(_kill, group)
        for group in groups:
            group.signal_all(signal.SIGTERM)
        until = time.monotonic() + timeout_s
        while (running := [group for group in groups if group.status() is None]) and time.monotonic() < until:
            _wait_a_while(running, max(0.0, until - time.monotonic()))


def _wait_a_while(running: Sequence[ProcessGroup], timeout_s: float) -> None:
    try:
        wait_for_an_end(running, timeout_s)
    except OSError:  # EMFILE: the processes still have their time to end
        time.sleep(min(POLL_S, timeout_s))


def _kill(group: ProcessGroup) -> None:
    group.signal_all(signal.SIGKILL)  # also where the process has ended: what it has started may not have
    group.reap()
