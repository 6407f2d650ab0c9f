"""Duplicates found and summed, ids cut into parts of tables: against torch and plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import FeedError
from penstock.ps.rows import Table, are_within, parts_of, put_back, summed, unique

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.lists(INT64 | st.integers(0, 5) | st.integers(-3, 3), max_size=40)


@settings(deadline=None)
@given(IDS)
def test_unique_is_torchs(ids: list[int]) -> None:
    given = torch.tensor(ids, dtype=torch.int64)
    expected = torch.unique(given, return_inverse=True)
    assert [t.tolist() for t in unique(given)] == [t.tolist() for t in expected]


@settings(deadline=None)
@given(IDS, st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]))
def test_sums_are_in_order_of_appearance_to_the_bit(ids: list[int], dtype: torch.dtype) -> None:
    rows = torch.tensor(ids, dtype=torch.int64)
    values = (torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(len(ids))) * 9).to(dtype)
    different, sums = summed(rows, values)
    for row, total in zip(different.tolist(), sums, strict=True):
        one_by_one = torch.zeros(3, dtype=dtype)
        for value in values[rows == row]:
            one_by_one += value
        if dtype in (torch.float16, torch.bfloat16):  # torch adds these in float32, and rounds once or oftener
            torch.testing.assert_close(total, one_by_one, rtol=0.05, atol=0.5)
        else:
            assert torch.equal(total, one_by_one)
    assert different.tolist() == sorted(set(ids))


def test_sums_are_memory_of_their_own() -> None:
    values = torch.ones(2, 1)
    _, sums = summed(torch.tensor([0, 1]), values)
    values.fill_(7)
    assert sums.tolist() == [[1], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_rows_are_put_back_for_every_id(dtype: torch.dtype) -> None:
    rows = torch.arange(6).reshape(3, 2).to(dtype)
    inverse = torch.tensor([2, 0, 0, 1])
    out = torch.empty(4, 2, dtype=dtype)
    put_back(rows, inverse, out)
    assert torch.equal(out, rows[inverse])


def test_ranges_number_rows_from_their_first_and_keep_empty_ones() -> None:
    table = Table.of("t", ["a", "b", "c"], [1, 0, 1], [4, 2, 3])
    parts = parts_of(table, torch.tensor([0, 3, 6, 8]))
    assert [(p.index, p.rows.tolist()) for p in parts] == [(0, [0, 3]), (1, []), (2, [0, 2])]


@settings(deadline=None)
@given(st.lists(INT64, unique=True, max_size=50), st.integers(1, 5))
def test_each_hashed_id_has_one_part_that_depends_on_it_alone(ids: list[int], num: int) -> None:
    table = Table.of("t", ["t"], list(range(num)), [])
    given = torch.tensor(sorted(ids), dtype=torch.int64)
    parts = parts_of(table, given)
    assert [p.index for p in parts] == list(range(num))
    assert sorted(i for p in parts for i in p.rows.tolist()) == sorted(ids)
    for part in parts:
        assert torch.equal(given[part.positions], part.rows)
        alone = parts_of(table, part.rows)
        assert torch.equal(alone[part.index].rows, part.rows)


@pytest.mark.parametrize("wrong", [-1, 9, 2**62])
def test_a_row_past_the_ranges_is_named(wrong: int) -> None:
    table = Table.of("t", ["a", "b"], [0, 1], [4, 5])
    with pytest.raises(FeedError, match=f"id {wrong} is no row of the table 't', which has 9"):
        parts_of(table, torch.tensor(sorted([1, wrong])))


@pytest.mark.parametrize("wrong", [-1, 7, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_row_outside_is_found_wherever_it_is(wrong: int, at: int) -> None:
    rows = torch.arange(1000) % 7
    assert are_within(rows, 7)
    assert are_within(rows[:0], 0)
    rows[at] = wrong
    assert not are_within(rows, 7)
