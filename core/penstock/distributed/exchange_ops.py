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


class Exchangers:
    """What `group_*` operators exchange through, by the names that stand in graphs. Its users register and forget."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[Exchanger, int]] = {}

    def register(self, name: str, exchanger: Exchanger, ring: int) -> None:
        """Let operators that name `name` use ring number `ring` of an exchanger."""
        self._by_name[name] = (exchanger, ring)

    def forget(self, name: str) -> None:
        """Undo `register`."""
        self._by_name.pop(name, None)

    def get(self, name: str) -> tuple[Exchanger, int]:
        """Return (exchanger, number of its ring). Raises ValueError."""
        if name not in self._by_name:
            raise ValueError(f"no process group {name!r} is open in this process")
        return self._by_name[name]


exchangers = Exchangers()
"""Of the process: an operator has nothing but the name that stands in its graph."""


def _step(mine: Tensor, ring: str) -> Tensor:
    exchanger, number = exchangers.get(ring)
    return exchanger.step(mine, number)


def _all_reduce(tensors: list[Tensor], replicas: int, step: Tensor, mean: bool, ring: str) -> None:
    exchanger, number = exchangers.get(ring)
    exchanger.all_reduce(tensors, replicas, step, number, mean=mean)


def _gather(rows: Tensor, values: Tensor, step: Tensor, mean: bool, ring: str) -> tuple[Tensor, Tensor]:
    exchanger, number = exchangers.get(ring)
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
