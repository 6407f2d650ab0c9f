"""Optimizer operators against torch's optimizers, dense and sparse, in both precisions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import typed_ops as ops
from torch import Tensor

DTYPES = [torch.float32, torch.float64]
# torch rounds at other places than one pass does: a few units in the last place, grown over the steps of a test.
RTOL = {torch.float32: 1e-6, torch.float64: 1e-12}
BETAS = (0.9, 0.999)
EPSILON = 1e-8


def _close(ours: Tensor, torch_value: Tensor) -> None:
    tolerance = RTOL[ours.dtype]
    torch.testing.assert_close(ours, torch_value, rtol=tolerance, atol=tolerance)


def _rate(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _sparse(rows: Tensor, values: Tensor, height: int) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, (height, values.shape[1]), check_invariants=False)


@st.composite
def sparse_gradients(draw: st.DrawFn) -> tuple[int, Tensor, Tensor]:
    """A table's height, rows with many duplicates (none at times) and values; both index kinds of the merge."""
    height = draw(st.sampled_from([1, 7, 300, 33_000]))
    count = draw(st.integers(0, 60))
    reach = draw(st.integers(1, height))
    width = draw(st.integers(1, 37))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = torch.randint(0, reach, (count,), generator=generator)
    return height, rows, torch.randn(count, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(sparse_gradients(), st.integers(1, 4))
def test_sparse_adam_follows_torch_over_steps(
    dtype: torch.dtype, gradient: tuple[int, Tensor, Tensor], steps: int
) -> None:
    height, rows, values = gradient
    values = values.to(dtype)
    start = torch.linspace(-1, 1, height * values.shape[1], dtype=dtype).reshape(height, -1)
    param, moment1, moment2 = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    peer = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SparseAdam([peer], lr=0.01, betas=BETAS, eps=EPSILON)
    for step in range(1, steps + 1):
        count = torch.tensor(float(step))
        ops.sparse_adam_(
            param, moment1, moment2, count, rows, values, _rate(0.01),
            beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON,
        )  # fmt: skip
        peer.grad = _sparse(rows, values, height)
        optimizer.step()  # type: ignore[no-untyped-call]  # torch ships it without types
        values = -values.flip(1) if step % 2 else values * 0.5
    _close(param, peer.detach())
    state = optimizer.state[peer]
    _close(moment1, state["exp_avg"])
    _close(moment2, state["exp_avg_sq"])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(sparse_gradients())
def test_sparse_adagrad_follows_torch(dtype: torch.dtype, gradient: tuple[int, Tensor, Tensor]) -> None:
    height, rows, values = gradient
    values = values.to(dtype)
    param, moment = torch.ones(height, values.shape[1], dtype=dtype), torch.zeros(height, values.shape[1], dtype=dtype)
    peer = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.Adagrad([peer], lr=0.1, eps=EPSILON)
    for _ in range(3):
        ops.sparse_adagrad_(param, moment, rows, values, _rate(0.1), epsilon=EPSILON)
        peer.grad = _sparse(rows, values, height).to_dense()  # rows of zeros move neither the moment nor the row
        optimizer.step()
    _close(param, peer.detach())
    _close(moment, optimizer.state[peer]["sum"])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(sparse_gradients())
def test_sparse_sgd_equals_sgd_on_the_dense_gradient(dtype: torch.dtype, gradient: tuple[int, Tensor, Tensor]) -> None:
    height, rows, values = gradient
    values = values.to(dtype)
    param = torch.ones(height, values.shape[1], dtype=dtype)
    expected = param - 0.1 * _sparse(rows, values, height).to_dense()
    ops.sparse_sgd_(param, rows, values, _rate(0.1))
    tolerance = 60 * torch.finfo(dtype).eps  # up to 60 duplicates of a row, added one after another
    torch.testing.assert_close(param, expected, rtol=tolerance, atol=10 * tolerance)


def test_a_large_sparse_sgd_is_equal_on_one_and_two_threads() -> None:
    rows = torch.randint(0, 500, (20_000,))
    values = torch.randn(20_000, 16)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        param = torch.zeros(500, 16)
        ops.sparse_sgd_(param, rows, values, _rate(0.1))
        results.append(param)
    assert torch.equal(results[0], results[1])


def _updated(update: str, states: int, settings: tuple[object, ...], rows: Tensor | None, parts: int) -> list[Tensor]:
    """The parameter and its states [300, 20] after an update, in parts from the last to the first."""
    generator = torch.Generator().manual_seed(5)
    kept = [torch.rand(300, 20, generator=generator) for _ in range(1 + states)]
    values = torch.randn(300 if rows is None else len(rows), 20, generator=generator)
    given = [values] if rows is None else [rows, values]
    step = [torch.tensor(3.0)] if states == 2 else []
    operator = getattr(torch.ops.penstock, update)
    for part in reversed(range(parts)):
        operator.part(*kept, *step, *given, _rate(0.1), *settings, part, parts)
    return kept


@pytest.mark.parametrize(
    ("update", "states", "settings"),
    [
        ("sparse_sgd_", 0, ()),
        ("sparse_adagrad_", 1, (EPSILON,)),
        ("sparse_adam_", 2, (*BETAS, EPSILON)),
        ("sgd_", 0, ()),
        ("adam_", 2, (*BETAS, EPSILON, 0.1, False)),
    ],
)
def test_parts_of_an_update_are_the_whole_to_the_bit(update: str, states: int, settings: tuple[object, ...]) -> None:
    rows = torch.randint(0, 300, (9000,)) if update.startswith("sparse") else None  # all several times, over chunks
    whole = _updated(update, states, settings, rows, 1)
    for parts in (2, 3, 7):
        for one, expected in zip(_updated(update, states, settings, rows, parts), whole, strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize("part", [-1, 2])
def test_a_part_beyond_their_number_is_refused(part: int) -> None:
    param = torch.ones(4, 2)
    with pytest.raises(IndexError, match=f"part is {part}; expected one of 2, from 0"):
        torch.ops.penstock.sparse_sgd_.part(param, torch.tensor([1]), torch.ones(1, 2), _rate(0.1), part, 2)
    assert param.eq(1).all()


def test_duplicates_are_summed_in_order_of_appearance() -> None:
    values = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    param, moment = torch.zeros(3, 1), torch.zeros(3, 1)
    ops.sparse_adagrad_(param, moment, torch.tensor([2, 2, 2, 2]), values, _rate(1.0), epsilon=EPSILON)
    # ((1e8 + 1) - 1e8) + 1 in float32 is 1, in any other order of additions it would be 0 or 2.
    assert moment[2].item() == 1.0
    assert param.tolist() == [[0.0], [0.0], [-1.0]]


def test_a_gradient_of_no_rows_changes_nothing() -> None:
    param, moment1, moment2 = torch.ones(4, 3), torch.zeros(4, 3), torch.zeros(4, 3)
    ops.sparse_adam_(
        param, moment1, moment2, torch.tensor(1.0), torch.empty(0, dtype=torch.int64), torch.empty(0, 3), _rate(1.0),
        beta1=0.9, beta2=0.999, epsilon=EPSILON,
    )  # fmt: skip
    assert torch.equal(param, torch.ones(4, 3))
    assert not moment1.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 300), steps=st.integers(1, 5), seed=st.integers(0, 1000))
