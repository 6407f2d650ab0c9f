"""Batches that a thread makes ahead of who takes them, in a queue of bounded size.

What the thread raises is raised by whoever takes next, after what was made before. A thread that nobody wants any more
ends when its generator gives the next batch; it is not waited for, since a generator may wait for anything.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_LOOK_S = 0.1  # how long a thread waits before it looks whether it is still wanted


class _End:
    """Behind the last batch; `error` if there is one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Ahead(Iterator[Any]):
    """An iterator over what `make()` gives, `capacity` items of it made ahead. Taken from by one thread at a time."""

    def __init__(self, make: Callable[[], Iterable[Any]], capacity: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(capacity)
        self._wanted = True
        self._end: _End | None = None
        threading.Thread(target=self._run, args=(make,), name="penstock-data-loader", daemon=True).start()

    def __next__(self) -> Any:
        while self._end is None:
            try:
                item = self._queue.get(timeout=_LOOK_S)  # bounded: a thread that waits for ever sees no signal
            except queue.Empty:
                continue
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """Let the thread end."""
        self._wanted = False
        self._end = self._end or _End(None)

    def _run(self, make: Callable[[], Iterable[Any]]) -> None:
        items: Iterator[Any] = iter(())
        try:
            items = iter(make())
            for item in items:
                if not self._put(item):
                    break
            else:
                self._put(_End(None))
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: whoever takes next raises it
            self._put(_End(error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _put(self, item: Any) -> bool:
        while self._wanted:
            try:
                self._queue.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
