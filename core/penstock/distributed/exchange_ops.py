"""Operators that exchange gradients between processes through a process group: the `ring_*` by torch.distributed.

`ring_*` (ranks of one host, native) are in native/src/ops/ring_ops.cpp. `group_*` take the same arguments and do the
same through an `Exchanger`, which is registered here under the name that stands in the graph; they take the interpreter
lock, and release it while they wait.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

ROWS, ENDED, SIGNATURE = 0, 1, 2
"""Columns of a rank's announcement of a step; see native/src/ops/ring_ops.cpp."""
HAS_ENDED, BEGINS = 1, 2
"""Values of ENDED, else 0: the rank has no more data; it brings the values of a program that it begins (SIGNATURE: how
many variables, ROWS: their bytes)."""


class Exchanger(Protocol):
    """What makes the exchanges of the operators `group_*`. Arguments are those of the operators."""

    def step(self, mine: Tensor, ring: int) -> Tensor:
        """Return the announcements of every rank for the step that begins, int64[ranks, 3]."""

    def all_reduce(self, tensors: list[Tensor], replicas: int, step: Tensor, ring: int, *, mean: bool) -> None:
        """Make every tensor of a gradient (one for each replica, side by side) the weighted sum over all ranks."""

    def gather(self, rows: Tensor, values: Tensor, step: Tensor, ring: int, *, mean: bool) -> tuple[Tensor, Tensor]:
        """Return rows and weighted values of all ranks, in the order of the ranks."""


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


_KERNELS: dict[str, tuple[str, Any]] = {
    "group_step": ("(Tensor mine, str ring) -> Tensor", _step),
    "group_all_reduce_": (
        "(Tensor(a!)[] tensors, int replicas, Tensor step, bool mean, str ring) -> ()", _all_reduce,
    ),
    "group_gather": (
        "(Tensor rows, Tensor values, Tensor step, bool mean, str ring) -> (Tensor, Tensor)", _gather,
    ),
}  # fmt: skip
EXCHANGE_NAMES = frozenset(_KERNELS)
library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has not typed it
for _name, (_schema, _kernel) in _KERNELS.items():
    library.define(_name + _schema)
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
