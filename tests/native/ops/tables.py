"""Dense formulas of updates, and operators of tables and their rows against them and torch. Imported by tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.native import fused_ops as _fused_ops  # noqa: F401 - registers the operators

OPS: Any = torch.ops.penstock
LR = torch.tensor(0.1)
Pairs = Sequence[tuple[Tensor, Tensor]]
"""What an operator gave, and what torch gives."""


def adam(state: Sequence[Tensor], grad: Tensor, step: int, weight_decay: float = 0.0, hat: float = 0.0) -> list[Tensor]:
    """Adam of torch, or of Fluid with `hat` for epsilon."""
    param, first, second = state
    grad = grad + weight_decay * param
    first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad * grad
    scale, correction = LR / (1 - 0.9**step), math.sqrt(1 - 0.999**step)
    epsilon = hat / correction if hat else 1e-8
    return [param - scale * first / (second.sqrt() / correction + epsilon), first, second]


def adagrad(state: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    moment = state[1] + grad * grad
    return [state[0] - LR * grad / (moment.sqrt() + 1e-6), moment]


def lookup_concat() -> Pairs:
    tables, part = [torch.randn(6, 19), torch.randn(4, 3)], torch.randn(2, 5)
    ids = [torch.tensor([5, 0]), torch.tensor([[3], [1]])]
    got = OPS.lookup_concat(tables, ids, [-1, 1], [part], [1, -1, 0])
    second = torch.nn.functional.embedding(ids[1].flatten(), tables[1]) * torch.tensor([[1.0], [0.0]])
    return [(got, torch.cat([second, part, tables[0][ids[0]]], 1))]


def expect_rows() -> Pairs:
    rows = torch.randn(8, 3)
    return [(OPS.expect_rows(rows, 8), rows)]


def lookup_pool() -> Pairs:
    table, ids, lengths = torch.randn(6, 21, dtype=torch.float64), torch.tensor([5, 0, 5, 1]), torch.tensor([3, 0, 1])
    got, index = OPS.lookup_pool(table, ids, lengths, 0, 0.5)
    rows = torch.stack([table[5] + table[5], torch.full((21,), 0.5, dtype=torch.float64), table[1]])
    return [(got, rows), (index, torch.empty(0, dtype=torch.int64))]


def pieces_of_tables() -> tuple[list[Tensor], list[Tensor], list[int], list[Tensor]]:
    """Return ids, values and pieces of two tables [6, 19] and [4, 3], and the same as dense gradients."""
    ids = [torch.tensor([[5], [0], [5]]), torch.tensor([2, 5]), torch.tensor([1, 1, 3])]
    values = [torch.randn(3, 24), torch.randn(2, 19)]
    dense = [torch.zeros(6, 19), torch.zeros(4, 3)]
    dense[0].index_add_(0, ids[0].flatten(), values[0][:, 2:21]).index_add_(0, ids[1], values[1])
    dense[1].index_add_(0, ids[2], values[0][:, 21:])
    return ids, values, [0, 0, 0, 2, 0, 1, 1, 0, 1, 2, 0, 21], dense


def fused_sparse_sgd_() -> Pairs:
    params, (ids, values, pieces, dense) = [torch.randn(6, 19), torch.randn(4, 3)], pieces_of_tables()
    wanted = [param - LR * grad for param, grad in zip(params, dense, strict=True)]
    OPS.fused_sparse_sgd_(params, ids, values, pieces, [], [], LR)
    return list(zip(params, wanted, strict=True))


def fused_sparse_adam_() -> Pairs:
    ids, values, pieces, dense = pieces_of_tables()
    states = [
        [torch.randn(6, 19), torch.randn(6, 19), torch.rand(6, 19)],
        [torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 3)],
    ]
    touched = [(grad != 0).any(1, keepdim=True) for grad in dense]
    wanted = [
        torch.where(rows, new, old)
        for state, grad, rows in zip(states, dense, touched, strict=True)
        for new, old in zip(adam(state, grad, 2), state, strict=True)
    ]
    lists = [list(one) for one in zip(*states, strict=True)]
    OPS.fused_sparse_adam_(*lists, torch.tensor(2.0), ids, values, pieces, [], [], LR, 0.9, 0.999, 1e-8)
    return list(zip([t for state in states for t in state], wanted, strict=True))


def fused_sparse_adagrad_() -> Pairs:
    ids, values, pieces, dense = pieces_of_tables()
    states = [[torch.randn(6, 19), torch.rand(6, 19)], [torch.randn(4, 3), torch.rand(4, 3)]]
    wanted = [t for state, grad in zip(states, dense, strict=True) for t in adagrad(state, grad)]
    params, moments = zip(*states, strict=True)
    OPS.fused_sparse_adagrad_(list(params), list(moments), ids, values, pieces, [], [], LR, 1e-6)
    return list(zip([t for state in states for t in state], wanted, strict=True))


TABLES = (lookup_concat, lookup_pool, expect_rows, fused_sparse_sgd_, fused_sparse_adam_, fused_sparse_adagrad_)
