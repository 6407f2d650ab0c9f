"""Max pooling by 2 x 2 and its gradient: torch's bits, for every size, for NaN, infinities, zeros and equal values."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.property.oracle import intra_op_threads, same_bits
from torch import Tensor

from penstock.native import fused_ops as _fused_ops  # noqa: F401 - registers its operators

_OPS = torch.ops.penstock
_WINDOWS: tuple[Any, ...] = ([2, 2], [2, 2], [0, 0], [1, 1], False)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
with_and_without_relu = pytest.mark.parametrize("relu", [False, True])


def images(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Draw values of few kinds, so that windows have equal ones, zeros of both signs, NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([1.5, -0.5, 0.0, -0.0, torch.nan, torch.inf, -torch.inf, 0.25], dtype=dtype)
    drawn = torch.randint(0, 3 * len(kinds), sizes, generator=generator)
    numbers = torch.randn(sizes, generator=generator, dtype=dtype)
    return torch.where(drawn < len(kinds), kinds[drawn.clamp(max=len(kinds) - 1)], numbers)


def expected(x: Tensor, grad: Tensor, *, relu: bool) -> tuple[Tensor, Tensor]:
    """Return what torch's operators, one after another, make of x and of the gradient."""
    given = torch.relu(x) if relu else x
    y, indices = torch.ops.aten.max_pool2d_with_indices(given, *_WINDOWS)
    back = torch.ops.aten.max_pool2d_with_indices_backward(grad, given, *_WINDOWS, indices)
    return y, torch.ops.aten.threshold_backward(back, given, 0) if relu else back


def same_values(y: Tensor, wanted: Tensor, *, relu: bool) -> bool:
    """Compare bits; on Arm not the sign of a zero that relu gives: torch's has either, by the place in a vector."""
    if relu and platform.machine() == "aarch64":
        y, wanted = y + 0.0, wanted + 0.0
    return same_bits(y, wanted)


def assert_torchs_bits(x: Tensor, grad: Tensor, *, relu: bool) -> None:
    """Compare both directions."""
    y, places = _OPS.max_pool_2x2(x, relu)
    wanted_y, wanted_x = expected(x, grad, relu=relu)
    assert places.dtype == torch.uint8
    assert same_values(y, wanted_y, relu=relu)
    assert same_bits(_OPS.max_pool_2x2_backward(grad, places), wanted_x)


@both_dtypes
@with_and_without_relu
@given(
    rows=st.integers(0, 3), channels=st.integers(1, 3), height=st.integers(1, 6), width=st.integers(1, 21),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_any_size_has_torchs_bits(
    dtype: torch.dtype, relu: bool, rows: int, channels: int, height: int, width: int, seed: int
) -> None:
    if rows == 0 and relu:  # torch pools no images, of which there is nothing to compare
        assert _OPS.max_pool_2x2(torch.empty(0, channels, 2 * height, 2 * width, dtype=dtype), relu)[0].numel() == 0
        return
    x = images(max(rows, 1), channels, 2 * height, 2 * width, dtype=dtype, seed=seed)
    assert_torchs_bits(x, images(max(rows, 1), channels, height, width, dtype=dtype, seed=seed + 1), relu=relu)


@both_dtypes
@with_and_without_relu
@pytest.mark.parametrize("sizes", [(2, 20, 24, 24), (3, 50, 8, 8), (1, 2, 4, 1022), (1, 1, 4, 4096), (1, 3, 112, 112)])
def test_sizes_of_networks_and_the_widest_rows(dtype: torch.dtype, relu: bool, sizes: tuple[int, ...]) -> None:
    n, c, h, w = sizes
    assert_torchs_bits(images(*sizes, dtype=dtype), images(n, c, h // 2, w // 2, dtype=dtype, seed=1), relu=relu)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, -1.0])
def test_windows_of_one_value(value: float) -> None:
    x, grad = torch.full((1, 1, 2, 10), value), torch.tensor([[[[1.0, -0.0, 0.0, torch.nan, torch.inf]]]])
    for relu in (False, True):
        assert_torchs_bits(x, grad, relu=relu)


def test_other_layouts_and_several_threads_have_the_same_bits() -> None:
    x, grad = images(8, 6, 40, 36, dtype=torch.float32), images(8, 6, 20, 18, dtype=torch.float32, seed=1)
    turned = x.to(memory_format=torch.channels_last)
    y, places = _OPS.max_pool_2x2(turned, True)
    assert same_values(y, expected(x, grad, relu=True)[0], relu=True)
    spread = _OPS.max_pool_2x2_backward(
        grad.to(memory_format=torch.channels_last), places.to(memory_format=torch.channels_last)
    )
    assert same_bits(spread, expected(x, grad, relu=True)[1])
    with intra_op_threads(3):
        assert_torchs_bits(x, grad, relu=True)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: _OPS.max_pool_2x2(torch.ones(1, 1, 3, 4), False), ValueError, "expected an even height"),
        (lambda: _OPS.max_pool_2x2(torch.ones(1, 1, 2, 5), False), ValueError, "an even width of at most 4096"),
        (lambda: _OPS.max_pool_2x2(torch.ones(1, 1, 2, 4098), False), ValueError, "an even width of at most 4096"),
        (lambda: _OPS.max_pool_2x2(torch.ones(1, 2, 4), False), ValueError, "x has shape"),
        (lambda: _OPS.max_pool_2x2(torch.ones(1, 1, 2, 4).half(), False), TypeError, "x has dtype Half"),
        (
            lambda: _OPS.max_pool_2x2_backward(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4)),
            TypeError,
            "places has dtype Float; expected Byte",
        ),
        (
            lambda: _OPS.max_pool_2x2_backward(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 3).byte()),
            ValueError,
            "places has shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
