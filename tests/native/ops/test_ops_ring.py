"""Exchanges through shared memory, between threads that stand for processes: each opens the memory by itself."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.distributed.shared_ring import SLOT_BYTES
from penstock.native import ops as _registered  # noqa: F401 - registers the operators

OPS: Any = torch.ops.penstock
BOUND_S = 60.0  # of what takes milliseconds
_numbers = itertools.count()
SMALL_SLOT = 1024  # bytes: so that little data takes many turns of the four slots


class Ranks:
    """So many ranks of one ring."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def each(self, call: Callable[[int, str], Any]) -> list[Any]:
        """Call `call(rank, ring)` for all ranks at once; return the results, or what was raised."""
        results: list[Any] = [None] * len(self.names)

        def run(rank: int) -> None:
            try:
                results[rank] = call(rank, self.names[rank])
            except Exception as error:  # noqa: BLE001 - the test looks at it
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.names))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive(), "an exchange hangs"
        return results

    def step(self, rows: list[int] | None = None) -> Tensor:
        """Return what ranks with these rows have said of a step."""
        said = rows or [1] * len(self.names)
        return torch.tensor([[n, 0, 7] for n in said])


@contextmanager
def opened(count: int, slot_bytes: int = SMALL_SLOT) -> Iterator[Ranks]:
    """Open a ring of `count` ranks."""
    label = f"test {next(_numbers)}"
    names = [f"{label} rank {rank}" for rank in range(count)]
    descriptor = os.memfd_create("ring")
    try:
        os.truncate(descriptor, OPS.ring_size_bytes(count, slot_bytes))
        for rank, name in enumerate(names):
            OPS.ring_open(name, descriptor, rank, count, slot_bytes)
        yield Ranks(names)
    finally:
        os.close(descriptor)
        for name in names:
            OPS.ring_close(name)


def sum_up(tensors: list[list[Tensor]], replicas: int, step: Tensor, rank: int, ring: str, mean: bool = False) -> None:
    OPS.ring_all_reduce_(tensors[rank], replicas, step, mean, ring)


def drawn(dtype: torch.dtype, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 1000).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 4),
    replicas=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64]),
    sizes=st.lists(st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 1000, 5003]), min_size=1, max_size=4),
    times=st.integers(1, 3),
    slot_bytes=st.sampled_from([512, SMALL_SLOT, SLOT_BYTES]),
)
def test_all_ranks_have_the_bits_of_the_sum_in_rank_order(
    count: int, replicas: int, dtype: torch.dtype, sizes: list[int], times: int, slot_bytes: int
) -> None:
    with opened(count, slot_bytes) as ranks:
        step = ranks.step()
        for time in range(times):
            given = [
                [[drawn(dtype, size, 1000 * time + 100 * rank + 10 * piece + r) for r in range(replicas)]
                 for piece, size in enumerate(sizes)]
                for rank in range(count)
            ]  # fmt: skip
            tensors = [[t.clone() for piece in mine for t in piece] for mine in given]
            assert ranks.each(partial(sum_up, tensors, replicas, step)) == [None] * count
            for piece in range(len(sizes)):
                sums = [functools.reduce(torch.add, given[rank][piece]) for rank in range(count)]
                wanted = functools.reduce(torch.add, sums)
                for mine in tensors:
                    for tensor in mine[piece * replicas : (piece + 1) * replicas]:
                        assert torch.equal(tensor, wanted)


