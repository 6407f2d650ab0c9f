"""Batches that wait to be taken: made by a thread, or pushed by a script.

A queue has a capacity. What the thread raises is raised by the next take, after what was made before. A thread that is
needed no more ends when its generator gives the next batch, and is not waited for, since a generator may wait for
anything. Source: LoDTensorBlockingQueue of Fluid 1.8.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_LOOK_S = 0.1  # how long a thread waits before it looks whether it is still wanted


class _End:
    """Behind the last batch; `error` if there is one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetched(Iterator[Any]):
    """An iterator over what `make()` gives, `capacity` items of it made in advance. One thread at a time takes."""

    def __init__(self, make: Callable[[], Iterable[Any]], capacity: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(capacity)
        self._wanted = True
        self._end: _End | None = None
        self.thread = threading.Thread(target=self._run, args=(make,), name="penstock-data-loader", daemon=True)
        self.thread.start()

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

    @property
    def num_waiting(self) -> int:
        """How many items are made and not taken."""
        return self._queue.qsize()

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
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: the next take raises it
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


class FeedQueue:
    """The queue of a loader, which scripts may fill themselves: a loader that was not started takes what was pushed.

    `push` and `close` are for any thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._batches: list[Sequence[Any]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._made: Prefetched | None = None

    def shows(self, made: Prefetched | None) -> None:
        """Count what a thread makes, None: what is pushed, from now on."""
        self._made = made

    def push(self, batch: Sequence[Any]) -> bool:
        """Add a batch, an array or tensor for each input, once there is room; False if the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._batches) < self._capacity)
            if self._closed:
                return False
            self._batches.append(list(batch))
            self._changed.notify_all()
            return True

    def pop(self) -> Sequence[Any] | None:
        """Return the batch that was pushed first, once there is one; None if the queue is empty and closed."""
        with self._changed:
            while not self._batches and not self._closed:
                self._changed.wait(_LOOK_S)  # bounded: see Prefetched
            batch = self._batches.pop(0) if self._batches else None
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        """End the data: what was pushed before is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """Forget what waits, and take pushes again."""
        with self._changed:
            self._batches.clear()
            self._closed = False
            self._changed.notify_all()

    def size(self) -> int:
        """Return how many batches wait at the moment."""
        return len(self._batches) if self._made is None else self._made.num_waiting

    def __len__(self) -> int:
        return self.size()
