"""Columns of whole numbers as arithmetic sequences: what comes back is what was stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.runs import packed, packed_rows, unpacked, unpacked_rows

NUMBERS = st.integers(-5, 1 << 20)


@given(st.lists(NUMBERS | st.integers(0, 2)))
def test_values_come_back(values: list[int]) -> None:
    assert unpacked(packed(values)) == values


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 2))))
def test_rows_come_back(rows: list[tuple[int, int]]) -> None:
    assert list(unpacked_rows(packed_rows(rows), 2)) == rows


def test_a_sequence_is_three_numbers() -> None:
    assert packed(range(7, 7 + 3 * 100, 3)) == [7, 3, 100]
    assert packed([4] * 9) == [4, 0, 9]
    assert packed_rows((a, 5) for a in range(10)) == [0, 5, 1, 0, 10]
