"""Random numbers that a Program draws in each run: `penstock::random`.

    random(Tensor rng, SymInt[] size, str kind, float first, float second, int op_seed, bool each_run, int batch_dim,
           int rows, ScalarType dtype) -> Tensor

`rng` int64 [3]: seed of the program, number of the run, first row of the replica. `kind`: uniform in [first, second),
normal with mean `first` and deviation `second`, or truncated_normal. Numbers are a function of seed, run, `op_seed` and
the position in the whole batch alone: `batch_dim` (-1: none) runs along the batch, with `rows` of it for each sample,
so that replicas draw what one would; a replica draws the rows before its own as well. `each_run=False`: every run draws
the same ones, from `op_seed` alone. The result has no gradient.

    distinct_ids(Tensor rng, int below, int num, int op_seed, bool each_run) -> (Tensor ids, Tensor tries)

`num` different ids below `below`, as a log-uniform distribution gives them one after another, int64 [num], and how many
draws that took, those of an id that was there already included, int64 []. All replicas draw the same.
Source of the second: sampler.cc, sample_prob.h (Fluid 1.8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_LIBRARY.define(
    "random(Tensor rng, SymInt[] size, str kind, float first, float second, int op_seed, bool each_run, "
    "int batch_dim, int rows, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(
    "distinct_ids(Tensor rng, int below, int num, int op_seed, bool each_run) -> (Tensor ids, Tensor tries)"
)
KINDS = ("uniform", "normal", "truncated_normal")
_PRIMES = (1000003, 7368787, 15485863)
_MASK = (1 << 62) - 1


def mixed(seed: int, run: int, op_seed: int) -> int:
    """Return the seed of one operator in one run."""
    found = 0
    for value, prime in zip((seed, run, op_seed), _PRIMES, strict=True):
        found = ((found ^ (value + 1)) * prime) & _MASK
        found ^= found >> 29
    return found


def _expect_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"penstock.random: kind is {kind!r}; expected one of {', '.join(KINDS)}")


def _random(
    rng: Tensor,
    size: Sequence[int],
    kind: str,
    first: float,
    second: float,
    op_seed: int,
    each_run: bool,
    batch_dim: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    _expect_kind(kind)
    program, run, row = (int(value) for value in rng.tolist())
    seed = mixed(program, run, op_seed) if each_run else op_seed
    draw = getattr(torch.ops.penstock, kind)
    if batch_dim < 0:
        return draw(list(size), first, second, seed, dtype).to(rng.device)  # type: ignore[no-any-return]  # a Tensor
    before = row * rows
    outer = [before + size[batch_dim], *(n for i, n in enumerate(size) if i != batch_dim)]
    whole = draw(outer, first, second, seed, dtype)[before:]
    own: Tensor = whole.movedim(0, batch_dim).to(rng.device, memory_format=torch.contiguous_format)
    return own.clone(memory_format=torch.contiguous_format) if before else own.contiguous()


def _shape(rng: Tensor, size: Sequence[int], kind: str, *rest: Any) -> Tensor:
    _expect_kind(kind)
    return rng.new_empty(size, dtype=rest[-1])


def log_uniform(numbers: Tensor, below: int) -> Tensor:
    """Return ids below `below` for numbers that are uniform in [0, 1): log((k + 2) / (k + 1)) / log(below + 1) of them
    give k."""
    return (torch.exp(numbers * math.log(below + 1)).to(torch.int64) - 1) % below


def _distinct_ids(rng: Tensor, below: int, num: int, op_seed: int, each_run: bool) -> tuple[Tensor, Tensor]:
    _expect_distinct(below, num)
    program, run, _ = (int(value) for value in rng.tolist())
    seed = mixed(program, run, op_seed) if each_run else op_seed
    count = 2 * num
    while True:
        # Element i follows from the seed and i alone, so a longer draw begins with the shorter one.
        drawn = log_uniform(torch.ops.penstock.uniform([count], 0.0, 1.0, seed, torch.float64), below)
        found = dict.fromkeys(drawn.tolist())
        if len(found) >= num:
            break
        count *= 2
    ids = list(found)[:num]
    tries = 1 + int((drawn == ids[-1]).nonzero()[0])
    return torch.tensor(ids, device=rng.device), torch.tensor(tries, device=rng.device)


def _expect_distinct(below: int, num: int) -> None:
    if not 0 < num <= below:
        raise ValueError(f"penstock.distinct_ids: {num} different ids below {below} cannot be drawn")


def _distinct_shape(rng: Tensor, below: int, num: int, op_seed: int, each_run: bool) -> tuple[Tensor, Tensor]:
    _expect_distinct(below, num)
    return rng.new_empty([num]), rng.new_empty([])


_LIBRARY.impl("random", _random, "CompositeExplicitAutograd")
_LIBRARY.impl("distinct_ids", _distinct_ids, "CompositeExplicitAutograd")
torch.library.register_fake("penstock::random", _shape, lib=_LIBRARY)
torch.library.register_fake("penstock::distinct_ids", _distinct_shape, lib=_LIBRARY)