def test_adam_follows_torch_over_steps(
    dtype: torch.dtype, weight_decay: float, size: int, steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    param = torch.randn(size, generator=generator, dtype=dtype)
    moment1, moment2 = torch.zeros_like(param), torch.zeros_like(param)
    peer = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.Adam([peer], lr=0.01, betas=BETAS, eps=EPSILON, weight_decay=weight_decay)
    for step in range(1, steps + 1):
        # Bounded away from zero: where g is about epsilon, m / (sqrt(v) + eps) magnifies the rounding of v.
        grad = torch.rand(size, generator=generator, dtype=dtype) + 0.1
        ops.adam_(
            param, moment1, moment2, torch.tensor(float(step), dtype=torch.float64), grad, _rate(0.01),
            beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, weight_decay=weight_decay,
        )  # fmt: skip
        peer.grad = grad
        optimizer.step()
    _close(param, peer.detach())
    _close(moment1, optimizer.state[peer]["exp_avg"])
    _close(moment2, optimizer.state[peer]["exp_avg_sq"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arrange", [lambda grad: grad, lambda grad: grad.t().contiguous().t()])
def test_sgd_follows_torch_for_any_layout_of_the_gradient(
    dtype: torch.dtype, arrange: Callable[[Tensor], Tensor]
) -> None:
    param, grad = torch.randn(31, 17, dtype=dtype), torch.randn(31, 17, dtype=dtype)
    expected = param - 0.1 * grad
    ops.sgd_(param, arrange(grad), _rate(0.1))
    _close(param, expected)
