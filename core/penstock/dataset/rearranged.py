"""Samples in memory whose slots come from several: slots that are shuffled on their own, lines of one id as one sample.

Both are picks: of each slot, the row that each new sample takes. Twice the memory of the samples is needed.
Source: MultiSlotDataset::SlotsShuffle and MergeByInsId of Fluid 1.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.dataset.slots import Slot
from penstock.errors import SpecError
from penstock.native import _feed

Rows = npt.NDArray[np.int64]
Column: TypeAlias = "tuple[_feed.Values, npt.NDArray[np.int64] | None]"


def with_slots_shuffled(store: _feed.Store, slots: Sequence[Slot], names: Sequence[str], seed: int) -> _feed.Store:
    """Return the samples with the values of the slots `names` from another sample each, the same one for all of them.

    Which one follows from `seed`. Raises SpecError for a name that is no slot.
    """
    known = [slot.name for slot in slots]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SpecError(
            f"slots_shuffle is given {unknown[0]!r}, which is no slot; the slots are {known}", got=unknown[0]
        )
    same = np.arange(len(store))
    other = np.random.default_rng(seed).permutation(len(store))
    return _picked(_columns(store, slots), slots, [other if name in names else same for name in known])


def merged(store: _feed.Store, slots: Sequence[Slot], merge_size: int) -> tuple[_feed.Store, int]:
    """Return one sample for each value of the first slot, in ascending order, and the number of samples left out.

    A sample takes each slot from the line that has values other than 0. Where several have, a slot of fixed sizes takes
    the last one's; if it is a slot of any number of values, the lines of the id are left out, as are those of an id
    that has not `merge_size` lines (0: any number).
    """
    columns = _columns(store, slots)
    keys = np.asarray(columns[0][0], np.int64)
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=keys[order[0]] - 1)) if len(order) else order
    sizes = np.diff(begins, append=len(order))
    kept = np.ones(len(begins), np.bool_) if merge_size == 0 else sizes == merge_size
    picks: list[Rows] = []
    for slot, column in zip(slots, columns, strict=True):
        place = np.where(_has_values(slot, column, len(order))[order], np.arange(len(order)), -1)
        if not slot.width:
            kept &= np.add.reduceat(place >= 0, begins, dtype=np.int64) <= 1
        last = np.maximum.reduceat(place, begins) if len(begins) else begins
        picks.append(order[np.where(last < 0, begins, last)])
    return _picked(columns, slots, [rows[kept] for rows in picks]), int(sizes[~kept].sum())


def _has_values(slot: Slot, column: Column, num_rows: int) -> npt.NDArray[np.bool_]:
    values, lengths = column
    owner = np.repeat(np.arange(num_rows), slot.width if lengths is None else lengths)
    return np.bincount(owner, weights=np.abs(values) >= (1e-6 if slot.is_float else 1), minlength=num_rows) > 0


def _columns(store: _feed.Store, slots: Sequence[Slot]) -> list[Column]:
    batch = store.gather(0, len(store))
    return [
        (batch.values(i, slot.width, slot.is_float).reshape(-1), None if slot.width else batch.lengths(i))
        for i, slot in enumerate(slots)
    ]


def _picked(columns: Sequence[Column], slots: Sequence[Slot], picks: Sequence[Rows]) -> _feed.Store:
    native = [slot.native for slot in slots]
    chunk, store = _feed.Chunk(slots=native, skips_bad_lines=False), _feed.Store(native)
    taken = [_taken(slot, *column, rows) for slot, column, rows in zip(slots, columns, picks, strict=True)]
    chunk.extend(taken, len(picks[0]))
    store.add(chunk)
    return store


def _taken(slot: Slot, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64] | None, rows: Rows) -> Column:
    if lengths is None:
        dense = np.ascontiguousarray(values.reshape(-1, slot.width)[rows]).reshape(-1)
        return dense, None
    new = lengths[rows]
    begins = np.cumsum(lengths) - lengths
    places = np.repeat(begins[rows] - (np.cumsum(new) - new), new) + np.arange(int(new.sum()))
    ragged = np.ascontiguousarray(values[places])
    return ragged, np.ascontiguousarray(new)
