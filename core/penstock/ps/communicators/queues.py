"""When gradients that wait are merged and sent, and when parameters are pulled. Pure: no threads, no clock.

a queue        one a variable, of `capacity` gradients; a full one has no room, so who trains waits
sent           when `max_merge` wait (or the queue is full), or when no other came for `patience_s`, or on flush
in order       one merge of a variable at a time: the steps of a block that a server sees only grow
pulled         when more than `min_sends` gradients of some variable went out since the last pull
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Queue(Generic[T]):
    """`last_came`: when the newest gradient came. `is_busy`: a merge of it is being sent."""

    waiting: deque[T] = field(default_factory=deque)
    last_came: float = -math.inf
    is_busy: bool = False


class SendQueues(Generic[T]):
    """The queues of all variables. Not thread-safe."""

    def __init__(self, *, capacity: int, max_merge: int, patience_s: float) -> None:
        self.capacity, self.max_merge, self.patience_s = capacity, max_merge, patience_s
        self._queues: dict[str, _Queue[T]] = {}
        self._is_flushing = False

    def offer(self, variable: str, gradient: T, now: float) -> bool:
        """Take a gradient; False if its queue is full."""
        queue = self._queues.setdefault(variable, _Queue())
        if len(queue.waiting) >= self.capacity:
            return False
        queue.waiting.append(gradient)
        queue.last_came = now
        return True

    def take(self, now: float) -> tuple[str, list[T]] | None:
        """Return what has to be sent now, at most `max_merge` gradients of one variable; its sender calls `done`."""
        for variable, queue in self._queues.items():
            if self._due_at(queue) <= now:
                queue.is_busy = True
                # To the end, so that a variable with many gradients does not hold up the others.
                self._queues[variable] = self._queues.pop(variable)
                return variable, [queue.waiting.popleft() for _ in range(min(self.max_merge, len(queue.waiting)))]
        return None

    def done(self, variable: str) -> None:
        """What was taken of a variable is sent."""
        self._queues[variable].is_busy = False

    def flush(self) -> None:
        """From now on everything that waits is due."""
        self._is_flushing = True

    def due_at(self) -> float:
        """When `take` will have something, if nothing else comes; infinity for never."""
        return min((self._due_at(q) for q in self._queues.values()), default=math.inf)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient waits. What was taken does not count."""
        return not any(q.waiting for q in self._queues.values())

    def depths(self) -> dict[str, int]:
        """Return the number of gradients that wait, by variable."""
        return {variable: len(queue.waiting) for variable, queue in self._queues.items()}

    def _due_at(self, queue: _Queue[T]) -> float:
        if queue.is_busy or not queue.waiting:
            return math.inf
        if self._is_flushing or len(queue.waiting) >= min(self.max_merge, self.capacity):
            return -math.inf
        return queue.last_came + self.patience_s


class PullTrigger:
    """Says when parameters are to be pulled: see the module."""

    def __init__(self, *, min_sends: int) -> None:
        self.min_sends = min_sends
        self._sent: dict[str, int] = {}

    def sent(self, variable: str, num_gradients: int) -> None:
        """Gradients of a variable went out."""
        self._sent[variable] = self._sent.get(variable, 0) + num_gradients

    @property
    def is_due(self) -> bool:
        """Whether it is time to pull."""
        return max(self._sent.values(), default=0) > self.min_sends

    def pulled(self) -> None:
        """A pull begins: what is sent from now on counts for the next one."""
        self._sent.clear()
