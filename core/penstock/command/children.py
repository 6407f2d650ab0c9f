"""Child processes that end with us: on a signal because we end them, on SIGKILL because the kernel tells them.

`stopped_by_signal` turns SIGTERM, SIGINT and SIGHUP into `Stopped`, so that `finally` blocks do the cleaning; while
they run, further signals are ignored. A SIGHUP that is ignored already (nohup) stays ignored.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.errors import Unavailable

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TAIL_LINES = 8


class Stopped(BaseException):
    """A signal asked us to end. Not an Exception: nothing but a clean-up may catch it."""


@contextmanager
def stopped_by_signal() -> Iterator[None]:
    """Raise Stopped in the main thread at the first signal; ignore those that follow."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(signal.Signals(number).name)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Let a clean-up run to its end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_held() -> Iterator[None]:
    """Let no signal come between a child's start and the note of it, which would leave the child to nobody."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> Callable[[], None]:
    """Return what a forked child calls so that it gets SIGTERM when we are gone, however we end.

    It hears signals, also where its parent holds them (`signals_held`).
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()  # looked up before the fork

    def call() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # we ended before the call
            os._exit(1)

    return call


class Child:
    """One process in a session of its own (a Ctrl-C in the terminal reaches us alone), its output in a log file."""

    def __init__(self, name: str, argv: list[str], *, log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
                preexec_fn=end_with_parent(),  # noqa: PLW1509 we have one thread
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def check(self) -> None:
        """Raise Unavailable, with the end of its log, if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise Unavailable(f"the {self.name} ended with exit code {code} (log: {self._log}):\n{self.tail()}")

    def tail(self) -> str:
        """Return the last lines that it wrote in this run."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])

    def stop(self, timeout_s: float) -> None:
        """End it: SIGTERM, and SIGKILL after `timeout_s`. Returns when it is gone."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
