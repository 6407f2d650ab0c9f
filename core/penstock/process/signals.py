"""Signals that ask this process to end: `stopped_by_signal` turns them into `Stopped`, so that `finally` clauses run.

While those run, further signals are ignored. A SIGHUP that is ignored already (nohup) stays ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked this process to end. Not an Exception: only a clean-up may catch it."""


@contextmanager
def stopped_by_signal() -> Iterator[None]:
    """Raise Stopped in the main thread at the first signal; ignore those that follow."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise Stopped(signal.Signals(number).name)

    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in heeded}
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
    """Hold signals between a child's start and its registration, where one would leave the child without an owner."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
