"""GEO: which rows of a block others have changed since a trainer last asked.

An answer may be lost. What was told is kept, and told again, until the trainer pushes its next step: it pushes only
after it has heard the answer.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
_COMPACT_AT = 64  # pieces


class ChangedRows:
    """Sets of row ids by (block, trainer). Not thread-safe for one block: its lock is held around calls."""

    def __init__(self, trainers: set[int]) -> None:
        self.trainers = set(trainers)
        self._fresh: defaultdict[tuple[str, int], list[Ids]] = defaultdict(list)
        self._told: dict[tuple[str, int], Ids] = {}

    def note(self, block: str, trainer: int, rows: Ids) -> None:
        """A trainer has pushed these rows: everybody else has to hear of them."""
        self._told.pop((block, trainer), None)
        own = np.unique(rows)
        for other in self.trainers - {trainer}:
            pieces = self._fresh[block, other]
            pieces.append(own)
            if len(pieces) >= _COMPACT_AT:
                pieces[:] = [np.unique(np.concatenate(pieces))]

    def take(self, block: str, trainer: int) -> Ids:
        """Return what a trainer has to hear, ascending."""
        key = (block, trainer)
        told = self._told.get(key, np.empty(0, np.int64))
        self._told[key] = np.unique(np.concatenate([told, *self._fresh.pop(key, [])]))
        return self._told[key]

    def read_whole(self, block: str, trainer: int) -> None:
        """A trainer reads the whole block: it has heard all."""
        self._fresh.pop((block, trainer), None)

    def state(self) -> dict[tuple[str, int], Ids]:
        """Return all that is still to be heard."""
        keys = {*self._fresh, *self._told}
        pieces = {key: [self._told.get(key, np.empty(0, np.int64)), *self._fresh.get(key, [])] for key in keys}
        return {key: np.unique(np.concatenate(some)) for key, some in pieces.items()}

    def restore(self, state: dict[tuple[str, int], Ids]) -> None:
        """Go on from `state`."""
        for key, ids in state.items():
            self.trainers.add(key[1])
            self._fresh[key].append(ids)
