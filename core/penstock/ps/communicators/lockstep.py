"""Rounds between the threads of one trainer: each gives one gradient, they leave together. Pure: no threads, no clock.

a round        one gradient of each participant, of one variable; it is complete when all who take part have given
twice          a participant that gives again before the round is complete gives to the next one
leaving        who has no more data leaves; the rounds that wait for it no longer do, what it gave stays
beginning      rounds that were open when participants change wait for nobody, and take no more gradients
in order       one round of a variable at a time is taken; rounds of different variables are independent
No participant waits here: it is told the number of its round, and waits until that is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Variable(Generic[T]):
    """`open`: rounds that wait, oldest first. `taken`, `done`: rounds so far. `given`: who -> its last round.

    `began`: the first round of those who take part now.
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
        self._variables: dict[str, _Variable[T]] = {}
        self._left: set[Hashable] = set()

    def begin(self, num_participants: int) -> None:
        """So many take part from now on, whoever has left before."""
        self.num_participants = num_participants
        self._left.clear()
        for state in self._variables.values():
            state.began = state.taken + len(state.open)

    def give(self, variable: str, who: Hashable, gradient: T) -> None:
        """A participant's gradient. One that had left takes part again."""
        if who in self._left:
            self._left.discard(who)
            self.num_participants += 1
        state = self._variables.setdefault(variable, _Variable())
        first = max(0, state.began - state.taken)
        ahead = next((i for i in range(first, len(state.open)) if who not in state.open[i]), len(state.open))
        if ahead == len(state.open):
            state.open.append({})
        state.open[ahead][who] = gradient
        state.given[who] = state.taken + ahead

    def take(self) -> tuple[str, list[T]] | None:
        """Return the gradients of a complete round; whoever sends them calls `done`."""
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
        """Wait for nobody any more: every gradient that was given is in a complete round."""
        self.num_participants = 0

    @property
    def is_empty(self) -> bool:
        """Whether no gradient waits, and none is being sent."""
        return all(not s.open and s.taken == s.done for s in self._variables.values())

    def depths(self) -> dict[str, int]:
        """Return the number of gradients that wait, by variable."""
        return {variable: sum(map(len, state.open)) for variable, state in self._variables.items()}

    def _is_complete(self, state: _Variable[T]) -> bool:
        """Whether nothing more comes for the oldest open round."""
        here = sum(who not in self._left for who in state.open[0])
        return state.taken < state.began or here >= self.num_participants
