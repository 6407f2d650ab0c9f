"""Ends what a launcher has started when the launcher is killed (SIGKILL, the kernel's memory killer).

The kernel tells direct children alone that their parent is gone. So a forked process waits at a pipe for the launcher's
end, and then ends the process groups that were named to it, with all that is in them.
"""

from __future__ import annotations

import os
import signal
import time

from penstock.command.children import ignore_signals

_POLL_S = 0.02


class LastWill:
    """Made before anything is started, by a process with one thread. `stop_s`: from SIGTERM to SIGKILL."""

    def __init__(self, stop_s: float) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._write)
                _wait_and_execute(read, stop_s)
            finally:
                os._exit(0)  # nothing of the launcher's own clean-up
        os.close(read)

    def add(self, group: int) -> None:
        """Name a process group that must not outlive the launcher."""
        os.write(self._write, f"{group}\n".encode())

    def revoke(self) -> None:
        """Say that nothing is left. Call once."""
        os.write(self._write, b"nobody\n")
        os.close(self._write)
        os.waitpid(self._pid, 0)


def _wait_and_execute(read: int, stop_s: float) -> None:
    os.setsid()  # a signal to the launcher's group is not for us
    ignore_signals()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    with os.fdopen(read) as file:
        named = file.read().split()
    if named[-1:] == ["nobody"]:
        return
    left = {int(group) for group in named}
    until = time.monotonic() + stop_s
    left = _signal(left, signal.SIGTERM)
    while left and time.monotonic() < until:
        time.sleep(_POLL_S)
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
