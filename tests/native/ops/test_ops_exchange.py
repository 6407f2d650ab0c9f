"""Sums over replicas: the list order decides the bits, whoever owns the result."""

from __future__ import annotations

import functools
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import typed_ops as ops
from torch import Tensor


@st.composite
def replica_tensors(draw: st.DrawFn) -> list[Tensor]:
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64]))
    shape = draw(st.sampled_from([[], [0], [1], [3, 5], [4097], [70, 61]]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    count = draw(st.integers(1, 5))
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * 1000).to(dtype) for _ in range(count)]


def _list_order_sum(tensors: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


@settings(max_examples=60, deadline=None)
@given(replica_tensors())
def test_all_reduce_gives_all_replicas_the_sum_in_list_order(tensors: list[Tensor]) -> None:
    expected = _list_order_sum([tensor.clone() for tensor in tensors])
    ops.all_reduce_(tensors)
    for tensor in tensors:
        assert torch.equal(tensor, expected)


@settings(max_examples=60, deadline=None)
@given(replica_tensors(), st.integers(0, 4))
def test_reduce_gives_only_the_owner_the_sum_in_list_order(tensors: list[Tensor], owner: int) -> None:
    owner %= len(tensors)
    before = [tensor.clone() for tensor in tensors]
    ops.reduce_(tensors, owner)
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, _list_order_sum(before) if number == owner else before[number])


def test_additions_follow_the_list_order_whatever_the_owner() -> None:
    values = [1e8, 1.0, -1e8, 1.0]  # ((1e8 + 1) - 1e8) + 1 = 1 in float32
    for owner in range(4):
        tensors = [torch.full((5000,), value) for value in values]
        ops.reduce_(tensors, owner)
        assert tensors[owner].eq(1.0).all()


def test_replicas_of_equal_strides_are_added_without_a_copy() -> None:
    tensors = [torch.randn(6, 4).t() for _ in range(2)]
    expected = tensors[0] + tensors[1]
    ops.all_reduce_(tensors)
    assert torch.equal(tensors[0], expected)
    assert torch.equal(tensors[1], expected)


@settings(max_examples=60, deadline=None)
@given(replica_tensors(), st.integers(1, 5), st.randoms())
def test_the_parts_of_an_exchange_give_its_bits_in_any_order(tensors: list[Tensor], count: int, random: Random) -> None:
    wanted, single = [t.clone() for t in tensors], [t.clone() for t in tensors]
    ops.all_reduce_(wanted)
    order = list(range(count))
    random.shuffle(order)
    for part in order:
        torch.ops.penstock.all_reduce_.part(tensors, part, count)
        torch.ops.penstock.reduce_.part(single, 0, part, count)
    assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
    assert torch.equal(single[0], wanted[0])


def test_a_part_leaves_the_others_alone() -> None:
    tensors = [torch.ones(1000), torch.ones(1000)]
    torch.ops.penstock.all_reduce_.part(tensors, 1, 2)
    begin = int((tensors[0] == 1).sum())
    assert 0 < begin < 1000
    for tensor in tensors:
        assert tensor[:begin].eq(1).all()
        assert tensor[begin:].eq(2).all()
    with pytest.raises(IndexError, match="part is 2; expected one of 2, from 0"):
        torch.ops.penstock.all_reduce_.part(tensors, 2, 2)


def test_all_reduce_gives_the_same_bits_with_one_and_two_threads() -> None:
    source = [torch.randn(300_000) for _ in range(3)]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        tensors = [tensor.clone() for tensor in source]
        ops.all_reduce_(tensors)
        results.append(tensors[0])
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_broadcast_copies_to_every_destination(dtype: torch.dtype) -> None:
    source = (torch.randn(70_001) > 0).to(dtype)
    destinations = [torch.zeros_like(source), source, torch.zeros_like(source)]
    ops.broadcast_(destinations, source.clone())
    ops.broadcast_(destinations, source)
    for destination in destinations:
        assert torch.equal(destination, source)
