"""Operators of training over several processes: the meeting of the ranks, and exchanges by torch.distributed.

`ring_*` (ranks of one host, native) are in src/ops/ring_ops.cpp. `group_*` take the same arguments and do the same
through a process group, which somebody registers here under the name that stands in the graph; they take the
interpreter lock, and give it up while they wait. `gen_nccl_id` (Fluid's name) stands in a startup program: when it
runs, the trainers meet.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch import Tensor

GEN_ID = "penstock.gen_nccl_id.default"
COLLECTIVE = "penstock.collective.default"
ROWS, ENDED, SIGNATURE = 0, 1, 2
"""Columns of what a rank says of a step; see src/ops/ring_ops.cpp."""
HAS_ENDED, BEGINS = 1, 2
"""What ENDED says, else 0: the rank has no more data; it brings the values of a program that it begins (SIGNATURE: how
many variables, ROWS: their bytes)."""


class Exchanger(Protocol):
    """What makes the exchanges of the operators `group_*`. Arguments are those of the operators."""

    def step(self, mine: Tensor, ring: int) -> Tensor:
        """Return what every rank says of the step that begins, int64[ranks, 3]."""

    def all_reduce(self, tensors: list[Tensor], replicas: int, step: Tensor, ring: int, *, mean: bool) -> None:
        """Make every tensor of a gradient (one for each replica, side by side) the weighted sum over all ranks."""

    def gather(self, rows: Tensor, values: Tensor, step: Tensor, ring: int, *, mean: bool) -> tuple[Tensor, Tensor]:
        """Return rows and weighted values of all ranks, in the order of the ranks."""


def job() -> Any:
    """Return what makes the group of trainers, `penstock.distributed.collective`.

    It loads torch.distributed, which one trainer does without, and lies above this package.
    """
    return importlib.import_module("penstock.distributed.collective")


_exchangers: dict[str, tuple[Exchanger, int]] = {}


def register_exchanger(name: str, exchanger: Exchanger, ring: int) -> None:
    """Let `group_*` operators that name `name` use ring number `ring` of an exchanger."""
    _exchangers[name] = (exchanger, ring)


def forget_exchanger(name: str) -> None:
    """Undo `register_exchanger`."""
    _exchangers.pop(name, None)


def _found(name: str) -> tuple[Exchanger, int]:
    if name not in _exchangers:
        raise ValueError(f"no process group {name!r} is open in this process")
    return _exchangers[name]


def _step(mine: Tensor, ring: str) -> Tensor:
    exchanger, number = _found(ring)
    return exchanger.step(mine, number)


def _all_reduce(tensors: list[Tensor], replicas: int, step: Tensor, mean: bool, ring: str) -> None:
    exchanger, number = _found(ring)
    exchanger.all_reduce(tensors, replicas, step, number, mean=mean)


def _gather(rows: Tensor, values: Tensor, step: Tensor, mean: bool, ring: str) -> tuple[Tensor, Tensor]:
    exchanger, number = _found(ring)
    return exchanger.gather(rows, values, step, number, mean=mean)


def _gen_nccl_id(rank: int, endpoints: list[str], num_rings: int, inter: int) -> list[Tensor]:
    job().meet(rank, tuple(endpoints), num_rings=num_rings, inter=inter)
    return [torch.empty(0, dtype=torch.int64) for _ in range(num_rings)]


def _collective(mode: str, rank: int, endpoints: list[str], num_rings: int, inter: int) -> Tensor:
    raise RuntimeError("a program of mode 'collective' is run as a whole: with fluid.Executor, or a CompiledProgram")


_KERNELS: dict[str, tuple[str, Any]] = {
    "group_step": ("(Tensor mine, str ring) -> Tensor", _step),
    "group_all_reduce_": (
        "(Tensor(a!)[] tensors, int replicas, Tensor step, bool mean, str ring) -> ()", _all_reduce,
    ),
    "group_gather": (
        "(Tensor rows, Tensor values, Tensor step, bool mean, str ring) -> (Tensor, Tensor)", _gather,
    ),
    "gen_nccl_id": ("(int rank, str[] endpoints, int num_rings, int inter) -> Tensor[]", _gen_nccl_id),
    "collective": ("(str mode, int rank, str[] endpoints, int num_rings, int inter) -> Tensor", _collective),
}  # fmt: skip
COLLECTIVE_NAMES = frozenset(_KERNELS)
_library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has not typed it
for _name, (_schema, _kernel) in _KERNELS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
