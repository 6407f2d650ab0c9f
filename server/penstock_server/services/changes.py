"""Changes of jobs, or of logs, for requests that wait for one. In memory, on one event loop; nothing is polled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Change:
    """Whether a job has changed since `clear`."""

    def __init__(self, *, closed: bool) -> None:
        self._event, self._closed = asyncio.Event(), closed

    def clear(self) -> None:
        """Count changes from now on."""
        self._event.clear()

    def note(self, *, closed: bool = False) -> None:
        """Note a change, or that none will be waited for any more."""
        self._closed |= closed
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a change. False when the time is up, or the server ends."""
        if self._closed:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        return not self._closed


class Changes:
    """The requests that wait, by job. Cost of a change: the requests that wait for that job."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[Change]] = {}
        self._closed = False

    @contextmanager
    def of(self, job_id: str) -> Iterator[Change]:
        """Note the changes of a job while the block runs."""
        change = Change(closed=self._closed)
        self._waiting.setdefault(job_id, set()).add(change)
        try:
            yield change
        finally:
            self._waiting[job_id].discard(change)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def jobs(self) -> set[str]:
        """Return the jobs that requests wait for."""
        return set(self._waiting)

    def note(self, job_ids: Iterable[str]) -> None:
        """Wake the requests that wait for these jobs."""
        if not self._waiting:
            return
        for job_id in job_ids:
            for change in self._waiting.get(job_id, ()):
                change.note()

    def close(self) -> None:
        """Let every request answer now: the server ends."""
        self._closed = True
        for waiting in self._waiting.values():
            for change in waiting:
                change.note(closed=True)
