"""A pass over the samples in memory: batches in their order, gathered by the thread that takes them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from penstock.dataset.dataset_base import Run
from penstock.dataset.position import FilePlaces
from penstock.dataset.slots import Slot
from penstock.native import _feed


@dataclass(frozen=True, slots=True)
class Complement:
    """Batches of samples that are drawn again, behind those of the data."""

    num_batches: int = 0
    seed: int = 0


class MemoryRun(Run):
    """One pass over what is in memory. Each trainer gathers its batches itself, without the interpreter lock.

    Places count samples: those of the data, then those drawn again.
    """

    gathers = True

    def __init__(
        self,
        slots: tuple[Slot, ...],
        store: _feed.Store,
        batch_size: int,
        first: int,
        complement: Complement,
        num_places: int = 1,
    ) -> None:
        """`num_places`: how many take batches by turns; each gets as many samples as the others, or one more."""
        self.slots, self._store, self._batch_size, self._first = slots, store, batch_size, first
        self._complement = complement
        own = max(0, len(store) - first)
        self._full = own // num_places // batch_size * num_places
        self._rest = _dealt(own - self._full * batch_size, num_places)
        self._num_own = self._full + sum(size > 0 for size in self._rest)
        self._drawn_before = max(0, first - len(store)) // batch_size
        self._num_batches = self._num_own + complement.num_batches - self._drawn_before
        self._next = 0
        self._lock = threading.Lock()
        self._places = FilePlaces(["memory"])
        self._taken: dict[int, tuple[int, int]] = {}
        self.closed = False

    def take(self) -> _feed.Batch | None:
        with self._lock:
            number = self._next
            if number >= self._num_batches or self.closed:
                return None
            self._next += 1
        if number < self._num_own:
            behind = number - self._full
            begin = self._first + min(number, self._full) * self._batch_size + sum(self._rest[: max(behind, 0)])
            batch = self._store.gather(begin, self._batch_size if behind < 0 else self._rest[behind])
            end = begin + len(batch)
        else:
            drawn = self._drawn_before + number - self._num_own
            batch = self._store.draw(self._batch_size, (self._complement.seed + drawn) % (1 << 64))
            end = len(self._store) + (drawn + 1) * self._batch_size
        with self._lock:
            self._taken[id(batch)] = (number, end)
        return batch

    def used(self, batch: _feed.Batch) -> None:
        with self._lock:
            number, end = self._taken.pop(id(batch))
            self._places.used(0, number, [(0, end, end, False)])

    @property
    def used_samples(self) -> int:
        """How many samples from the first on were trained on, those of this pass before a resume included."""
        with self._lock:
            return max(self._first, self._places.files[0].offset)

    def fraction(self) -> float | None:
        before = self._first / self._batch_size
        return min(1.0, (before + self._next) / max(1.0, before + self._num_batches))

    def stop(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


def _dealt(num_samples: int, num_places: int) -> list[int]:
    """Return how many samples each place gets of the last ones, in batches of at most one a place."""
    base, extra = divmod(num_samples, num_places)
    return [base + (place < extra) for place in range(num_places)]
