"""Storage of a parameter server: its interface, and a lock for each block.

Storage holds blocks of parameters with their updates, and sparse tables. The server decides when to call it, Storage
what happens then. Implemented over a pserver program by `penstock.serving.storage`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock.errors import PeerError
from penstock.protocol.tables import TableSums


@dataclass(frozen=True, slots=True)
class Gradient:
    """What is applied to a block: `values` of the block's shape, or rows of it: `rows` int64[n], `values` [n, d].

    Torch tensors on the CPU. Rows count from the block's first row, or are ids of a table; they may repeat.
    `trainer`: its sender, in immediate modes; None for a merged one.
    """

    values: Any
    rows: Any | None = None
    trainer: int | None = None


class Storage(Protocol):
    """The blocks of one server. Calls for different blocks may run at the same time; for one block they do not.

    Invariant: what `state` yields, restored into a fresh storage of the same program, gives the same results as this.
    """

    def blocks(self) -> Sequence[str]:
        """Names of all blocks, tables included, in the program's order."""

    def begin_round(self) -> None:
        """Advance what a step shares over blocks: learning-rate schedule, step counters. Sync mode: once a round."""

    def check(self, block: str, gradient: Gradient) -> None:
        """Raise PeerError for a gradient that `update` would not take: asked before a round it may not disturb."""

    def check_room(self, block: str, gradient: Gradient) -> None:
        """Raise TableFull if `update` would make more rows than a table may have. The block's lock is held to both.

        Asked before an update is logged: one that fails halfway would be neither in the log nor out of the table.
        """

    def update(self, block: str, gradient: Gradient) -> None:
        """Apply one (merged) gradient, or in GEO one delta. In immediate modes it advances its own counters too.

        Raises PeerError for a block that is not here or a gradient that does not fit; nothing has changed then. The
        gradient's tensors are not changed: they may be a trainer's memory, and are logged afterwards.
        """

    def update_all(self, gradients: Mapping[str, Gradient]) -> None:
        """Apply a gradient to each block that `check` and `check_room` took: as `update`, in any order or at once."""

    def value(self, block: str) -> Any:
        """Return a dense block's tensor: the memory itself, not a copy."""

    def pulled(self, block: str, trainer: int) -> bool:
        """Note that a trainer takes the dense block's value as it is now: delay compensation (DC-ASGD) is against it.

        Call it where the value is read, with no update of the block in between. Without DC-ASGD it does nothing, and
        returns False: no update depends on it, so a log does not need it.
        """

    def rows(self, block: str, ids: Any, *, create: bool) -> Any:
        """Return rows [n, d] of a block or table: a fresh tensor. `create`: a table gives missing ids rows.

        Raises PeerError (an id outside a block), TableFull.
        """

    def expire(self, block: str) -> int:
        """Drop rows of a table that were unused for as long as its program allows; return how many. 0 for others."""

    def tables(self) -> Sequence[TableSums]:
        """Return what each table holds and what was asked of it. From any thread; it does not block."""

    def state(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, tensors) of everything a restart needs: values and optimizer state of each block, counters.

        An item is a copy, consistent in itself, that does not change. Names do not depend on how parameters are cut:
        `parameter@first_row` with a tensor for each variable of the update (under its name before the cut), `numbers`
        with what all blocks share, `table@server.part` with tensors `ids` and `rows`, `table@server.numbers` and
        `table@server.counts` with what its rows share (the former with the names of what stands in the rows, too). They
        are unique over servers.
        Parts of tables come last: all before is taken while nothing is updated, a part while its table is not.
        """

    def restore(self, name: str, tensors: dict[str, Any]) -> None:
        """Take back one item of `state`, written by this or another number of servers; what is not here is left out."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """`shape` of a dense block; of a table (0, width)."""

    dtype: torch.dtype
    shape: torch.Size
    is_table: bool


def describe(storage: Storage) -> dict[str, BlockSpec]:
    """Return what each block looks like, in the storage's order."""
    out = {}
    for name in storage.blocks():
        try:
            value = storage.value(name)
        except PeerError:  # only dense blocks have a value
            rows = storage.rows(name, torch.empty(0, dtype=torch.int64), create=False)
            out[name] = BlockSpec(rows.dtype, rows.shape, is_table=True)
        else:
            out[name] = BlockSpec(value.dtype, value.shape, is_table=False)
    return out


class BlockLocks:
    """A lock for each block: held while it is updated, read or copied. Several are taken in one order.

    `held`: keeps away, while any lock is held, what updates and reads blocks without these locks.
    """

    def __init__(self, names: Sequence[str], *, held: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._locks = {name: threading.Lock() for name in sorted(names)}
        self._held = held

    @contextlib.contextmanager
    def of(self, names: Sequence[str]) -> Iterator[None]:
        """Hold the locks of these blocks."""
        locks = [self._locks[name] for name in sorted(set(names))]
        num_held = 0
        with self._held():
            try:
                for lock in locks:
                    lock.acquire()
                    num_held += 1
                yield
            finally:
                for lock in locks[:num_held]:
                    lock.release()

    @contextlib.contextmanager
    def all(self) -> Iterator[None]:
        """Hold every lock."""
        with self.of(list(self._locks)):
            yield
