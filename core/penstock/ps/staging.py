"""Updates of a round's blocks that are computed before the round is applied: staged.

A block is staged when the gradient of each trainer that the round waits for is there, though the rest of their steps is
not: its mean is made, and its update is computed on a copy (`StagingStorage.stage`). A round that is applied then over
the same members with the same gradients takes what was staged. Any other, after a trainer was lost, came back or pushed
again, drops it, and is computed from the gradients, which staging does not change. So staging decides nothing: the
write-ahead log, what is acknowledged and the values are those of a round without it, to the bit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from penstock.errors import PenstockError
from penstock.ps.durability.wal import AppliedIndex
from penstock.ps.storage import Gradient, Storage


@runtime_checkable
class StagingStorage(Storage, Protocol):
    """Storage that can compute a dense block's update before it is applied."""

    def stage(self, block: str, gradient: Gradient, slot: int = 0) -> Any | None:
        """Return a new tensor: the block's value after `begin_round` (sync mode) and `update` with a dense gradient.

        None where that cannot be said before. Nothing that others see changes. What was staged in other slots remains.
        Raises as `update`.
        """

    def take_staged(self, block: str, slot: int = 0) -> None:
        """Apply what was staged of the block in the slot last: it was not updated since then.

        Sync: `begin_round` was called.
        """


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """One computed update. `number` grows. `gradients`: of `members`, held, so that no other gets their memory."""

    number: int
    members: tuple[int, ...]
    gradients: tuple[Gradient, ...]
    merged: Gradient

    def is_of(self, gradients: Sequence[Gradient], members: Sequence[int]) -> bool:
        """Whether it was computed from these: of the same members, in the same memory."""
        return self.members == tuple(members) and _memory(self.gradients) == _memory(gradients)


def _memory(gradients: Sequence[Gradient]) -> list[tuple[int | None, int, bool]]:
    return [(g.trainer, g.values.data_ptr(), g.rows is None) for g in gradients]


class Staging:
    """The staged blocks of the open round, and which ones the last round has taken. Thread-safe, as said at each."""

    def __init__(self, storage: Storage, applied: AppliedIndex) -> None:
        self._storage = storage if isinstance(storage, StagingStorage) else None
        self._applied = applied
        self._round = -1
        self._blocks: dict[str, StagedBlock] = {}
        self._taken: dict[str, int] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def has_staged(self) -> bool:
        """Whether an update is staged. Under all locks."""
        return bool(self._blocks)

    @property
    def is_possible(self) -> bool:
        """Whether the storage can stage updates."""
        return self._storage is not None

    def stage(
        self, round: int, block: str, gradients: Sequence[Gradient], members: tuple[int, ...]
    ) -> tuple[int, torch.Tensor] | None:
        """Stage a block with the dense gradients of all `members`, which are not changed. Under the block's lock.

        Return its number and the value that it will have, a new tensor; None if the round is not open, or the block
        cannot be staged. An error is met again when the round is applied, and reported then.
        """
        if self._storage is None or self._applied.round != round:
            return None
        merged = Gradient(self._mean(block, [g.values for g in gradients]))
        try:
            value = self._storage.stage(block, merged)
        except PenstockError:
            return None
        if value is None:
            return None
        staged = StagedBlock(next(self._numbers), members, tuple(gradients), merged)
        with self._lock:
            if self._round != round:
                self._round, self._blocks, self._taken = round, {}, {}
            self._blocks[block] = staged
        return staged.number, value

    def _mean(self, block: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `state.mean`, in memory of its own, which is the block's until it is staged again."""
        if len(values) == 1:
            return values[0]
        total = self._totals.get(block)
        if total is None:
            total = self._totals[block] = torch.empty_like(values[0])
        torch.add(values[0], values[1], out=total)
        for one in values[2:]:
            total.add_(one)
        return total.div_(len(values))

    def fitting(
        self, round: int, gradients: Mapping[str, Sequence[Gradient]], members: Sequence[int]
    ) -> dict[str, Gradient]:
        """Return the merged gradients of the blocks whose staged updates are those of this round. Under all locks."""
        found = self._blocks if self._round == round else {}
        return {b: s.merged for b, s in found.items() if b in gradients and s.is_of(gradients[b], members)}

    def take(self, blocks: Sequence[str]) -> None:
        """Apply the staged updates of these blocks, which fit. Under all locks, after `begin_round`."""
        assert self._storage is not None or not blocks
        for block in blocks:
            self._storage.take_staged(block)  # type: ignore[union-attr]  # asserted
        self._taken = {block: self._blocks[block].number for block in blocks}

    def drop(self) -> None:
        """Forget what is staged: its round is applied, or has failed. Under all locks."""
        self._blocks = {}

    def taken(self, round: int) -> Mapping[str, int]:
        """Return the numbers of the staged updates of which this round, the last one applied, consists.

        Under the lock of a block: then no other round is applied meanwhile.
        """
        return self._taken if self._round == round and self._applied.round == round + 1 else {}


class StagedPushes:
    """Without rounds: updates of pushes that are on their way, each computed on its block's present value.

    Of a block the first one staged and the newest are retained, until the block is updated: by one of these pushes,
    which takes what was staged, or by another; then none holds any more. So of trainers in step, whose parts come one
    after another, the one whose step comes first is not computed again, whichever it is of two. Each call is under the
    lock of its block.
    """

    NUM_SLOTS = 2

    def __init__(self, storage: Storage) -> None:
        self._storage = storage if isinstance(storage, StagingStorage) else None
        # Staged, by block and slot; held, so that no other gets their memory.
        self._gradients: dict[str, dict[int, Gradient]] = {}

    @property
    def has_staged(self) -> bool:
        """Whether an update is staged, of any block."""
        return bool(self._gradients)

    def stage(self, block: str, gradient: Gradient) -> torch.Tensor | None:
        """Return the value that the block would have with this push, a new tensor; None if it cannot be staged.

        An error is met again when the push is applied, and reported then.
        """
        if self._storage is None:
            return None
        slots = self._gradients.pop(block, {})
        slots = {slot: one for slot, one in slots.items() if one.trainer != gradient.trainer}  # of a step it gave up
        slot = next((slot for slot in range(self.NUM_SLOTS) if slot not in slots), self.NUM_SLOTS - 1)
        slots.pop(slot, None)
        try:
            value = self._storage.stage(block, gradient, slot)
        except (PenstockError, RuntimeError, MemoryError):  # the latter: no memory for a copy, in torch or here
            value = None
        if value is not None:
            slots[slot] = gradient
        if slots:
            self._gradients[block] = slots
        return value

    def take(self, block: str, gradient: Gradient) -> bool:
        """Apply the staged update if it is that of this push; forget all of the block, since it is updated now."""
        slots = self._gradients.pop(block, {})
        slot = _slot_of(slots, gradient)
        if self._storage is None or slot is None:
            return False
        self._storage.take_staged(block, slot)
        return True

    def drop(self, block: str, gradient: Gradient) -> None:
        """Forget what was staged of a push that does not come any more, if it still is."""
        slots = self._gradients.get(block, {})
        slot = _slot_of(slots, gradient)
        if slot is not None:
            del slots[slot]
        if not slots:
            self._gradients.pop(block, None)


def _slot_of(slots: Mapping[int, Gradient], gradient: Gradient) -> int | None:
    return next((slot for slot, one in slots.items() if _memory([one]) == _memory([gradient])), None)
