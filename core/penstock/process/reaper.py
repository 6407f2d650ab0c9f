"""Orphan reaper: ends what a launcher has started when the launcher is killed (SIGKILL, the kernel's memory killer).

The kernel signals only direct children when their parent is gone. So a forked process waits at a pipe for the
launcher's end, and then ends the process groups that were added, with all that is in them.
"""

from __future__ import annotations

import os
import signal
import time

from penstock.process.signals import ignore_signals

_POLL_S = 0.02
_DISMISSED = "dismissed"


class OrphanReaper:
    """Made before anything is started, by a process with one thread. `stop_s`: from SIGTERM to SIGKILL."""

    def __init__(self, stop_s: float) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                _wait_and_reap(read, stop_s)
            finally:
                os._exit(0)  # nothing of the launcher's own clean-up
        os.close(read)

    def add(self, group: int) -> None:
        """Add a process group that must not outlive the launcher."""
        os.write(self._write, f"{group}\n".encode())

    def dismiss(self) -> None:
        """End the reaper: nothing is left. Call once."""
        os.write(self._write, f"{_DISMISSED}\n".encode())
        os.close(self._write)
        os.waitpid(self._pid, 0)


def _wait_and_reap(read: int, stop_s: float) -> None:
    os.setsid()  # a signal to the launcher's group is not for this process
    ignore_signals()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    with os.fdopen(read) as file:
        added = file.read().split()
    if added[-1:] == [_DISMISSED]:
        return
    left = {int(group) for group in added}
    until = time.monotonic() + stop_s
    left = _signal(left, signal.SIGTERM)
    while left and time.monotonic() < until:
        time.sleep(_POLL_S)  # no child of this process, so their ends cannot be waited for
        left = _signal(left, 0)
    _signal(left, signal.SIGKILL)


def _signal(groups: set[int], number: int) -> set[int]:
    """Signal groups; return those that are still there."""
    there = set()
    for group in groups:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            continue
        there.add(group)
    return there
