"""Operators by which a program belongs to several trainers, and the way to their group.

`gen_nccl_id` (Fluid's name) stands in a startup program: when it runs, the trainers meet. `collective` marks a program
that they train together. Importing this module registers these operators and those that exchange.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from penstock.distributed.exchange_ops import EXCHANGE_NAMES, library

GEN_ID = "penstock.gen_nccl_id.default"
COLLECTIVE = "penstock.collective.default"


def job() -> ModuleType:
    """Return `penstock.distributed.collective`, which makes the group of trainers."""
    from penstock.distributed import collective  # loads torch.distributed, which one trainer does without

    return collective


def current_group() -> Any:
    """Return the group that this process has joined, or None."""
    return job().current() if f"{__package__}.collective" in sys.modules else None


def _gen_nccl_id(rank: int, endpoints: list[str], num_rings: int, inter: int) -> list[Tensor]:
    job().meet(rank, tuple(endpoints), num_rings=num_rings, inter=inter)
    return [torch.empty(0, dtype=torch.int64) for _ in range(num_rings)]


def _collective(mode: str, rank: int, endpoints: list[str], num_rings: int, inter: int) -> Tensor:
    raise RuntimeError("a program of mode 'collective' is run as a whole: with fluid.Executor, or a CompiledProgram")


_KERNELS: dict[str, tuple[str, Any]] = {
    "gen_nccl_id": ("(int rank, str[] endpoints, int num_rings, int inter) -> Tensor[]", _gen_nccl_id),
    "collective": ("(str mode, int rank, str[] endpoints, int num_rings, int inter) -> Tensor", _collective),
}
COLLECTIVE_NAMES = EXCHANGE_NAMES | set(_KERNELS)
for _name, (_schema, _kernel) in _KERNELS.items():
    library.define(_name + _schema)
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
