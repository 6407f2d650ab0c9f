"""Operators of many tables at once: the bits of single ones, for any number of threads; an error writes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.native import fused_ops as _fused_ops  # noqa: F401 - registers the operators

OPS: Any = torch.ops.penstock
LR = torch.tensor(0.1)
ROWS, LARGE = 9, 30_000


def gradients(height: int, count: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return the ids of two replicas for two tables, and the matrices that have both tables' values in columns."""
    torch.manual_seed(count)
    ids = [torch.randint(0, height, (count, 1)) for _ in range(4)]
    return ids, [torch.randn(count, 40, dtype=dtype) for _ in range(2)]


def gathered(ids: list[Tensor], values: list[Tensor], table: int, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return rows and values of one table, as copies of all replicas' parts."""
    rows = torch.cat([ids[table].flatten(), ids[2 + table].flatten()])
    return rows, torch.cat([value[:, first : first + width] for value in values])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [ROWS, LARGE])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad"])
def test_tables_are_updated_as_one_by_one(kind: str, count: int, num_threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(num_threads)
    ids, values = gradients(50, count, dtype)
    states = [[torch.rand(50, width, dtype=dtype) for _ in range(3)] for width in (16, 5)]
    singles = [[t.clone() for t in state] for state in states]
    pieces = [0, 0, 0, 3, 0, 2, 1, 3, 1, 1, 0, 20, 1, 3, 1, 20]
    params, first, second = (list(one) for one in zip(*states, strict=True))
    step = torch.tensor(3.0)
    if kind == "sgd":
        OPS.fused_sparse_sgd_(params, ids, values, pieces, [], [], LR)
    elif kind == "adam":
        OPS.fused_sparse_adam_(params, first, second, step, ids, values, pieces, [], [], LR, 0.9, 0.999, 1e-8)
    else:
        OPS.fused_sparse_adagrad_(params, first, ids, values, pieces, [], [], LR, 1e-6)
    for table, (state, place) in enumerate(zip(singles, ((3, 16), (20, 5)), strict=True)):
        rows, grad = gathered(ids, values, table, *place)
        if kind == "sgd":
            OPS.sparse_sgd_(state[0], rows, grad, LR)
        elif kind == "adam":
            OPS.sparse_adam_(*state, step, rows, grad, LR, 0.9, 0.999, 1e-8)
        else:
            OPS.sparse_adagrad_(*state[:2], rows, grad, LR, 1e-6)
        assert all(torch.equal(a, b) for a, b in zip(state, states[table], strict=True))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_rows_lie_side_by_side_as_they_were_looked_up(num_threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(num_threads)
    tables = [torch.arange(50 * width).reshape(50, width).to(dtype) for width in (1, 4, 7, 16, 70)]
    ids = [torch.randint(0, 50, (700, 1)) for _ in tables]
    part = torch.randn(3, 700).t().to(dtype)  # strided
    padding = [-1, 3, -1, 0, 49]
    got = OPS.lookup_concat(tables, ids, padding, [part], [0, 4, -1, 1, 2, 3])
    rows = [OPS.lookup_table(t, i.flatten(), p) for t, i, p in zip(tables, ids, padding, strict=True)]
    assert torch.equal(got, torch.cat([rows[0], rows[4], part, *rows[1:4]], 1))


@pytest.mark.parametrize(
    ("pieces", "error", "message"),
    [
        ([0, 0, 0, 30], ValueError, r"values has shape \[9, 40\]; expected 9 rows and columns 30 to 46"),
        ([1, 0, 0, 0, 0, 0, 0, 0], IndexError, "params ascending"),
        ([0, 4, 0, 0], IndexError, r"piece 0 is \(0, 4, 0, 0\)"),
        ([0, 0, 0], ValueError, "4 numbers a piece"),
        ([0, 0, 0, 0, 1, 1, 0, 0], IndexError, "row 7 at position 2 .* outside param 1, which has 5 rows"),
    ],
)
def test_a_wrong_piece_is_refused_before_any_table_changes(pieces: list[int], error: Any, message: str) -> None:
    ids, values = gradients(5, ROWS, torch.float32)
    ids[1][2] = 7
    params = [torch.rand(5, 16), torch.rand(5, 5)]
    before = [p.clone() for p in params]
    with pytest.raises(error, match=message):
        OPS.fused_sparse_sgd_(params, ids, values, pieces, [], [], LR)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_an_id_outside_names_the_lookup() -> None:
    tables, ids = [torch.rand(5, 2), torch.rand(6, 2)], [torch.tensor([0, 4]), torch.tensor([0, 6])]
    with pytest.raises(IndexError, match=r"lookup 1: id 6 at position 1 of ids \[2\] is outside the table"):
        OPS.lookup_concat(tables, ids, [-1, -1], [], [0, 1])


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 4, 7, 16, 70])
def test_bags_are_sums_of_what_is_looked_up(width: int, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    table, lengths = torch.randn(50, width, dtype=dtype), torch.randint(0, 40, (90, 1))
    lengths[7] = lengths[89] = 0
    ids = torch.randint(0, 50, (int(lengths.sum()), 1))
    for padding in (-1, 3):
        rows = OPS.lookup_table(table, ids.flatten(), padding)
        wanted, _ = OPS.sequence_pool(rows, lengths, "sum", -1.5)
        assert torch.equal(OPS.lookup_pool(table, ids, lengths, padding, -1.5)[0], wanted)


def test_bags_that_do_not_fit_are_refused() -> None:
    table, ids = torch.rand(5, 2), torch.tensor([0, 4, 5])
    with pytest.raises(IndexError, match=r"lookup 0: id 5 at position 2 of ids \[3\] is outside the table"):
        OPS.lookup_pool(table, ids, torch.tensor([1, 2]), -1, 0.0)
    with pytest.raises(ValueError, match="add up to 2, but there are 3 rows"):
        OPS.lookup_pool(table, ids.clamp(max=4), torch.tensor([2]), -1, 0.0)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad"])
def test_a_row_of_values_updates_all_rows_of_its_sequence(kind: str) -> None:
    ids, lengths = [torch.randint(0, 9, (7,)), torch.randint(0, 9, (5, 1))], [[3, 0, 4], [1, 4, 0]]
    values, rate = torch.randn(3, 20), LR
    states = [torch.rand(9, 16) for _ in range(3)]
    others = [t.clone() for t in states]
    pieces = [0, 0, 0, 4, 0, 1, 0, 2]
    bags: list[Any] = [ids, [values], pieces, [torch.tensor(own)[:, None] for own in lengths], [0, 1]]
    spread: list[Any] = [
        ids, [values.repeat_interleave(torch.tensor(own), 0) for own in lengths], [0, 0, 0, 4, 0, 1, 1, 2], [], []
    ]  # fmt: skip
    for (param, first, second), given in ((states, bags), (others, spread)):
        if kind == "sgd":
            OPS.fused_sparse_sgd_([param], *given, rate)
        elif kind == "adam":
            OPS.fused_sparse_adam_([param], [first], [second], torch.tensor(3.0), *given, rate, 0.9, 0.999, 1e-8)
        else:
            OPS.fused_sparse_adagrad_([param], [first], *given, rate, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


@pytest.mark.parametrize(
    ("lengths", "ragged", "error", "message"),
    [
        ([4, 4], [0], ValueError, "lengths 0 add up to 8, but there are 9 rows"),
        ([4, 5], [0], ValueError, r"values has shape \[9, 40\]; expected 2 rows"),
        ([4, 5], [1], IndexError, "piece 0 has the lengths 1; there are 1"),
        ([4, 5], [0, 0], ValueError, "got 2 numbers for 1 pieces"),
        ([-1, 10], [0], ValueError, "the length of sequence 0 is -1"),
    ],
)
def test_wrong_lengths_of_a_piece_are_refused(lengths: list[int], ragged: list[int], error: Any, message: str) -> None:
    ids, values = gradients(5, ROWS, torch.float32)
    with pytest.raises(error, match=message):
        OPS.fused_sparse_sgd_([torch.rand(5, 16)], ids, values, [0, 0, 0, 0], [torch.tensor(lengths)], ragged, LR)
