"""A sparse table: rows of floats by int64 id, made on first touch, with the optimizer's state beside them.

Any int64 is an id; `capacity` bounds how many different ones have rows. A row begins with values that are a function
of (seed, id) alone, so it does not matter which trainer touches it first. Duplicate ids of a push are summed in
order of appearance, and each row is updated once. float32. Thread-safe: calls interleave by shard. C++: src/table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import SpecError, UserError
from penstock.native import _table
from penstock.protocol.tables import MOST_HOT, TableSums

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

_ROWS_A_SHARD = 65_536  # smaller tables have fewer shards: each begins with two pieces of 32 KiB
_MAX_SHARDS = 64
_MAX_SIGHTINGS = 255
_IDS_A_THREAD = 8192  # some 0.3 ms of updates, against 0.05 ms for starting a thread


class TableFull(UserError):
    """More different ids than the table's capacity (dict_size)."""


@dataclass(frozen=True, slots=True)
class FirstValues:
    """What a new row holds: constant `a`; uniform in [a, b); normal with mean `a` and standard deviation `b`, or the
    same cut off at two standard deviations.
    """

    kind: Literal["constant", "uniform", "normal", "truncated_normal"] = "constant"
    a: float = 0.0
    b: float = 0.0


@dataclass(frozen=True, slots=True)
class TableSettings:
    """`states`: name -> first value of each state that the optimizer keeps beside a value, in the rule's order.

    `padding_idx`: an id whose row reads as zeros and is never updated. `keeps_last_use`: needed by `expire`; 4 bytes
    a row. `admit_after`: the push of an id, counting from 1, that makes its row; until then it reads first values and
    its gradients are dropped. 0: the first touch makes it, be it a pull. Counts are approximate in bounded memory
    (8 MiB): an id may be admitted early if it shares its counters with others, and all counts fade in time (C++:
    table/sketch.h).
    """

    name: str
    width: int
    capacity: int
    first_values: FirstValues = FirstValues()
    states: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    padding_idx: int | None = None
    keeps_last_use: bool = False
    admit_after: int = 0


