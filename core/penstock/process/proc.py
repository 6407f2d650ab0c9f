"""Processes as /proc shows them: start times, descendants, environment. Standard library only.

A pid alone does not name a process, since pids are reused; (pid, start time in clock ticks, boot id) does.
Reads race with exits: a process that goes away while it is looked at counts as gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.process.signals import SIGNALS

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that matter here. `state`: one letter, Z and X are dead."""

    pid: int
    parent: int
    state: str
    start_ticks: int

    @property
    def dead(self) -> bool:
        """True for a process that has ended and only waits to be reaped."""
        return self.state in "ZX"


def stat(pid: int) -> Stat | None:
    """Return the entry of `pid`, None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command stands in brackets and may itself hold spaces and brackets.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(pid=pid, parent=int(fields[1]), state=fields[0], start_ticks=int(fields[19]))


def start_ticks(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot, None if it is gone or a zombie."""
    found = stat(pid)
    return None if found is None or found.dead else found.start_ticks


def is_alive(pid: int, started: int) -> bool:
    """True if `pid` still is the process that started at `started` (clock ticks since boot)."""
    return start_ticks(pid) == started


def every() -> list[Stat]:
    """Return all processes of this machine. Cost: one read for each process."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [found for pid in pids if (found := stat(pid)) is not None]


def descendants(root: int) -> list[int]:
    """Return the live processes below `root`, without `root`."""
    children: dict[int, list[Stat]] = {}
    for found in every():
        children.setdefault(found.parent, []).append(found)
    below: list[Stat] = []
    front = [root]
    while front:
        step = [child for pid in front for child in children.get(pid, [])]
        below.extend(step)
        front = [child.pid for child in step]
    return [found.pid for found in below if not found.dead]


def with_environment(entry: str) -> list[int]:
    """Return the live processes whose initial environment holds `entry` ("NAME=value")."""
    wanted = entry.encode()
    found = []
    for item in every():
        if item.dead:
            continue
        try:
            environ = Path(f"/proc/{item.pid}/environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        if wanted in environ.split(b"\0"):
            found.append(item.pid)
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def boot_id() -> str:
    """Return the kernel's identifier of this boot: pids and start times of another boot mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """Return what a forked child calls so that it gets a signal when this process is gone, however that ends.

    It also resets and unblocks the signals that its parent may ignore or hold (`signals_held`).
    """
    libc_prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up before the fork

    def call() -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        libc_prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return call
