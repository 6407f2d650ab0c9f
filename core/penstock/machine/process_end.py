"""Probes of what the kernel offers for other processes: pidfds, their open files, ptrace."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys
from pathlib import Path

from penstock.machine.capability import Absent, note, probe

_PROBE_S = 5.0


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
            # O_NONBLOCK: another file could be a pipe without a reader.
            theirs = os.open(f"/proc/{process.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(theirs, expected.encode())
            if _read(reader, len(expected)) != expected.encode():
                raise Absent("/proc/PID/fd opens another file than the process has open")
        finally:
            _end(process)
            if theirs >= 0:
                os.close(theirs)
    return "/proc/PID/fd opens what another process of this user has open"


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
