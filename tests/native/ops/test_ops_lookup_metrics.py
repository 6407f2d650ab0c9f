"""Table lookup against torch's embedding; AUC against scikit-learn; accuracy against a count."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from tests.support import typed_ops as ops
from torch import Tensor


@settings(max_examples=80, deadline=None)
@given(
    shape=st.sampled_from([[], [0], [1], [33], [5, 1], [2, 3, 4]]),
    width=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8]),
    padding=st.integers(-1, 8),
)
def test_lookup_equals_embedding_with_zero_padding_rows(
    shape: list[int], width: int, dtype: torch.dtype, padding: int
) -> None:
    table = (torch.randn(9, width) * 50).to(dtype)
    ids = torch.randint(0, 9, shape)
    expected = table[ids]
    expected[ids == padding] = 0
    assert torch.equal(ops.lookup_table(table, ids, padding), expected)


def test_lookup_reads_tables_and_ids_of_any_layout() -> None:
    table, ids = torch.randn(4, 9).t(), torch.randint(0, 9, (6, 5)).t()
    assert torch.equal(ops.lookup_table(table, ids), torch.nn.functional.embedding(ids, table))


def test_a_long_lookup_is_the_same_with_two_threads() -> None:
    table, ids = torch.randn(5000, 10), torch.randint(0, 5000, (50_000,))
    torch.set_num_threads(2)
    assert torch.equal(ops.lookup_table(table, ids), table[ids])


def _buckets(num_thresholds: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_thresholds + 1, dtype=torch.int64), torch.zeros(num_thresholds + 1, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), batches=st.integers(1, 4), columns=st.integers(0, 2))
def test_auc_of_bucketed_predictions_equals_scikit_learn(
    dtype: torch.dtype, seed: int, batches: int, columns: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    positive, negative = _buckets(256)
    scores: list[Tensor] = []
    labels: list[Tensor] = []
    area = torch.tensor(-1.0)
    for _ in range(batches):
        # Multiples of 1/256 fall on the buckets exactly, so that bucketing loses nothing and both areas are the same.
        score = torch.randint(0, 257, (40,), generator=generator).to(dtype) / 256
        label = torch.randint(0, 2, (40,), generator=generator)
        label[:2] = torch.tensor([0, 1])
        predict = {0: score, 1: score[:, None], 2: torch.stack([1 - score, score], 1)}[columns]
        area = ops.auc(predict, label[:, None] if columns else label, positive, negative)
        scores.append(score)
        labels.append(label)
    assert area.dtype == torch.float64
    assert area.dim() == 0
    expected = roc_auc_score(torch.cat(labels).numpy(), torch.cat(scores).numpy())
    assert math.isclose(area.item(), expected, rel_tol=1e-12)
    assert int(positive.sum() + negative.sum()) == 40 * batches


def test_auc_is_zero_until_both_classes_were_seen() -> None:
    positive, negative = _buckets(10)
    assert ops.auc(torch.tensor([0.3, 0.9]), torch.tensor([1, 1]), positive, negative).item() == 0
    assert ops.auc(torch.tensor([0.1]), torch.tensor([0]), positive, negative).item() == 1


def test_auc_takes_the_rounding_of_a_softmax_as_one() -> None:
    positive, negative = _buckets(10)
    ops.auc(torch.tensor([1.0 + 1.2e-7, -1e-9]), torch.tensor([1, 0]), positive, negative)
    assert positive[10] == 1
    assert negative[0] == 1


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 50), k=st.integers(1, 5), seed=st.integers(0, 1000))
def test_accuracy_counts_rows_that_hold_their_label(rows: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    topk = torch.rand(rows, 7, generator=generator).topk(k, 1).indices
    label = torch.randint(0, 7, (rows, 1), generator=generator)
    share, correct, total = ops.accuracy(topk, label)
    expected = int((topk == label).any(1).sum())
    assert (correct.item(), total.item()) == (expected, rows)
    assert correct.dtype == total.dtype == torch.int32
    assert share.item() == torch.tensor(expected / rows, dtype=torch.float32).item()


def test_accuracy_of_no_rows_is_zero() -> None:
    share, correct, total = ops.accuracy(torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 1, dtype=torch.int64))
    assert (share.item(), correct.item(), total.item()) == (0, 0, 0)


def test_scale_loss_grad_fills_a_tensor_like_the_loss() -> None:
    loss = torch.zeros(2, 3, dtype=torch.float64)
    seed = ops.scale_loss_grad(loss, 0.25)
    assert torch.equal(seed, torch.full_like(loss, 0.25))
    assert not loss.any()
