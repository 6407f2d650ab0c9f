"""Blocks of feeds on their way to a device; on CPU, where they are copied in the same order."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.exec.card_feeds import CardFeeds, FeedBlock
from penstock.native.engine import TorchPlan

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.int64, torch.bool, torch.float16, torch.uint8]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=6), st.integers(0, 2**31))
def test_a_block_gives_what_was_sent_at_the_same_addresses(
    inputs: list[tuple[list[int], torch.dtype]], seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    steps = [[torch.randint(0, 2, shape, generator=random).to(dtype) for shape, dtype in inputs] for _ in range(4)]
    block = FeedBlock(steps[0], CPU)
    addresses = [tensor.data_ptr() for tensor in block.tensors]
    for tensors in steps:
        assert block.fits(tensors)
        sent = block.send(tensors)
        assert [tensor.data_ptr() for tensor in sent] == addresses
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(sent, tensors, strict=True))


def test_a_block_takes_other_shapes_and_strides_as_they_are() -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    block = FeedBlock([turned], CPU)
    assert torch.equal(block.send([turned])[0], turned)
    assert not block.fits([torch.ones(2, 3)])
    assert not block.fits([turned.double()])


def held_in(plan: TorchPlan, slot: int) -> torch.Tensor:
    tensor = plan.get(slot)
    assert tensor is not None
    return tensor


def plan_of(num_slots: int) -> TorchPlan:
    plan = TorchPlan(num_slots)
    for slot in range(num_slots):
        plan.keep(slot)
    plan.seal()
    return plan


def test_another_shape_makes_another_block() -> None:
    plan, feeds = plan_of(3), CardFeeds([[2, 0]], [CPU], vary=False)
    held = []
    for rows in (4, 4, 7):
        given_ids, given_x = torch.arange(rows), torch.full((rows, 2), float(rows))
        plan.set_all([0, 2], [given_ids, given_x])
        feeds.send(plan)
        held.append((held_in(plan, 0), held_in(plan, 2)))
        assert torch.equal(held[-1][0], given_ids)
        assert torch.equal(held[-1][1], given_x)
        assert held[-1][0].data_ptr() != given_ids.data_ptr()
    assert held[0][0].data_ptr() == held[1][0].data_ptr() != held[2][0].data_ptr()
    assert feeds.num_blocks == 2


def test_inputs_whose_rows_vary_travel_one_by_one() -> None:
    plan, feeds = plan_of(1), CardFeeds([[0]], [CPU], vary=True)
    for rows in (3, 1):
        plan.set_all([0], [torch.arange(rows)])
        feeds.send(plan)
        assert torch.equal(held_in(plan, 0), torch.arange(rows))
    assert feeds.num_blocks == 0
