"""Conditional random fields by going through every sequence of tags: the oracle of the operators over them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from penstock.native import ops as _ops  # noqa: F401 - registers its operators

OPS: Any = torch.ops.penstock
Pairs = list[tuple[Tensor, Tensor]]
CRF_LENGTHS = [3, 0, 1, 4]


def scored(emission: Tensor, transition: Tensor, tags: Sequence[int]) -> Tensor:
    """The score of one sequence's tags."""
    moves = [transition[i + 2, j] for i, j in pairwise(tags)]
    own = [emission[step, tag] for step, tag in enumerate(tags)]
    return torch.stack([transition[0, tags[0]], transition[1, tags[-1]], *moves, *own]).sum()


def random_field(*, padded: bool) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Operands of a field of three tags, and each sequence's own rows and labels."""
    own = torch.tensor(CRF_LENGTHS)
    rows = torch.randn((4, 5, 3) if padded else (8, 3), dtype=torch.float64, requires_grad=True)
    transition = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    label = torch.randint(3, rows.shape[:-1])
    parts = [list(one) if padded else list(torch.split(one, CRF_LENGTHS)) for one in (rows, label)]
    each = [(x[:length], tags[:length]) for x, tags, length in zip(*parts, CRF_LENGTHS, strict=True)]
    return [rows, transition, label[..., None], own[:, None]], each


def ways(emission: Tensor, transition: Tensor) -> dict[tuple[int, ...], Tensor]:
    """The score of every sequence of tags."""
    return {tags: scored(emission, transition, tags) for tags in product(range(3), repeat=len(emission))}


def cost_of_fields() -> tuple[Pairs, Pairs]:
    """Compare costs and gradients with sums over all sequences of tags."""
    values: Pairs = []
    slopes: Pairs = []
    for padded in (False, True):
        operands, each = random_field(padded=padded)
        cost, _ = OPS.linear_chain_crf(*operands)
        wanted = [
            torch.logsumexp(torch.stack(list(ways(x, operands[1]).values())), 0) - scored(x, operands[1], tags.tolist())
            if len(x) else x.new_zeros(())
            for x, tags in each
        ]  # fmt: skip
        theirs = torch.stack(wanted)[:, None]
        weights = torch.arange(1.0, 5.0, dtype=torch.float64)[:, None]
        grads = [torch.autograd.grad((c * weights).sum(), operands[:2]) for c in (cost, theirs)]
        values += [(cost, theirs)]
        slopes += list(zip(*grads, strict=True))
    return values, slopes


def linear_chain_crf() -> Pairs:
    return cost_of_fields()[0]


def linear_chain_crf_backward() -> Pairs:
    return cost_of_fields()[1]


def crf_decoding() -> Pairs:
    found: Pairs = []
    for padded in (False, True):
        (rows, transition, _label, own), each = random_field(padded=padded)
        path = OPS.crf_decoding(rows, transition, own).squeeze(-1)
        parts = list(path) if padded else list(path.split(CRF_LENGTHS))
        for part, (x, _) in zip(parts, each, strict=True):
            if len(x):
                best, _ = max(ways(x, transition).items(), key=lambda one: float(one[1].detach()))
                found.append((part[: len(x)], torch.tensor(best)))
    return found


FIELDS = (linear_chain_crf, linear_chain_crf_backward, crf_decoding)
