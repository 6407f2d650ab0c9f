"""The operators made of torch's own, which run on CUDA, give on CPU what the kernels give.

To the bit, where the arithmetic is the same; the optimizers' square roots and quotients are torch's vector code, which
may differ by a unit in the last place, so they are held to 1e-6 (float32) and 1e-14 (float64) of the largest value.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.compat.torch import ATTENTION_ON_CPU, has_kernel
from penstock.native import ops as _registered  # noqa: F401 - registers the operators

ours, composed = torch.ops.penstock, torch.ops.penstock_composed
DTYPES = [torch.float32, torch.float64]


def close(left: Tensor, right: Tensor) -> bool:
    tolerance = 1e-6 if right.dtype == torch.float32 else 1e-14
    return torch.allclose(left, right, rtol=0, atol=tolerance * float(right.abs().max()))


def sparse_gradient(dtype: torch.dtype, count: int = 40, height: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """A table, and rows with many duplicates."""
    random = torch.Generator().manual_seed(count)
    rows = torch.randint(0, height, (count,), generator=random)
    values = torch.randn(count, 5, generator=random, dtype=dtype)
    return torch.randn(height, 5, generator=random, dtype=dtype), rows, values


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_sgd_gives_the_same_bits(dtype: torch.dtype, count: int) -> None:
    table, rows, values = sparse_gradient(dtype, count)
    wanted, got, lr = table.clone(), table.clone(), torch.tensor([0.1])
    ours.sparse_sgd_(wanted, rows, values, lr)
    composed.sparse_sgd_(got, rows, values, lr)
    assert torch.equal(got, wanted)
    assert count == 0 or not torch.equal(got, table)


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_adam_and_adagrad_sum_duplicate_rows_only(dtype: torch.dtype, count: int) -> None:
    table, rows, values = sparse_gradient(dtype, count, height=30)
    lr, step = torch.tensor(0.05), torch.tensor([3.0])
    states = [[table.clone(), torch.rand(30, 5, dtype=dtype) * 0, table.abs()] for _ in range(2)]
    for (param, first, second), op in zip(states, (ours, composed), strict=True):
        op.sparse_adam_(param, first, second, step, rows, values, lr, 0.9, 0.999, 1e-8)
        op.sparse_adagrad_(param, second, rows, values, lr, 1e-6)
    untouched = torch.ones(30, dtype=torch.bool).index_fill_(0, rows, False)
    for wanted, got in zip(*states, strict=True):
        assert close(got, wanted)
    assert torch.equal(states[1][0][untouched], table[untouched])


@pytest.mark.parametrize("settings", [(1e-8, 0.0), (1e-8, 0.01), (0.1, 0.0, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_updates_agree(dtype: torch.dtype, settings: tuple[float, ...]) -> None:
    random = torch.Generator().manual_seed(1)
    start = torch.randn(3, 7, generator=random, dtype=dtype)
    grad, lr, step = torch.randn(3, 7, generator=random, dtype=dtype), torch.tensor(0.01), torch.tensor(2.0)
    sides = [[start.clone(), start * 0.1, start.abs()] for _ in range(2)]
    for (param, first, second), op in zip(sides, (ours, composed), strict=True):
        op.adam_(param, first, second, step, grad, lr, 0.9, 0.999, *settings)
        op.sgd_(param, grad, lr)
    for wanted, got in zip(*sides, strict=True):
        assert close(got, wanted)


@pytest.mark.parametrize("settings", [(1e-8, 0.0), (1e-8, 0.01), (0.1, 0.0, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_of_groups_agree(dtype: torch.dtype, settings: tuple[float, ...]) -> None:
    random = torch.Generator().manual_seed(2)
    starts = [torch.randn(*shape, generator=random, dtype=dtype) for shape in ((3, 7), (5,), (1, 2, 2))]
    grads, lr = [start.cos() for start in starts], torch.tensor(0.01)
    sides = [[[start.clone(), start * 0.1, start.abs()] for start in starts] for _ in range(2)]
    for side, op in zip(sides, (ours, composed), strict=True):
        params, first, second = ([own[k] for own in side] for k in range(3))
        for step in (1.0, 2.0):
            op.fused_adam_(params, first, second, torch.tensor(step), grads, lr, 0.9, 0.999, *settings)
        op.fused_momentum_(params, first, grads, lr, 0.9, step == 2.0)
        op.fused_adagrad_(params, second, grads, lr, 1e-6)
        op.fused_sgd_(params, grads, lr)
    for wanted, got in zip(*sides, strict=True):
        assert all(close(b, a) for a, b in zip(wanted, got, strict=True))
    assert not any(torch.equal(own[0], start) for own, start in zip(sides[1], starts, strict=True))


@pytest.mark.parametrize("kind", ["sum", "average", "sqrt", "max", "first", "last"])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [0, 0], [0, 5], [4], []])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_pools_of_sequences_agree(shape: tuple[int, ...], lengths: list[int], kind: str) -> None:
    random, rows = torch.Generator().manual_seed(len(lengths)), sum(lengths)
    x = torch.randint(-2, 3, (rows, *shape), generator=random).double()  # with ties between rows
    given = torch.tensor(lengths, dtype=torch.int64)
    (wanted, at_wanted), (got, at_got) = (op.sequence_pool(x, given, kind, 7.0) for op in (ours, composed))
    assert torch.allclose(got, wanted, rtol=1e-14)
    assert torch.equal(at_got, at_wanted)
    grad = torch.randn(wanted.shape, generator=random, dtype=torch.float64)
    back = [op.sequence_pool_backward(grad, at_wanted, given, rows, kind) for op in (ours, composed)]
    assert torch.allclose(back[1], back[0], rtol=1e-14)


@pytest.mark.parametrize("kind", ["sequence", "position", "mirror"])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [0, 0], [[4], [1]], []])
def test_rows_of_sequences_agree(lengths: list[int], kind: str) -> None:
    given = torch.tensor(lengths, dtype=torch.int64)
    rows = int(given.sum())
    assert torch.equal(composed.sequence_rows(given, rows, kind), ours.sequence_rows(given, rows, kind))


@pytest.mark.parametrize("order", ["BHTD", "BTHD", "TBHD"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_agrees_and_lies_alike(dtype: torch.dtype, is_causal: bool, masked: bool, order: str) -> None:
    random = torch.Generator().manual_seed(4)
    sizes = {"B": 2, "H": 3, "T": 6, "D": 5}
    q, k, v, grad = (
        torch.randn([sizes[c] for c in order], generator=random, dtype=dtype).permute([order.index(c) for c in "BHTD"])
        for _ in range(4)
    )
    mask = torch.randn(2, 3, 6, 6, generator=random, dtype=dtype) if masked and not is_causal else None
    forward, backward = (getattr(torch.ops.aten, name) for name in ATTENTION_ON_CPU)
    results = []
    for run, back in ((forward, backward), (ours.attention, ours.attention_backward)):
        out, sums = run(q, k, v, 0.0, is_causal, attn_mask=mask, scale=0.3)
        results.append([out, *back(grad, q, k, v, out, sums, 0.0, is_causal, attn_mask=mask, scale=0.3)])
    for wanted, got in zip(*results, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-6)
        assert got.stride() == wanted.stride()  # which views of a recorded program count on


def test_attention_refuses_dropout_and_other_ranks() -> None:
    q = torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError, match="drops by itself"):
        ours.attention(q, q, q, 0.5)
    with pytest.raises(ValueError, match="batch, heads"):
        ours.attention(q[0], q[0], q[0])


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("shape", "batch_dim", "rows_per_sample", "first"),
    [
        ((5, 130), 0, 1, 0),
        ((5, 130), 0, 1, 7),
        ((3, 4, 50), 1, 2, 9),
        ((12, 7), 0, 3, 2),
        ((300,), -1, 1, 5),
        ((0, 4), 0, 1, 1),
    ],
)
def test_dropout_draws_the_same_bits(
    shape: tuple[int, ...], batch_dim: int, rows_per_sample: int, first: int, p: float
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rng = torch.tensor([2**40 + 17, 5, first])
    arguments = (x, rng, p, True, 123, batch_dim, rows_per_sample)
    wanted, got = ours.dropout(*arguments), composed.dropout(*arguments)
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(composed.dropout_backward(x, got[1], p, True), ours.dropout_backward(x, wanted[1], p, True))
    assert torch.equal(composed.dropout(x, rng, p, False, 123, batch_dim, rows_per_sample)[0], x)


def test_lookups_agree_padding_included() -> None:
    table = torch.randn(9, 4)
    ids = torch.tensor([[0, 8], [3, 3]])
    for padding in (-1, 3):
        assert torch.equal(composed.lookup_table(table, ids, padding), ours.lookup_table(table, ids, padding))
    with pytest.raises(IndexError):
        composed.lookup_table(table, torch.tensor([9]))


@pytest.mark.parametrize("columns", [None, 1, 2])
def test_metrics_agree_and_count_alike(columns: int | None) -> None:
    random = torch.Generator().manual_seed(5)
    predict = torch.rand([50] if columns is None else [50, columns], generator=random)
    label = torch.randint(0, 2, (50, 1), generator=random)
    sides = [[torch.zeros(256, dtype=torch.int64) for _ in range(2)] for _ in range(2)]
    for _ in range(2):
        areas = [op.auc(predict, label, *side) for op, side in zip((ours, composed), sides, strict=True)]
        assert torch.equal(areas[0], areas[1])
        assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
    topk = torch.randint(0, 2, (50, 1), generator=random)
    for wanted, got in zip(ours.accuracy(topk, label), composed.accuracy(topk, label), strict=True):
        assert torch.equal(wanted, got)
        assert wanted.dtype == got.dtype


def test_an_area_without_one_of_the_classes_is_zero() -> None:
    stats = [torch.zeros(16, dtype=torch.int64) for _ in range(2)]
    assert float(composed.auc(torch.rand(4), torch.zeros(4, dtype=torch.int64), *stats)) == 0.0


def test_a_prediction_that_is_no_probability_is_refused() -> None:
    stats = [torch.zeros(16, dtype=torch.int64) for _ in range(2)]
    with pytest.raises(RuntimeError, match="no probability"):
        composed.auc(torch.tensor([1.5]), torch.tensor([1]), *stats)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_exchanges_add_in_the_order_of_the_list(count: int) -> None:
    random = torch.Generator().manual_seed(7)
    tensors = [torch.randn(33, generator=random) for _ in range(count)]
    wanted, got = ([t.clone() for t in tensors] for _ in range(2))
    ours.all_reduce_(wanted)
    composed.all_reduce_(got)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    owner = count - 1
    wanted, got = ([t.clone() for t in tensors] for _ in range(2))
    ours.reduce_(wanted, owner)
    composed.reduce_(got, owner)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    composed.broadcast_(got[:-1], tensors[-1])
    assert all(torch.equal(t, tensors[-1]) for t in got[:-1])


def test_a_fused_broadcast_fills_replica_after_replica() -> None:
    sources = [torch.randn(3), torch.randn(2, 2)]
    destinations = [torch.zeros_like(s) for _ in range(2) for s in sources]
    for op in (ours, composed):
        for tensor in destinations:
            tensor.zero_()
        op.fused_broadcast_(destinations, sources)
        assert all(torch.equal(d, sources[i % 2]) for i, d in enumerate(destinations))
    with pytest.raises(ValueError, match="3 destinations for 2 sources"):
        ours.fused_broadcast_(destinations[:3], sources)


def test_gathered_rows_lie_in_the_order_of_the_replicas() -> None:
    parts = [torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])]
    assert ours.gather_rows(parts, 1).tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    "op", ["lookup_table", "sparse_adam_", "adam_", "dropout", "auc", "accuracy", "scale_loss_grad"]
)
def test_cuda_has_a_kernel_of_each(op: str) -> None:
    assert has_kernel(f"penstock::{op}", "CUDA")
