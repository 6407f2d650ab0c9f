"""The end of another process, a child or not, as a descriptor that becomes readable.

A pidfd where the kernel has one, else a pipe that a thread closes when /proc shows the end. Nothing is reaped. A pid
alone may be reused; the start time of the process, taken at the beginning, tells the two apart. Apart from `proc`,
which a guard loads with the standard library alone.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.machine.capability import capability
from penstock.process.proc import start_ticks

POLL_S = 0.05


def open_process_end(pid: int) -> int:
    """Return a descriptor, the caller's to close, that is readable once `pid` has ended (a zombie has ended).

    Raises ProcessLookupError if there is no such process.
    """
    if capability("pidfd").present:
        return os.pidfd_open(pid)
    return _polled_end(pid)


def _polled_end(pid: int) -> int:
    started = start_ticks(pid)
    if started is None and not Path(f"/proc/{pid}").exists():
        raise ProcessLookupError(f"there is no process {pid}")
    readable, writable = os.pipe2(os.O_CLOEXEC)
    if started is None:
        os.close(writable)
        return readable
    is_alive = lambda: start_ticks(pid) == started  # noqa: E731 - a name for what the thread asks
    threading.Thread(target=_close_at_end, args=(writable, is_alive), name="penstock-end", daemon=True).start()
    return readable


def _close_at_end(writable: int, is_alive: Callable[[], bool]) -> None:
    """Close the pipe when the process has ended, or nothing reads the pipe any more."""
    watched = select.poll()
    watched.register(writable, 0)  # POLLERR, which comes unasked: the reader has closed
    try:
        while is_alive() and not watched.poll(POLL_S * 1000):
            pass
    finally:
        os.close(writable)
