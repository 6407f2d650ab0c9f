"""A process with everything that it starts: a process group in a session of its own, its output in a log file.

The kernel ends it (SIGTERM) when the launcher is gone, however that ends, and `last_will` what it has started. A
process that has ended is not reaped before `stop`, so that its number, which is the group's, is nobody else's when the
group is signalled.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.command.children import end_with_parent
from penstock.machine.process_end import open_process_end

_CHUNK = 1 << 16  # bytes passed on at once
_POLL_S = 0.02


class Group:
    """One started process. Not thread-safe: one thread looks after all groups."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._read = 0
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
                preexec_fn=end_with_parent(),  # noqa: PLW1509 the launcher has one thread
            )
        self._end = open_process_end(self._process.pid)

    def fileno(self) -> int:
        """Return a descriptor that is readable from the end of the process on, until `reap`."""
        return self._end

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def tail(self, num_lines: int) -> list[str]:
        """Return the last lines that it has written."""
        return self.log.read_bytes().decode(errors="replace").splitlines()[-num_lines:]

    def new_output(self) -> bytes:
        """Return what it has written since the last call, at most 64 KiB."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            found = file.read(_CHUNK)
        self._read += len(found)
        return found

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and to what it has started."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def reap(self) -> None:
        """Wait for the end of the process. Call once."""
        self._process.wait()
        os.close(self._end)


def wait_for_an_end(groups: Sequence[Group], timeout_s: float) -> None:
    """Return when the process of one of the groups, which have not been seen to end, has ended, or after a while."""
    ends = select.poll()
    for group in groups:
        ends.register(group, select.POLLIN)
    ends.poll(timeout_s * 1000)


def stop(groups: Sequence[Group], timeout_s: float) -> None:
    """End groups together: SIGTERM, and SIGKILL for what is left after `timeout_s`. Returns when they are gone."""
    for group in groups:
        group.signal_all(signal.SIGTERM)
    until = time.monotonic() + timeout_s
    while any(group.status() is None for group in groups) and time.monotonic() < until:
        time.sleep(_POLL_S)
    for group in groups:
        group.signal_all(signal.SIGKILL)  # also where the process has ended: what it has started may not have
        group.reap()
