"""Operators that passes put in the place of several: against torch, for every layout, kernel and activation."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.native.matrix_kernels import KERNELS
from penstock.native.matrix_probe import available

_OPS = torch.ops.penstock


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel; one that this processor refuses warns and gives torch's result, which has to be right as well."""
    with warnings.catch_warnings():
        if request.param not in available():
            warnings.simplefilter("ignore")
        yield request.param


def expected(x: Tensor, w: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Return the product in float64."""
    out = x.double() @ w.double()
    out = out if bias is None else out + bias.double()
    return out if activation == "none" else getattr(torch, activation)(out)


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "tanh"])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (33, 64, 40), (1, 1, 1), (20, 400, 2)])
def test_a_product_is_right_in_every_layout(kernel: str, activation: str, m: int, k: int, n: int) -> None:
    torch.manual_seed(m)
    x, w, row = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
    for transpose_x, transpose_w, bias in itertools.product((False, True), (False, True), (None, row)):
        left = x.t().contiguous() if transpose_x else x
        right = w.t().contiguous() if transpose_w else w
        got = _OPS.product(left, right, bias, transpose_x, transpose_w, activation, kernel)
        assert got.is_contiguous()
        # A dot product of k terms of size about 1: k roundings of half a unit, with room.
        torch.testing.assert_close(got.double(), expected(x, w, bias, activation), rtol=0.0, atol=k * 1.2e-7 + 1e-6)


def test_batches_and_views_multiply(kernel: str) -> None:
    torch.manual_seed(1)
    x, w = torch.randn(4, 6, 10), torch.randn(4, 10, 5)
    torch.testing.assert_close(_OPS.product(x, w, None, False, False, "none", kernel), x @ w, rtol=0.0, atol=1e-5)
    turned = w.transpose(1, 2).contiguous()
    torch.testing.assert_close(_OPS.product(x, turned, None, False, True, "relu", kernel), (x @ w).relu())
    wide = torch.randn(6, 20)[:, 3:13]
    torch.testing.assert_close(_OPS.product(wide, w[0], None, False, False, "none", kernel), wide @ w[0])


@pytest.mark.parametrize("activation", ["none", "relu", "tanh"])
def test_a_bias_may_have_any_stride(kernel: str, activation: str) -> None:
    torch.manual_seed(3)
    x, w, row = torch.randn(33, 16), torch.randn(16, 32), torch.randn(64)
    biases = {"step": row[::2], "expanded": row[:1].expand(32), "offset": row[7:39], "column": row.view(32, 2)[:, 1]}
    for name, bias in biases.items():
        got = _OPS.product(x, w, bias, False, False, activation, kernel)
        wanted = expected(x, w, bias, activation)
        # As above: 16 roundings of half a unit, with room.
        torch.testing.assert_close(got.double(), wanted, rtol=0.0, atol=5e-6, msg=f"bias: {name}")


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "tanh"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_goes_where_torch_takes_it(kernel: str, activation: str, bad: float) -> None:
    torch.manual_seed(4)
    clean = torch.randn(33, 17), torch.randn(17, 40), torch.randn(40)
    for place, bias in itertools.product(range(3), (True, False)):
        x, w, row = (t.clone() for t in clean)
        (x, w, row)[place].view(-1)[5] = bad
        given = row if bias else None
        total = x @ w if given is None else torch.addmm(given, x, w)
        wanted = total if activation == "none" else getattr(torch, activation)(total)
        for transpose_x, transpose_w in itertools.product((False, True), repeat=2):
            left, right = x.t().contiguous() if transpose_x else x, w.t().contiguous() if transpose_w else w
            got = _OPS.product(left, right, given, transpose_x, transpose_w, activation, kernel)
            # Equal where not finite; elsewhere 17 roundings of half a unit, with room.
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=5e-6, equal_nan=True)


def test_relu_of_a_batch_passes_nan_on(kernel: str) -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    x[1, 2, 0] = float("nan")
    got = _OPS.product(x, w, None, False, False, "relu", kernel)
    assert torch.equal(got.isnan(), torch.bmm(x, w).relu().isnan())


def test_a_product_of_no_rows_is_empty(kernel: str) -> None:
    got = _OPS.product(torch.empty(0, 3), torch.randn(3, 2), torch.randn(2), False, False, "relu", kernel)
    assert got.shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.ones(2, 3), torch.ones(2, 3), None, False, False, "none", "torch"), ValueError, "cannot multiply"),
        ((torch.ones(2, 3), torch.ones(3, 2), torch.ones(3), False, False, "none", "torch"), ValueError, "bias has"),
        ((torch.ones(2, 3), torch.ones(3, 2), None, False, False, "none", "mkl"), ValueError, "kernel is 'mkl'"),
        ((torch.ones(2, 3), torch.ones(3, 2), None, False, False, "gelu", "torch"), ValueError, "is 'gelu'"),
        (
            (torch.ones(2, 3).double(), torch.ones(3, 2).double(), None, False, False, "none", "onednn"),
            TypeError,
            "expects Float",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[object, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _OPS.product(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh", "scale"])
def test_a_sum_and_its_activation_keep_every_bit(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = torch.randn(37, 19, dtype=dtype)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype)
    for y in (torch.randn(37, 19, dtype=dtype), torch.randn(19, dtype=dtype), torch.randn(37, 1, dtype=dtype)):
        y.view(-1)[:4] = 0.0
        total = x + y
        wanted = total * 0.3 if activation == "scale" else getattr(torch, activation)(total)
        got = _OPS.fused_add_act(x, y, activation, 0.3)
        assert got.numpy().tobytes() == wanted.numpy().tobytes()


def test_other_layouts_of_a_sum_are_right_too() -> None:
    x, y = torch.randn(6, 4), torch.randn(4, 6)
    torch.testing.assert_close(_OPS.fused_add_act(x.t(), y, "relu", 1.0), (x.t() + y).relu())
    torch.testing.assert_close(_OPS.fused_add_act(x[:, :1], y[:, 0], "relu", 1.0), (x[:, :1] + y[:, 0]).relu())


def test_what_a_fake_kernel_says_is_what_the_kernel_gives() -> None:
    x, w, row = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    product = (x, w, row, False, True, "relu", "torch")
    torch.library.opcheck(_OPS.product.default, product, test_utils=("test_schema", "test_faketensor"))
    total = (x, torch.randn(7), "relu", 1.0)
    torch.library.opcheck(_OPS.fused_add_act.default, total, test_utils=("test_schema", "test_faketensor"))
