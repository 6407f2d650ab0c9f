"""LoDTensor: the rows of sequences one after another, with the lengths of the sequences, level by level.

What a ragged input is fed, and what is fetched with return_numpy=False; of a variable that is not ragged, without
lengths. Lengths are kept outermost level first: those of one level say how many sequences of the next one belong
together, the last ones how many rows.
Source: LoDTensor and fluid.create_lod_tensor of Fluid 1.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import UserError

Lengths = list[list[int]]


class LoDTensor:
    """Rows and lengths. `rows`: an array or tensor [T, …]; `lengths`: of each level, outermost first; none: no LoD."""

    def __init__(self, rows: Any = None, lengths: Sequence[Any] = ()) -> None:
        self._rows: Any = np.empty((0,), np.float32) if rows is None else rows
        self._has_rows = rows is not None
        self._lengths = [np.asarray(level, np.int64).reshape(-1) for level in lengths]
        self._on: object = None

    def set(self, array: Any, place: object = None) -> None:
        """Take a copy of the rows. `place` is noted, no more: executors move what they are fed."""
        self._rows = array.detach().clone() if isinstance(array, torch.Tensor) else np.array(array, order="C")
        self._has_rows = True
        self.set_place(place)

    def copied(self) -> LoDTensor:
        """Return a copy on memory of its own."""
        made = LoDTensor(None, [level.copy() for level in self._lengths])
        made.set(self._rows, self._on)
        return made

    def set_place(self, place: object) -> None:
        """Note for which place it is made."""
        self._on = place

    def _place(self) -> object:
        """Return the place that was noted; None: none was."""
        return self._on

    def set_recursive_sequence_lengths(self, recursive_sequence_lengths: Sequence[Sequence[int]]) -> None:
        """Take the lengths of each level, before or after the rows. Raises UserError if they do not add up."""
        lengths = [np.array(level, np.int64).reshape(-1) for level in recursive_sequence_lengths]
        if not _add_up(lengths, len(self._rows) if self._has_rows or not lengths else int(lengths[-1].sum())):
            raise UserError(
                f"the lengths {[level.tolist() for level in lengths]} do not add up: each level's sum is the number of "
                f"sequences of the next one, and the last one's the number of rows, {len(self._rows)}"
            )
        self._lengths = lengths

    def set_lod(self, lod: Sequence[Sequence[int]]) -> None:
        """Take the offsets of each level: [0, 2, 3] for lengths 2 and 1. Raises UserError."""
        if any(len(level) == 0 or level[0] != 0 for level in lod):
            raise UserError(f"the LoD {list(lod)} has a level that does not begin with 0")
        self.set_recursive_sequence_lengths([np.diff(np.asarray(level, np.int64)).tolist() for level in lod])

    def recursive_sequence_lengths(self) -> Lengths:
        """Return the lengths of each level, outermost first."""
        return [level.tolist() for level in self._lengths]

    def lod(self) -> Lengths:
        """Return the offsets of each level, outermost first."""
        return [[0, *np.cumsum(level).tolist()] for level in self._lengths]

    def has_valid_recursive_sequence_lengths(self) -> bool:
        """Whether the lengths add up to the rows."""
        return _add_up(self._lengths, len(self._rows))

    def shape(self) -> list[int]:
        """Return the sizes of all rows together."""
        return list(self._rows.shape)

    def _dtype(self) -> torch.dtype:
        """Return the dtype of the rows: one of fluid.core.VarDesc.VarType."""
        rows: torch.Tensor = torch.as_tensor(self._rows)
        return rows.dtype

    _get_dims = shape  # Fluid's name, which scripts that make arrays of the same sizes use

    def _is_initialized(self) -> bool:
        """Whether it has rows: what is fetched always has."""
        return self._has_rows

    @property
    def rows(self) -> Any:
        """The rows: an array, or a tensor if one was given."""
        return self._rows

    @property
    def lengths(self) -> list[np.ndarray]:
        """The lengths of each level, int64, outermost first."""
        return self._lengths

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        rows = self._rows.numpy() if isinstance(self._rows, torch.Tensor) else self._rows
        return np.array(rows, dtype=dtype, copy=copy)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"LoDTensor(shape={self.shape()}, recursive_sequence_lengths={self.recursive_sequence_lengths()})"


def _add_up(lengths: Sequence[np.ndarray], num_rows: int) -> bool:
    parts = [*(len(level) for level in lengths[1:]), num_rows]
    return all(
        int(level.sum()) == below and bool((level >= 0).all()) for level, below in zip(lengths, parts, strict=False)
    )


class LoDTensorArray(list[LoDTensor]):
    """A list of LoDTensors, such as a batch that is pushed into the queue of a reader."""


def create_lod_tensor(data: Any, recursive_seq_lens: Sequence[Sequence[int]], place: object = None) -> LoDTensor:
    """Return rows with lengths. `data`: an array or tensor of all rows, a LoDTensor, or a list of sequences of numbers.

    The numbers of a list become rows [T, 1]. Raises UserError for lengths that do not add up.
    """
    made = LoDTensor()
    if isinstance(data, list):
        found = [len(sequence) for sequence in data]
        if [found] != [list(level) for level in recursive_seq_lens]:
            raise UserError(
                f"create_lod_tensor: the sequences have the lengths {[found]}, but recursive_seq_lens is "
                f"{[list(level) for level in recursive_seq_lens]}"
            )
        own = [np.asarray(sequence) for sequence in data if len(sequence)]
        data = np.concatenate(own).reshape(sum(found), -1) if own else np.empty((0, 1), np.int64)
    made.set(data.rows if isinstance(data, LoDTensor) else data, place)
    made.set_recursive_sequence_lengths(recursive_seq_lens)
    return made


def create_random_int_lodtensor(
    recursive_seq_lens: Sequence[Sequence[int]], base_shape: Sequence[int], place: object, low: int, high: int
) -> LoDTensor:
    """Return rows [T, *base_shape] of int64 between `low` and `high`, both included, drawn by NumPy's generator."""
    rows = np.random.randint(low, high + 1, [int(sum(recursive_seq_lens[-1])), *base_shape], np.int64)
    return create_lod_tensor(rows, recursive_seq_lens, place)


def of_sequences(sequences: Sequence[Any], num_levels: int, row_shape: Sequence[int], dtype: Any) -> LoDTensor:
    """Return the LoDTensor of nested sequences: of one level a list of sequences of rows.

    Raises ValueError for rows that are not numbers of `row_shape`.
    """
    lengths: list[list[int]] = []
    for _ in range(num_levels):
        lengths.append([len(one) for one in sequences])
        sequences = [part for one in sequences for part in one]
    rows = np.asarray(sequences, dtype=dtype).reshape(len(sequences), *row_shape)
    return LoDTensor(rows, lengths)