def in_shared_memory(tensor: Tensor) -> Tensor:
    """Copy a tensor to where an executor's gradients lie, with something before it."""
    memory = OPS.ring_memory(64 + max(tensor.nbytes, 64))
    placed: Tensor = memory[64 : 64 + tensor.nbytes].view(tensor.dtype)
    return placed.copy_(tensor)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    sizes=st.lists(st.sampled_from([1, 17, 5003, 40_000, 300_001]), min_size=1, max_size=3),
    rows=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    mean=st.booleans(),
)
def test_large_sums_in_shared_memory_equal_those_through_slots(
    count: int, dtype: torch.dtype, sizes: list[int], rows: list[int], mean: bool
) -> None:
    sizes = [*sizes, 35_000]  # large enough by itself
    with opened(count, SLOT_BYTES) as ranks:
        step = ranks.step([rows[0] + 1, *rows[1:count]])
        given = [[drawn(dtype, n, 10 * rank + i) for i, n in enumerate(sizes)] for rank in range(count)]
        plain = [[t.clone() for t in mine] for mine in given]
        shared = [[in_shared_memory(t) for t in mine] for mine in given]
        for tensors, expected in ((plain, 0), (shared, 1)):
            assert ranks.each(partial(sum_up, tensors, 1, step, mean=mean)) == [None] * count
            assert [OPS.ring_num_in_place(name) for name in ranks.names] == [expected] * count
        for mine, others in zip(plain, shared, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def test_what_one_rank_has_elsewhere_is_summed_through_slots() -> None:
    with opened(3) as ranks:
        tensors = [[in_shared_memory(torch.full((50_000,), float(rank)))] for rank in range(2)]
        tensors.append([torch.full((50_000,), 2.0)])
        for _ in range(2):
            assert ranks.each(partial(sum_up, tensors, 1, ranks.step())) == [None] * 3
        assert all(tensor.eq(9.0).all() for (tensor,) in tensors)
        assert OPS.ring_num_in_place(ranks.names[0]) == 0


def test_memory_remapped_at_the_same_address_is_distinguished() -> None:
    with opened(2) as ranks:
        for time in range(12):  # more than a ring keeps mapped
            tensors = [[in_shared_memory(torch.full((50_000,), float(rank + time)))] for rank in range(2)]
            assert ranks.each(partial(sum_up, tensors, 1, ranks.step())) == [None] * 2
            assert all(tensor.eq(2.0 * time + 1).all() for (tensor,) in tensors)
        assert OPS.ring_num_in_place(ranks.names[1]) == 12


def test_sums_beyond_what_caches_hold_are_made_in_place_too() -> None:
    with opened(2) as ranks:
        tensors = [[in_shared_memory(torch.full((5 << 20,), float(rank + 1)))] for rank in range(2)]
        assert ranks.each(partial(sum_up, tensors, 1, ranks.step())) == [None] * 2
        assert all(tensor.eq(3.0).all() for (tensor,) in tensors)


def test_shared_memory_is_given_back_with_its_last_tensor() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("penstock-arena")

    before = mapped()
    tensor = in_shared_memory(torch.ones(10))
    view = tensor[:5]
    del tensor
    assert mapped() == before + 1
    assert view.eq(1).all()
    del view
    assert mapped() == before
    with pytest.raises(RuntimeError, match="KiB of shared memory for gradients: this machine has"):
        OPS.ring_memory(1 << 60)


def test_a_mean_weighs_ranks_by_rows_and_ignores_empty_ones() -> None:
    with opened(3) as ranks:
        step = ranks.step([6, 0, 2])
        tensors = [torch.full((3000,), v, dtype=torch.float64) for v in (1.0, float("nan"), 5.0)]
        ranks.each(lambda rank, ring: OPS.ring_all_reduce_([tensors[rank]], 1, step, True, ring))
        for tensor in tensors:
            assert tensor.eq(6 / 8 * 1.0 + 2 / 8 * 5.0).all()


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 4), rows=st.lists(st.integers(0, 90), min_size=4, max_size=4), width=st.integers(1, 20))
def test_rows_of_all_ranks_come_in_the_order_of_the_ranks(count: int, rows: list[int], width: int) -> None:
    with opened(count) as ranks:
        step = ranks.step()
        indices = [torch.arange(n) + 1000 * r for r, n in enumerate(rows[:count])]
        values = [drawn(torch.float32, n * width, r).view(n, width) for r, n in enumerate(rows[:count])]
        found = ranks.each(lambda rank, ring: OPS.ring_gather(indices[rank], values[rank], step, False, ring))
        for all_rows, all_values in found:
            assert torch.equal(all_rows, torch.cat(indices))
            assert torch.equal(all_values, torch.cat(values))


def test_calls_of_all_kinds_interleave_over_many_slot_rounds() -> None:
    def run(rank: int, ring: str) -> list[list[float]]:
        found, step = [], torch.tensor([[1, 0, 7]] * 3)
        for time in range(200):
            tensor = torch.full((1 + 131 * (time % 7),), float(rank + time))
            OPS.ring_all_reduce_([tensor], 1, step, False, ring)
            met = OPS.ring_meet(torch.tensor([time, rank]), ring)
            rows, _ = OPS.ring_gather(torch.full((rank,), time), torch.ones(rank, 3), step, False, ring)
            sent = torch.full((100 * (time % 5),), float(time if rank == 0 else -1))
            OPS.ring_broadcast_([sent], 0, ring)
            assert met.tolist() == [[time, 0], [time, 1], [time, 2]]
            assert rows.tolist() == [time] * 3
            assert sent.eq(time).all()
            found.append([*set(tensor.tolist())])
        return found

    with opened(3) as ranks:
        for found in ranks.each(run):
            assert found == [[3.0 * time + 3] for time in range(200)]


