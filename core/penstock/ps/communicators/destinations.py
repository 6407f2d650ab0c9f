"""Where pulled parameters are written to by a background thread.

That is Hogwild, on purpose: who computes with a parameter at that moment sees some elements before the update and some
after it, as asynchronous training allows; each element is written whole. A destination does not keep its memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.compat.torch import StorageWeakRef, storage_behind
from penstock.ps.communicators.background import Route

_Address = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """One tensor, by what it is a view of."""

    storage: StorageWeakRef
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> _View:
        """Remember a tensor."""
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has not typed it
        return _View(storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor | None:
        """Return the tensor, or None if its memory is gone."""
        storage = storage_behind(self.storage)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Destinations:
    """The places to which each variable is pulled: those of several replicas or scopes. Not thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Route, dict[_Address, list[_View]]]] = {}

    def knows(self, variable: str, out: Sequence[Tensor]) -> bool:
        """Whether `out` is a place of the variable. Another tensor at the same address is not."""
        _, places = self._places.get(variable, (None, {}))
        return _alive(places.get(_address(out), [])) is not None

    def add(self, route: Route, out: Sequence[Tensor]) -> None:
        """Make `out` a place of the variable."""
        views = [_View.of(tensor) for tensor in out]
        self._places.setdefault(route.variable, (route, {}))[1][_address(out)] = views

    def routes(self) -> list[Route]:
        """Return the variables that have places."""
        return [route for route, _ in self._places.values()]

    def of(self, variable: str) -> list[list[Tensor]]:
        """Return the places of a variable that are still there, and forget the others."""
        _, places = self._places.get(variable, (None, {}))
        found = []
        for address, views in list(places.items()):
            tensors = _alive(views)
            if tensors is None:
                del places[address]
            else:
                found.append(tensors)
        return found


def _alive(views: list[_View]) -> list[Tensor] | None:
    tensors = [t for t in (v.tensor() for v in views) if t is not None]
    return tensors if views and len(tensors) == len(views) else None


def _address(out: Sequence[Tensor]) -> _Address:
    return tuple(t.data_ptr() for t in out)
