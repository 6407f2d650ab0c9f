"""Whole numbers as arithmetic sequences: a column 7, 9, 11, 4 is stored as (first, step, number) 7, 2, 3, 4, 0, 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def packed(values: Iterable[int]) -> list[int]:
    """Return (first, step, number) of each run, one after another; greedy from the front."""
    return packed_rows((value,) for value in values)


def unpacked(flat: Sequence[int]) -> list[int]:
    """Return the values that `packed` was given."""
    return [value for (value,) in unpacked_rows(flat, 1)]


def packed_rows(rows: Iterable[Sequence[int]]) -> list[int]:
    """The same for rows of several numbers: of each run the first row, the steps of its numbers, and how many rows."""
    flat: list[int] = []
    first: tuple[int, ...] = ()
    steps: tuple[int, ...] | None = None
    last: tuple[int, ...] = ()
    number = 0
    for row in map(tuple, rows):
        difference = tuple(now - before for now, before in zip(row, last, strict=False))
        if number and (steps is None or difference == steps):
            steps, number = difference, number + 1
        else:
            flat += _run(first, steps, number)
            first, steps, number = row, None, 1
        last = row
    return flat + _run(first, steps, number)


def _run(first: Sequence[int], steps: Sequence[int] | None, number: int) -> list[int]:
    return [*first, *(steps or [0] * len(first)), number] if number else []


def unpacked_rows(flat: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    """Return the rows that `packed_rows` was given, each of `width` numbers."""
    size = 2 * width + 1
    for at in range(0, len(flat), size):
        first, steps, number = flat[at : at + width], flat[at + width : at + 2 * width], flat[at + size - 1]
        for n in range(number):
            yield tuple(value + n * step for value, step in zip(first, steps, strict=True))