class SparseTable:
    """One table, or one server's part of it."""

    def __init__(self, settings: TableSettings) -> None:
        if settings.width < 1 or settings.capacity < 1:
            raise SpecError(
                f"table {settings.name!r} has rows of {settings.width} values for {settings.capacity} ids; "
                "both have to be at least 1",
                variable=settings.name,
            )
        if not 0 <= settings.admit_after <= _MAX_SIGHTINGS:
            raise SpecError(
                f"table {settings.name!r} admits ids after {settings.admit_after} pushes; they are counted up to "
                f"{_MAX_SIGHTINGS}",
                variable=settings.name,
            )
        self.settings = settings
        shards = min(_MAX_SHARDS, 1 << int(math.log2(max(1, settings.capacity // _ROWS_A_SHARD))))
        first = settings.first_values
        self._table = _table.Table(
            width=settings.width, first_states=list(settings.states.values()), first=first.kind, a=first.a, b=first.b,
            seed=settings.seed, capacity=settings.capacity, num_shards=shards, keeps_last_use=settings.keeps_last_use,
            admit_after=settings.admit_after,
        )  # fmt: skip

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._table)

    @property
    def overhead_bytes(self) -> int:
        """Bytes beyond the rows' own values and states: index, pieces not full."""
        rows = len(self) * self.settings.width * (1 + len(self.settings.states)) * 4
        return int(self._table.index_bytes + self._table.row_bytes) - rows

    @property
    def held_bytes(self) -> int:
        """Bytes that rows and index have taken from the system, memory that waits for more rows included."""
        return int(self._table.held_bytes)

    def sums(self, most_hot: int = MOST_HOT) -> TableSums:
        """Return what the table holds, what was asked of it, and the ids that are pushed most. Microseconds."""
        pulled, absent, pushed = self._table.traffic
        hot, sampled, missed = self._table.hot(most_hot)
        return TableSums(
            name=self.settings.name, width=self.settings.width, capacity=self.settings.capacity, rows=len(self),
            held_bytes=self.held_bytes, pulled=pulled, absent=absent, pushed=pushed, sampled=sampled, missed=missed,
            hot=tuple(hot),
        )  # fmt: skip

    def pull(self, ids: Ids, *, create: bool = True, now: int = 0, out: Floats | None = None) -> Floats:
        """Return float32[n, width]. `create`: give missing ids rows, else read what they would begin with.

        `out`: where to write, C-contiguous; fresh memory costs a page fault for each 4 KiB. Raises TableFull; rows made
        before it stay.
        """
        if out is None:
            out = np.empty((len(ids), self.settings.width), np.float32)
        self._guarded(self._table.pull, ids, out, create, now)
        if self.settings.padding_idx is not None:
            out[ids == self.settings.padding_idx] = 0.0
        return out

    def push_sgd(self, ids: Ids, gradients: Floats, *, lr: float, now: int = 0, threads: int = 1) -> None:
        """p -= lr g. `threads`: how many update the rows of this call at most; the result is the same."""
        self._guarded(self._table.push_sgd, *self._live(ids, gradients), now, _useful(threads, ids), lr)

    def push_adagrad(
        self, ids: Ids, gradients: Floats, *, lr: float, epsilon: float = 1e-6, now: int = 0, threads: int = 1
    ) -> None:
        """s += g g; p -= lr g / (sqrt(s) + epsilon). States: one."""
        live = self._live(ids, gradients)
        self._guarded(self._table.push_adagrad, *live, now, _useful(threads, ids), lr, epsilon)

    def push_adam(
        self, ids: Ids, gradients: Floats, *, lr: float, step: int, beta1: float = 0.9, beta2: float = 0.999,
        epsilon: float = 1e-8, now: int = 0, threads: int = 1,
    ) -> None:  # fmt: skip
        """Lazy Adam, as `penstock.sparse_adam_`; `step` counts from 1. States: two."""
        rate = lr * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        live = self._live(ids, gradients)
        self._guarded(self._table.push_adam, *live, now, _useful(threads, ids), rate, beta1, beta2, epsilon)

    def update(self, ids: Ids, gradients: Floats, rule: Callable[[Floats, Floats], None], *, now: int = 0) -> None:
        """Merge duplicates, then call `rule(rows, gradients)` with float32[m, width * (1 + states)] to change in place.

        For any optimizer; other pushes of the same ids must not run at the same time.
        """
        ids, gradients = self._live(ids, gradients)
        self._table.note_push(ids)
        unique, inverse = np.unique(ids, return_inverse=True)
        summed = np.zeros((len(unique), self.settings.width), np.float32)
        np.add.at(summed, inverse, gradients)
        if self.settings.admit_after > 0:
            admitted = self._table.admit(unique)
            unique, summed = unique[admitted], summed[admitted]
        rows = self._guarded(self._table.gather, unique, now)
        rule(rows, summed)
        self._table.scatter(unique, rows, now)

    def check_room(self, ids: Ids) -> None:
        """Raise TableFull if a push of these ids would make more rows than there is room for. Nothing changes.

        Exact while no other thread touches the table. A walk over the index, but free where there is room for every id.
        """
        room = self.settings.capacity - len(self)
        if len(ids) <= room:
            return
        live = ids if self.settings.padding_idx is None else ids[ids != self.settings.padding_idx]
        needed = self._table.rows_to_make(live)
        if needed > room:
            raise self._full(
                f"the table is full: an update needs {needed} new rows, but {len(self)} of {self.settings.capacity} "
                "are taken"
            )

    def expire(self, oldest: int) -> int:
        """Drop the rows last used before `oldest`; return how many. Raises SpecError without `keeps_last_use`."""
        if not self.settings.keeps_last_use:
            raise SpecError(
                f"table {self.settings.name!r} does not keep when its rows were last used; set keeps_last_use=True",
                variable=self.settings.name,
            )
        return self._table.expire(oldest)

    def counts(self) -> npt.NDArray[np.uint8]:
        """Return how often ids without a row were pushed, as `restore_counts` takes it; nothing without admission."""
        return self._table.copy_counts()

    def restore_counts(self, counts: npt.NDArray[np.uint8]) -> bool:
        """Take `counts` back; return whether they are of a table with as many shards, for others cannot be taken."""
        return self._table.restore_counts(counts)

    def snapshot(self) -> Iterator[tuple[Ids, Floats]]:
        """Yield (ids, whole rows) part by part; each part is consistent, and the others are served meanwhile."""
        for shard in range(self._table.num_shards):
            yield self._table.copy_shard(shard)

    def restore(self, ids: Ids, rows: Floats, *, now: int = 0) -> None:
        """Put rows of a snapshot back, whichever table had them: float32[n, width * (1 + states)]. Raises TableFull."""
        self._guarded(self._table.scatter, ids, rows, now)

    def _live(self, ids: Ids, values: Floats) -> tuple[Ids, Floats]:
        if self.settings.padding_idx is None:
            return ids, values
        live = ids != self.settings.padding_idx
        return ids[live], values[live]

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except _table.CapacityError as error:
            raise self._full(str(error)) from error

    def _full(self, what: str) -> TableFull:
        return TableFull(
            f"table {self.settings.name!r}: {what}. Its capacity is dict_size, or a server's share of it: make that at "
            "least the number of different ids in the data",
            variable=self.settings.name,
        )


def _useful(threads: int, ids: Ids) -> int:
    """Return how many threads pay for being started: one for each `_IDS_A_THREAD`."""
    return max(1, min(threads, len(ids) // _IDS_A_THREAD))
