"""The end of another process, a child or not, as a descriptor that becomes readable.

A pidfd where the kernel has one, else a pipe that a thread closes when /proc shows the end. Nothing is reaped. A pid
alone may be reused; the start time of the process, taken at the beginning, tells the two apart.
"""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.machine.capability import Absent, capability, note, probe

POLL_S = 0.05
_PROBE_S = 5.0


def open_process_end(pid: int) -> int:
    """Return a descriptor, the caller's to close, that is readable once `pid` has ended (a zombie has ended).

    Raises ProcessLookupError if there is no such process.
    """
    if capability("pidfd").present:
        return os.pidfd_open(pid)
    return _polled_end(pid)


def start_ticks(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


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


@probe("pidfd", fallback="start times in /proc, 20 times a second")
def _pidfd() -> str:
    if not hasattr(os, "pidfd_open"):
        raise Absent("this platform has no pidfd_open")
    process = subprocess.Popen([_interpreter(), "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        descriptor = os.pidfd_open(process.pid)
        try:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            if end.poll(0):
                raise Absent("a pidfd shows the end of a process that runs")
            process.kill()
            if not end.poll(_PROBE_S * 1000):
                raise Absent("a pidfd does not show the end of a process")
        finally:
            os.close(descriptor)
    finally:
        _end(process)
    return "shows the end of a process at once"


@probe("other_descriptors", fallback="exchange by Gloo instead of the ring in shared memory")
def _other_descriptors() -> str:
    """Files that another process of the same user has open, through /proc/PID/fd."""
    expected = os.urandom(16).hex()
    readable, writable = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(readable, "rb", buffering=0) as reader, os.fdopen(writable, "wb", buffering=0) as writer:
        theirs = -1
        process = subprocess.Popen([_interpreter(), "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, stdout=writer)
        try:
            theirs = _open_theirs(f"/proc/{process.pid}/fd/1")
            os.write(theirs, expected.encode())
            if _read(reader, len(expected)) != expected.encode():
                raise Absent("/proc/PID/fd opens another file than the process has open")
        finally:
            _end(process)
            if theirs >= 0:
                os.close(theirs)
    return "/proc/PID/fd opens what another process of this user has open"


def _open_theirs(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # another file could be a pipe without a reader


def _read(pipe: io.RawIOBase, count: int) -> bytes | None:
    """Return what comes within _PROBE_S: nothing does where the bytes went to another file."""
    watched = select.poll()
    watched.register(pipe.fileno(), select.POLLIN)
    return pipe.read(count) if watched.poll(_PROBE_S * 1000) else None


@note("ptrace", meaning="gdb and py-spy cannot attach to a running job")
def _ptrace() -> str:
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except FileNotFoundError:
        return "not restricted by Yama"
    if scope not in (0, 1):
        raise Absent(f"kernel.yama.ptrace_scope is {scope}; expected 0 or 1")
    return f"kernel.yama.ptrace_scope is {scope}"


def _interpreter() -> str:
    if not sys.executable:
        raise Absent("the interpreter's path is unknown, so no process can be started to try it")
    return sys.executable


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
