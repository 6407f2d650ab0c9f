"""Queues of the communicators: when gradients are merged and sent, and parameters pulled. Pure: no threads, no clock.

SendQueues, PullTrigger (async)
a queue        one a variable, of `capacity` gradients; a full one has no room, so the training thread waits
sent           when `max_merge` wait (or the queue is full), or when no other came for `merge_wait_s`, or on flush
in order       one merge of a variable at a time: the steps of a block that a server sees only grow
pulled         when more than `min_sends` gradients of some variable went out since the last pull

LockStep (half-async): rounds between the threads of one trainer
a round        one gradient of each participant, of one variable; it is complete when all participants have given
twice          a participant that gives again before the round is complete gives to the next one
leaving        a participant without data leaves; the rounds that wait for it no longer do, what it gave stays
beginning      rounds that were open when participants change wait for no trainer, and take no more gradients
in order       one round of a variable at a time is taken; rounds of different variables are independent
A participant does not block here: it gets the number of its round, and waits until that is done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
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

    def __init__(self, *, capacity: int, max_merge: int, merge_wait_s: float) -> None:
        self.capacity, self.max_merge, self.merge_wait_s = capacity, max_merge, merge_wait_s
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

    def flush(self, *, ends: bool = False) -> None:
        """From now on everything that waits is due; with `ends` no longer."""
        self._is_flushing = not ends

    def due_at(self) -> float:
        """When `take` will have something, if nothing else comes; infinity for never."""
        return min((self._due_at(q) for q in self._queues.values()), default=math.inf)

    @property
    def is_empty(self) -> bool:
        """Whether no gradient waits. What was taken does not count."""
        return not any(q.waiting for q in self._queues.values())

    @property
    def is_sent(self) -> bool:
        """Whether no gradient waits, and none is being sent."""
        return not any(q.waiting or q.is_busy for q in self._queues.values())

    def depths(self) -> dict[str, int]:
        """Return the number of gradients that wait, by variable."""
        return {variable: len(queue.waiting) for variable, queue in self._queues.items()}

    def _due_at(self, queue: _Queue[T]) -> float:
        if queue.is_busy or not queue.waiting:
            return math.inf
        if self._is_flushing or len(queue.waiting) >= min(self.max_merge, self.capacity):
            return -math.inf
        return queue.last_came + self.merge_wait_s


class PullTrigger:
    """Decides when parameters are pulled: see the module."""

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


@dataclass(slots=True)
class _Rounds(Generic[T]):
    """`open`: rounds that wait, oldest first. `taken`, `done`: rounds so far. `given`: participant -> its last round.

    `began`: the first round of the present participants.
    """

    open: deque[dict[Hashable, T]] = field(default_factory=deque)
    taken: int = 0
    done: int = 0
    began: int = 0
    given: dict[Hashable, int] = field(default_factory=dict)


class LockStep(Generic[T]):
    """All variables of one trainer. `num_participants`: how many gradients complete a round. Not thread-safe."""

    def __init__(self, num_participants: int = 1) -> None:
        self.num_participants = num_participants
        self._variables: dict[str, _Rounds[T]] = {}
        self._left: set[Hashable] = set()

    def begin(self, num_participants: int) -> None:
        """Set the number of participants from now on; leaves of before are forgotten."""
        self.num_participants = num_participants
        self._left.clear()
        self.close_rounds()

    def close_rounds(self) -> None:
        """From now on the rounds that are open wait for no gradient, and take none."""
        for state in self._variables.values():
            state.began = state.taken + len(state.open)

    @property
    def are_closed_done(self) -> bool:
        """Whether the rounds that `close_rounds` has closed are done."""
        return all(state.done >= state.began for state in self._variables.values())

    def give(self, variable: str, who: Hashable, gradient: T) -> None:
        """A participant's gradient. One that had left takes part again."""
        if who in self._left:
            self._left.discard(who)
            self.num_participants += 1
        state = self._variables.setdefault(variable, _Rounds())
        first = max(0, state.began - state.taken)
        ahead = next((i for i in range(first, len(state.open)) if who not in state.open[i]), len(state.open))
        if ahead == len(state.open):
            state.open.append({})
        state.open[ahead][who] = gradient
        state.given[who] = state.taken + ahead

    def take(self) -> tuple[str, list[T]] | None:
        """Return the gradients of a complete round; the sender calls `done`."""
        for variable, state in self._variables.items():
            if state.taken == state.done and state.open and self._is_complete(state):
                state.taken += 1
                return variable, list(state.open.popleft().values())
        return None

    def done(self, variable: str) -> None:
        """The round that was taken is sent and applied."""
        self._variables[variable].done += 1

    def is_done(self, variable: str, round: int) -> bool:
        """Whether a round of a variable is done."""
        return self._variables[variable].done > round

    def round_to_wait_for(self, variable: str, who: Hashable) -> int:
        """Return the newest round that `who` has to see: its own, or any that is being sent. -1: there was none.

        Never one that is open and not its own: that could wait for this participant.
        """
        state = self._variables.get(variable)
        return -1 if state is None else max(state.given.get(who, -1), state.taken - 1)

    def num_done(self, variable: str) -> int:
        """Rounds of a variable that are done."""
        state = self._variables.get(variable)
        return 0 if state is None else state.done

    def leave(self, who: Hashable) -> None:
        """A participant has no more data. To leave twice is to leave once."""
        if who not in self._left:
            self._left.add(who)
            self.num_participants = max(0, self.num_participants - 1)

    def flush(self) -> None:
        """Stop waiting: every gradient that was given is in a complete round."""
        self.num_participants = 0

    @property
    def is_empty(self) -> bool:
        """Whether no gradient waits, and none is being sent."""
        return all(not s.open and s.taken == s.done for s in self._variables.values())

    def depths(self) -> dict[str, int]:
        """Return the number of gradients that wait, by variable."""
        return {variable: sum(map(len, state.open)) for variable, state in self._variables.items()}

    def _is_complete(self, state: _Rounds[T]) -> bool:
        """Whether nothing more comes for the oldest open round."""
        here = sum(who not in self._left for who in state.open[0])
        return state.taken < state.began or here >= self.num_participants