def reduce(size: int, ring: str) -> None:
    OPS.ring_all_reduce_([torch.ones(size, dtype=torch.float64)], 1, torch.tensor([[1, 0, 7]] * 2), False, ring)


def gather(width: int, ring: str) -> None:
    OPS.ring_gather(torch.arange(3), torch.ones(3, width), torch.tensor([[1, 0, 7]] * 2), False, ring)


def meet(count: int, ring: str) -> None:
    OPS.ring_meet(torch.ones(count, dtype=torch.int64), ring)


def nothing_then_meet(ring: str) -> None:
    reduce(0, ring)
    meet(1, ring)


Call = Callable[[str], None]
MISMATCHES: dict[str, tuple[Call, Call]] = {
    "sizes": (partial(reduce, 10), partial(reduce, 11)),
    "sizes of several slots": (partial(reduce, 5000), partial(reduce, 9000)),
    "nothing": (partial(reduce, 10), nothing_then_meet),
    "kinds": (partial(reduce, 2), partial(meet, 2)),
    "widths": (partial(gather, 4), partial(gather, 5)),
    "counts": (partial(meet, 1), partial(meet, 2)),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_make_different_calls_are_told_by_number(kind: str) -> None:
    with opened(2) as ranks:
        errors = ranks.each(lambda rank, ring: MISMATCHES[kind][rank](ring))
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        assert f"rank {1 - rank} takes part in" in str(error)
        assert "the ranks run different programs" in str(error)


def broadcast(ring: str) -> None:
    OPS.ring_broadcast_([torch.ones(3000)], 1, ring)


@pytest.mark.parametrize("call", [partial(reduce, 5000), partial(gather, 3), broadcast], ids=["sum", "rows", "copy"])
def test_a_rank_waiting_for_a_lost_one_gets_the_reported_reason(call: Call) -> None:
    def first_alone(rank: int, ring: str) -> None:
        if not rank:
            call(ring)

    with opened(2) as ranks:
        timer = threading.Timer(0.2, OPS.ring_fail, (ranks.names[0], "rank 1 is gone"))
        timer.start()
        error, nothing = ranks.each(first_alone)
        timer.join(BOUND_S)
        assert nothing is None
        assert "rank 1 is gone" in str(error)
        later, _ = ranks.each(first_alone)
        assert "rank 1 is gone" in str(later)


@pytest.mark.parametrize(
    ("other", "fits"), [([4, 0, 8], False), ([800, 2, 7], False), ([0, 1, 0], True), ([4, 0, 7], True)], ids=str
)
def test_a_step_is_refused_where_a_rank_begins_another_program(other: list[int], fits: bool) -> None:
    said = [torch.tensor([3, 0, 7]), torch.tensor(other)]
    with opened(2) as ranks:
        first, _ = ranks.each(lambda rank, ring: (OPS.ring_meet if rank else OPS.ring_step)(said[rank], ring))
    if fits:
        assert torch.equal(first, torch.stack(said))
    else:
        assert "rank 1 begins a step of another program" in str(first)


def test_a_ring_opens_once_and_refuses_memory_that_is_too_small() -> None:
    with opened(2) as ranks, open(os.memfd_create("ring"), "wb") as file:  # noqa: PTH123 - it has no path
        with pytest.raises(RuntimeError, match="the shared memory has 0 bytes; expected"):
            OPS.ring_open("small", file.fileno(), 0, 2, SMALL_SLOT)
        os.truncate(file.fileno(), OPS.ring_size_bytes(2, SMALL_SLOT))
        with pytest.raises(ValueError, match="is open already"):
            OPS.ring_open(ranks.names[0], file.fileno(), 0, 2, SMALL_SLOT)
        with pytest.raises(RuntimeError, match="multiple of 64 bytes, from 512 on"):
            OPS.ring_open("odd", file.fileno(), 0, 2, 1000)
