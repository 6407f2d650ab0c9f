"""Dropout's bits by global position, its derivative, and seeded initial values."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import typed_ops as ops
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from penstock.compat.torch import TorchDispatchMode


def _rng(seed: int, step: int = 0, first_row: int = 0) -> Tensor:
    return torch.tensor([seed, step, first_row])


def _mask(x: Tensor, rng: Tensor, *, op_seed: int = 3, batch_dim: int = 0, rows_per_sample: int = 1) -> Tensor:
    return ops.dropout(
        x, rng, 0.5, training=True, op_seed=op_seed, batch_dim=batch_dim, rows_per_sample=rows_per_sample
    )[1]


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(2, 40),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    others=st.sampled_from([[], [1], [7], [130], [3, 5], [2, 129], [5, 1]]),
    batch_dim=st.integers(0, 2),
    rows_per_sample=st.integers(1, 3),
    seed=st.integers(0, 2**62),
)
def test_shares_of_a_batch_get_the_bits_of_the_whole(
    batch: int, cuts: list[int], others: list[int], batch_dim: int, rows_per_sample: int, seed: int
) -> None:
    batch_dim = min(batch_dim, len(others))
    shape = [*others[:batch_dim], batch * rows_per_sample, *others[batch_dim:]]
    x = torch.ones(shape)
    whole = _mask(x, _rng(seed, 5), batch_dim=batch_dim, rows_per_sample=rows_per_sample)
    edges = sorted({0, batch, *(cut for cut in cuts if cut < batch)})
    shares = []
    for first, last in itertools.pairwise(edges):
        share = x.narrow(batch_dim, first * rows_per_sample, (last - first) * rows_per_sample)
        rng = _rng(seed, 5, first)
        shares.append(_mask(share, rng, batch_dim=batch_dim, rows_per_sample=rows_per_sample))
    assert torch.equal(torch.cat(shares, batch_dim), whole)


def test_bits_differ_between_seeds_steps_operators_and_rows() -> None:
    x = torch.ones(64, 64)
    masks = [
        _mask(x, _rng(1)),
        _mask(x, _rng(2)),
        _mask(x, _rng(1, step=1)),
        _mask(x, _rng(1, first_row=64)),
        _mask(x, _rng(1), op_seed=4),
    ]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            # Independent fair bits agree in half of 4096 places, give or take 32 (one standard deviation): 6 of them.
            assert abs(int((mask == other).sum()) - 2048) < 6 * 32


_WORD = 2**32 - 1


def _philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 as the paper defines it, in Python's integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _WORD, (first >> 32) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def _words(seed: int, op_seed: int, step: int, block: int) -> tuple[int, int, int, int]:
    key = _mix64(_mix64(seed) ^ op_seed)
    return _philox((key & _WORD, key >> 32), (block & _WORD, block >> 32, step & _WORD, step >> 32))


def test_the_reference_generator_gives_the_published_answers() -> None:
    # Known answers of the paper's own library (Random123, kat_vectors).
    assert _philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (_WORD, _WORD, _WORD, _WORD)
    assert _philox((_WORD, _WORD), ones) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("first_row", [0, 77, 2**35])
def test_dropout_bits_are_those_of_the_reference_generator(first_row: int) -> None:
    seed, op_seed, step, p = 123, 7, 2**33 + 5, 0.3
    _, mask = ops.dropout(torch.ones(40, 10), _rng(seed, step, first_row), p, training=True, op_seed=op_seed)
    for index, kept in enumerate(mask.flatten().tolist()):
        position = first_row * 10 + index
        word = _words(seed, op_seed, step, position // 128 * 32 + position % 32)[position // 32 % 4]
        assert kept == (word >= round(p * 2**32))


def test_uniform_values_equal_the_reference_generators() -> None:
    values = ops.uniform([200], -1.0, 2.0, seed=9, dtype=torch.float64)
    for index, value in enumerate(values.tolist()):
        words = _words(9, 0, 0, index // 64 * 32 + index % 32)
        low, high = words[index // 32 % 2 * 2 :][:2]
        assert value == -1.0 + 3.0 * (((high << 32 | low) >> 12) + 0.5) / 2**52


def test_a_call_without_batch_takes_plain_positions() -> None:
    x = torch.ones(12, 10)
    assert torch.equal(_mask(x, _rng(1, 0, 7), batch_dim=-1), _mask(x, _rng(1, 0, 0), batch_dim=0))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_keep_rate_is_one_minus_p(p: float) -> None:
    count = 1_000_000
    _, mask = ops.dropout(torch.ones(1000, 1000), _rng(11), p, training=True, op_seed=1)
    deviation = math.sqrt(count * p * (1 - p))
    assert abs(int(mask.sum()) - count * (1 - p)) < 5 * deviation
    for line in (mask.sum(0), mask.sum(1)):  # neither rows nor columns are favoured
        assert (line - 1000 * (1 - p)).abs().max() < 6 * math.sqrt(1000 * p * (1 - p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_elements_are_scaled_and_dropped_ones_are_zero(dtype: torch.dtype) -> None:
    x = torch.randn(37, 23, dtype=dtype).t()
    y, mask = ops.dropout(x, _rng(1), 0.25, training=True, op_seed=1)
    torch.testing.assert_close(y, torch.where(mask, x / 0.75, 0.0))


def test_the_extremes_keep_all_and_nothing() -> None:
    x = torch.tensor([[1.0, math.inf, math.nan]])
    nothing, _ = ops.dropout(x, _rng(1), 1.0, training=True, op_seed=1)
    assert torch.equal(nothing, torch.zeros(1, 3))
    everything, mask = ops.dropout(x, _rng(1), 0.0, training=True, op_seed=1)
    assert mask.all()
    assert torch.equal(everything.nan_to_num(7), x.nan_to_num(7))


def test_without_training_x_is_copied_and_the_mask_is_empty() -> None:
    x = torch.randn(3, 4)
    y, mask = ops.dropout(x, _rng(1), 0.5, training=False, op_seed=1)
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()
    assert mask.shape == (0,)
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("training", [True, False])
def test_the_derivatives_of_dropout_hold_to_second_order(training: bool) -> None:
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)

    def forward(value: Tensor) -> Tensor:
        return ops.dropout(value, _rng(4), 0.4, training=training, op_seed=2, batch_dim=1)[0]

    assert torch.autograd.gradcheck(forward, (x,))
    assert torch.autograd.gradgradcheck(forward, (x,))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch ships it without types
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch ships it without types
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def test_recording_sees_one_operator_forward_and_one_backward() -> None:
    environment = ShapeEnv()
    fake = FakeTensorMode(shape_env=environment)
    x = fake.from_tensor(torch.randn(7, 4, requires_grad=True), static_shapes=False)
    rng = fake.from_tensor(_rng(1))
    with fake, _Recorder() as recorder:
        y, mask = ops.dropout(x, rng, 0.5, training=True, op_seed=1)
        (grad,) = torch.autograd.grad(y, x, x)
    seen = [name for name in recorder.operators if not name.startswith("prim.device")]
    assert seen == ["penstock.dropout.default", "penstock.dropout_backward.default"]
    assert isinstance(x.shape[0], torch.SymInt)
    assert y.shape == mask.shape == grad.shape == x.shape
    assert not environment.guards


def _quantiles_hold(values: Tensor, expected: list[tuple[float, float]]) -> None:
    """Check shares of values below points, to 5 standard deviations of a count."""
    count = values.numel()
    for point, share in expected:
        assert abs(int((values < point).sum()) - count * share) < 5 * math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_follows_its_distribution(dtype: torch.dtype) -> None:
    values = ops.normal([200, 1000], 1.0, 2.0, seed=5, dtype=dtype)
    assert values.dtype == dtype
    distribution = NormalDist(1, 2)
    _quantiles_hold(values, [(point, distribution.cdf(point)) for point in (-5, -3, -1, 0, 1, 2, 3, 5, 7)])


def test_normal_is_the_inverse_distribution_function_of_uniform() -> None:
    uniform = ops.uniform([20_000], 0.0, 1.0, seed=8, dtype=torch.float64)
    values = ops.normal([20_000], 0.0, 1.0, seed=8, dtype=torch.float64)
    expected = torch.tensor([NormalDist().inv_cdf(u) for u in uniform.tolist()], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=1e-15)


def test_truncated_normal_stays_within_two_deviations() -> None:
    values = ops.truncated_normal([300_000], 1.0, 0.5, seed=3, dtype=torch.float64)
    assert values.min() >= 0
    assert values.max() <= 2
    normal = NormalDist(1, 0.5)
    low, high = normal.cdf(0), normal.cdf(2)
    points = [0.1, 0.5, 1.0, 1.3, 1.9]
    _quantiles_hold(values, [(point, (normal.cdf(point) - low) / (high - low)) for point in points])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_half_open(dtype: torch.dtype) -> None:
    values = ops.uniform([300_000], -1.0, 3.0, seed=3, dtype=dtype)
    assert values.min() >= -1
    assert values.max() < 3
    _quantiles_hold(values, [(point, (point + 1) / 4) for point in (-0.9, 0.0, 1.0, 2.9)])
    narrow = ops.uniform([1000], 1.0, 1.0 + 1e-7, seed=1, dtype=torch.float32)
    assert narrow.eq(1).all()


def test_initial_values_depend_on_seed_and_index_only() -> None:
    long = ops.normal([100_003], 0.0, 1.0, seed=9)
    assert torch.equal(ops.normal([7, 11], 0.0, 1.0, seed=9).flatten(), long[:77])
    assert not torch.equal(ops.normal([100], 0.0, 1.0, seed=10), long[:100])
    torch.set_num_threads(2)
    assert torch.equal(ops.normal([100_003], 0.0, 1.0, seed=9), long)
