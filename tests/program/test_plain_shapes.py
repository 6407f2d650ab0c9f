"""Shapes of convolutional networks' calls equal those of torch's kernels, and what torch refuses stays torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.program.expr import evaluate
from penstock.program.record.fakes import Fake, empty_fake
from penstock.program.record.plain_shapes import PLAIN
from penstock.program.record.shapes import call_on_fakes
from penstock.program.record.sizes import Sizes, size_of

aten = torch.ops.aten
SMALL = st.integers(1, 3)
MASK = st.lists(st.booleans(), min_size=3, max_size=3)


def fake(sizes: tuple[Any, ...]) -> Fake:
    return empty_fake(sizes, None, torch.float32)


def as_at(found: Any, batch: int) -> list[Any]:
    """Sizes, strides and dtype of each result at a batch; None for one that is not made."""

    def of(result: Any) -> Any:
        if result is None:
            return None
        parts = (result.shape, result.stride())
        return (*([evaluate(size_of(n).dim, {"s0": batch}) for n in part] for part in parts), result.dtype)

    return [of(result) for result in (found if isinstance(found, tuple | list) else [found])]


def of_torch(found: Any) -> list[Any]:
    each = found if isinstance(found, tuple | list) else [found]
    return [None if t is None else (list(t.shape), list(t.stride()), t.dtype) for t in each]


@st.composite
def windows(draw: st.DrawFn, dims: int) -> tuple[list[int], ...]:
    """Sizes, kernel, stride, padding and dilation, also such as do not fit."""

    def some(of: st.SearchStrategy[int]) -> list[int]:
        return [draw(of) for _ in range(dims)]

    return some(st.integers(1, 9)), some(SMALL), some(SMALL), some(st.integers(0, 2)), some(SMALL)


def same(func: Any, operands: Any, batch: int) -> None:
    """The call on fakes gives what the call on tensors of a batch gives, or neither succeeds."""
    n = Sizes().new("s0", 7920)
    try:
        expected = func(*operands(torch.zeros, batch))
    except RuntimeError:
        assert PLAIN[func](*operands(fake, n)) is None
        return
    made = PLAIN[func](*operands(fake, n))
    found, cuts = call_on_fakes(func, operands(fake, n), {})
    assert made is not None and not cuts
    got, wanted = as_at(found, batch), of_torch(expected)
    wanted = [theirs and (ours and theirs) for ours, theirs in zip(got, wanted, strict=True)]  # some are made unasked
    assert [one and (one[0], one[2]) for one in got] == [one and (one[0], one[2]) for one in wanted]
    if batch > 1 and all(one is None or min(one[0]) > 1 for one in wanted):  # a size of 1 may have any stride
        assert got == wanted


@given(st.integers(1, 3).flatmap(windows), SMALL, SMALL, st.booleans(), st.integers(1, 5), MASK)
@settings(max_examples=60)
def test_convolutions_and_their_gradients(
    window: tuple[list[int], ...], groups: int, width: int, biased: bool, batch: int, mask: list[bool]
) -> None:
    sizes, kernel, *rest = window
    channels, made = 2 * groups, width * groups

    def forward(of: Any, rows: Any) -> tuple[Any, ...]:
        bias = of((made,)) if biased else None
        return (of((rows, channels, *sizes)), of((made, 2, *kernel)), bias, *rest, False, [0] * len(sizes), groups)

    same(aten.convolution.default, forward, batch)
    try:
        result = aten.convolution.default(*forward(torch.zeros, batch)).shape[1:]
    except RuntimeError:
        return

    def backward(of: Any, rows: Any) -> tuple[Any, ...]:
        x, weight, _, *more = forward(of, rows)
        return of((rows, *result)), x, weight, [made] if biased else None, *more, mask

    same(aten.convolution_backward.default, backward, batch)
    made_of = PLAIN[aten.convolution_backward.default](*backward(fake, 7))
    assert made_of is not None and [one is not None for one in made_of] == mask


@given(windows(2), st.integers(1, 5))
@settings(max_examples=60)
def test_max_pooling_and_its_gradient(window: tuple[list[int], ...], batch: int) -> None:
    sizes, *rest = window

    def forward(of: Any, rows: Any) -> tuple[Any, ...]:
        return of((rows, 2, *sizes)), *rest

    same(aten.max_pool2d_with_indices.default, forward, batch)


def pooled(of: Any, rows: Any) -> tuple[Any, ...]:
    """A gradient of pooling 2 x 2 windows, and what they were of."""
    return of((rows, 2, 3, 3)), of((rows, 2, 6, 6)), [2, 2], [2, 2], [0, 0]


OTHERS: dict[str, Any] = {
    "relu": (aten.relu.default, lambda of, n: (of((n, 2, 6)),)),
    "its gradient": (aten.threshold_backward.default, lambda of, n: (of((n, 2, 6)), of((n, 2, 6)), 0)),
    "of average pooling": (aten.avg_pool2d_backward.default, lambda of, n: (*pooled(of, n), False, True, None)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_relu_and_gradients(name: str) -> None:
    func, operands = OTHERS[name]
    same(func, operands, 5)


def test_gradient_of_max_pooling_is_like_what_was_pooled() -> None:
    n = Sizes().new("s0", 7920)
    operands = (*pooled(fake, n), [1, 1], False, fake((n, 2, 3, 3)))
    found, _ = call_on_fakes(aten.max_pool2d_with_indices_backward.default, operands, {})
    assert as_at(found, 5) == [([5, 2, 6, 6], [72, 36, 6, 1], torch.float32)]


def test_a_call_by_names_is_left_to_torch() -> None:
    n = Sizes().new("s0", 7920)
    found, _ = call_on_fakes(
        aten.max_pool2d_with_indices.default, (fake((n, 2, 5, 5)), [2, 2]), {"stride": [2, 2], "ceil_mode": True}
    )
    assert as_at(found, 5)[0][0] == [5, 2, 3, 3]


@pytest.mark.parametrize(
    "operands",
    [
        lambda x, w: (x.transpose(2, 3), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        lambda x, w: (x, w, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1),
        lambda x, w: (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
        lambda x, w: (x.double(), w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        lambda x, w: (x, w, fake((5,)), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ],
    ids=["transposed memory", "transposed convolution", "groups", "dtypes", "bias"],
)
def test_torch_finds_all_others(operands: Any) -> None:
    n = Sizes().new("s0", 7920)
    assert PLAIN[aten.convolution.default](*operands(fake((n, 3, 8, 8)), fake((4, 3, 2, 2)))) is None
