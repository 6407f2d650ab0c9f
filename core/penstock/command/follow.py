"""Wait for a job and show how it goes: a progress bar on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol

from penstock.command.exits import Exit, TimedOut
from penstock.command.output import describe, is_over, note
from penstock.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from penstock.client import Client
    from penstock.protocol.rest import Job

POLL_S = 0.5  # without a server
PUSH_S = 1.0  # how long the server holds a request back; progress is no change, and is shown after this
AWAY_S = 60.0  # a server that restarts is waited for this long
LINE_EVERY_S = 10.0


class Display(Protocol):
    """Shows a job. Used as a context manager, so that a terminal is left as it was."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, job: Job) -> None:
        """Show the job's present state."""


def exit_of_job(job: Job) -> Exit:
    """Return the exit code that stands for how the job ended."""
    return Exit.OK if job["state"] == "SUCCEEDED" else Exit.JOB_FAILED


class Away:
    """How long the server has not answered. One that restarts is waited for; one that stays away is an error."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = clock()

    def answered(self) -> None:
        """Note an answer."""
        self._seen = self._clock()

    def silent(self, error: Unavailable) -> None:
        """Note that none came. Raises `error` after `AWAY_S` without one."""
        if self._clock() - self._seen > AWAY_S:
            raise error


def wait(
    client: Client,
    job_id: str,
    display: Display,
    *,
    timeout_s: float | None = None,
    check: Callable[[], None] = lambda: None,
) -> Job:
    """Return the job once it has ended. `check` is called between requests, each second or so, and may raise.

    Raises TimedOut, or Unavailable if the server is unreachable for more than a minute.
    """
    start = time.monotonic()
    away = Away()
    version: int | None = None
    while True:
        check()
        asked_at = time.monotonic()
        left_s = float("inf") if timeout_s is None else max(0.0, timeout_s - (asked_at - start))
        try:
            # The first look is answered at once, the others when there is something new.
            job = client.job(job_id, wait_s=0.0 if version is None else min(PUSH_S, left_s), since=version)
            away.answered()
            display.show(job)
            if is_over(job):
                return job
            pause_s = 0.0 if version is None else _pause_s(job["version"] == version, time.monotonic() - asked_at)
            version = job["version"]
        except Unavailable as error:
            away.silent(error)
            pause_s = POLL_S
        if timeout_s is not None and time.monotonic() - start > timeout_s:
            raise TimedOut(f"job {job_id} has not ended within {timeout_s:g} s; it goes on")
        time.sleep(pause_s)


def _pause_s(unchanged: bool, taken_s: float) -> float:
    """Return how long to wait before the next request. A server that stops, or knows no `wait`, answers at once."""
    return POLL_S if unchanged and taken_s < PUSH_S / 2 else 0.0


def display_for(*, quiet: bool = False) -> Display:
    """Return what fits: nothing, a live bar on a terminal, lines elsewhere."""
    if quiet:
        return StateLines(every_s=float("inf"), to=lambda _: None)
    if not sys.stderr.isatty():
        return StateLines()
    from penstock.command.progress import Bar  # loads rich

    return Bar()


class StateLines:
    """One line for each change of state, and one each ten seconds while the job makes progress."""

    def __init__(self, *, every_s: float = LINE_EVERY_S, to: Callable[[str], None] = note) -> None:
        self._every_s = every_s
        self._to = to
        self._state = ""
        self._at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, job: Job) -> None:
        """Print a line if there is something new."""
        if job["state"] == self._state and time.monotonic() - self._at < self._every_s:
            return
        self._state, self._at = job["state"], time.monotonic()
        self._to(describe(job))
