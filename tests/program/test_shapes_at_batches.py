"""Shapes of calls with symbolic sizes: expressions for every batch, views that share memory, errors of eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.compat.torch import storage_id
from penstock.errors import ProgramError
from penstock.program.expr import evaluate
from penstock.program.record.fakes import Fake, empty_fake
from penstock.program.record.shapes import Cut, Pinned, call_on_fakes
from penstock.program.record.sizes import Sizes, size_of

aten = torch.ops.aten
F32 = torch.float32
sym_min: Any = torch.sym_min  # torch has not typed it
Call = tuple[Any, Callable[[Any, Any, Any], tuple[Any, ...]], dict[str, Any]]


def world() -> tuple[Sizes, Any, Any]:
    """Return sizes with two symbols."""
    sizes = Sizes()
    return sizes, sizes.new("s0", 7920), sizes.new("s1", 7921)


CALLS: dict[str, Call] = {
    "sum of sizes": (aten.cat.default, lambda x, n, m: ([x, x],), {}),
    "permuted": (aten.permute.default, lambda x, n, m: (x, [2, 0, 1]), {}),
    "broadcast": (aten.add.Tensor, lambda x, n, m: (x, x[:, :1]), {}),
    "matrices": (aten.bmm.default, lambda x, n, m: (x, x.transpose(1, 2)), {}),
    "reduced": (aten.mean.dim, lambda x, n, m: (x, [1]), {"keepdim": True}),
    "flattened": (aten.view.default, lambda x, n, m: (x, [n * m, 6]), {}),
    "a row from the end": (aten.select.int, lambda x, n, m: (x, 0, n - 1), {}),
    "windows": (aten.unfold.default, lambda x, n, m: (x, 1, 4, 3), {}),
    "made": (aten.full.default, lambda x, n, m: ([n, 3], 1.0), {}),
    "types": (aten.gt.Scalar, lambda x, n, m: (x, 0), {}),
}


@pytest.mark.parametrize("name", CALLS)
@given(rows=st.integers(1, 40), steps=st.integers(4, 40))
def test_a_shape_holds_at_every_batch(name: str, rows: int, steps: int) -> None:
    func, operands, kwargs = CALLS[name]
    _, n, m = world()
    found, cuts = call_on_fakes(func, operands(empty_fake([n, m, 6], None, F32), n, m), kwargs)
    expected = func(*operands(torch.zeros(rows, steps, 6), rows, steps), **kwargs)
    at = {"s0": rows, "s1": steps}
    assert [evaluate(size_of(size).dim, at) for size in found.shape] == list(expected.shape)
    assert found.dtype == expected.dtype and found.device == expected.device and not cuts
    if rows > 1:  # a size of 1 may have any stride
        strides = [evaluate(size_of(stride).dim, at) for stride in found.stride()]
        assert strides == list(expected.stride()) or expected.is_contiguous()
    assert evaluate(size_of(found.storage_offset()).dim, at) == expected.storage_offset()


DIVIDED: dict[str, Call] = {
    "every 100th number": (aten.arange.start_step, lambda x, n, m: (0, n, 100), {}),
    "every 20th row": (aten.unfold.default, lambda x, n, m: (x, 0, 1, 20), {}),
    "a convolution of stride 17": (
        aten.convolution.default,
        lambda x, n, m: (x[None, None], x.new_ones([1, 1, 2]), None, [17], [0], [1], False, [0], 1),
        {},
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_large_step_is_seen_though_few_rows_give_one(name: str) -> None:
    func, operands, kwargs = DIVIDED[name]
    _, n, m = world()
    found, _ = call_on_fakes(func, operands(empty_fake([n], None, F32), n, m), kwargs)
    read, _ = call_on_fakes(aten.mul.Tensor, (found, 2), {})  # its operand has one row at every small batch
    for rows in (20, 35, 64, 100, 101, 1000):
        expected = func(*operands(torch.zeros(rows), rows, 1), **kwargs)
        assert [evaluate(size_of(size).dim, {"s0": rows}) for size in read.shape] == list(expected.shape)


@pytest.mark.parametrize("func", [aten.view.default, aten._unsafe_view.default])
def test_a_view_shares_memory_declared_or_not(func: Any) -> None:
    _, n, _ = world()
    x = empty_fake([n, 6], None, F32)
    found, _ = call_on_fakes(func, (x, [n * 6]), {})
    assert isinstance(found, Fake) and storage_id(found) == storage_id(x)
    copied, _ = call_on_fakes(aten.clone.default, (x,), {})
    assert storage_id(copied) != storage_id(x)


def test_a_write_in_place_returns_its_operand() -> None:
    _, n, _ = world()
    x = empty_fake([n, 6], None, F32)
    assert call_on_fakes(aten.add_.Tensor, (x, 1.0), {})[0] is x


def test_a_cut_size_that_has_to_fit_is_named() -> None:
    _, n, _ = world()
    x = empty_fake([sym_min(n, 20), 1], None, F32)
    _, cuts = call_on_fakes(aten.add.Tensor, (x, empty_fake([20, 1], None, F32)), {})
    assert cuts == [Cut(size_of(x.shape[0]), 20)]
    assert call_on_fakes(aten.relu.default, (x,), {})[1] == []


def test_multiples_of_a_batch_are_tried_for_what_must_divide() -> None:
    _, n, _ = world()
    found, _ = call_on_fakes(aten.view.default, (empty_fake([n, 4], None, F32), [5, -1, 4]), {})
    assert [str(size) for size in found.shape] == ["5", "s0 // 5", "4"]


def test_a_call_for_one_batch_alone_is_pinned() -> None:
    _, n, _ = world()
    with pytest.raises(Pinned, match="into the number 7920"):
        call_on_fakes(aten.view.default, (empty_fake([n, 4], None, F32), [7920, 4]), {})


def test_an_error_is_that_of_eager_torch() -> None:
    _, n, _ = world()
    x, w = empty_fake([n, 8], None, F32), empty_fake([12, 3], None, F32)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied \(-1x8 and 12x3\)"):
        call_on_fakes(aten.mm.default, (x, w), {})


def test_relations_are_asked_once_and_kept_with_their_value() -> None:
    sizes, n, _ = world()
    assert n > 5 and not n <= 5 and n * 2 > n and n + 1 != n
    assert [str(asked.relation) for asked in sizes.asked] == ["s0 > 5"]
    sizes.forget(known=True)
    assert bool(n > 5) and len(sizes.asked) == 1


def test_a_size_beside_a_float_is_exact() -> None:
    sizes, n, _ = world()
    assert n > 2.5 and n <= 9000.5 and n != 7920.5 and n < float("inf")
    assert [str(asked.relation) for asked in sizes.asked] == ["s0 > 2", "s0 <= 9000"]


FLOATS: dict[str, Callable[[Any], Any]] = {
    "a branch": lambda n: bool(n / 2 > 10),
    "half": lambda n: int(n / 2),
    "rounded": lambda n: round(n * 0.3),
    "a root": lambda n: float(n**0.5),
}


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_of_sizes_is_refused(name: str) -> None:
    sizes, n, _ = world()
    with pytest.raises(ProgramError, match="computes a floating-point number of the batch size"):
        FLOATS[name](n)
    assert not sizes.asked


def test_a_quotient_is_exact_where_the_rest_is_known() -> None:
    sizes, n, _ = world()
    assert n % 2 == 0
    assert (n // 2) * 2 == n
    assert [str(asked.relation) for asked in sizes.asked] == ["s0 % 2 == 0"]


def test_rows_that_a_shape_divides_by_any_number_are_found() -> None:
    """39 has a factor, 13, that no number of rows has which is tried first."""
    _, n, _ = world()
    found, _ = call_on_fakes(aten.view.default, (empty_fake([n, 96], None, F32), [-1, 39, 96]), {})
    assert [str(size) for size in found.shape] == ["s0 // 39", "39", "96"]
    back, _ = call_on_fakes(aten.view.default, (found, [n, 96]), {})
    assert [str(size) for size in back.shape] == ["s0", "96"]
