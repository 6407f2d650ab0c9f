"""Which server gets which block: RoundRobin, HashName, or a class of the user's.

A dispatcher is asked twice for the same blocks in the same order, with `reset` in between: for gradients and for
parameters, which must agree. Source: ps_dispatcher.py (Fluid 1.8), spec 1.8 and X8.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.errors import SpecError


class PSDispatcher:
    """Base of all dispatchers. A subclass defines `dispatch`; it keeps its state between calls until `reset`."""

    def __init__(self, pserver_endpoints: Sequence[str]) -> None:
        self._eps = list(pserver_endpoints)
        self._step = 0

    @property
    def eps(self) -> list[str]:
        """The servers' endpoints, in the job's order."""
        return self._eps

    def reset(self) -> None:
        """Begin again: the next call of `dispatch` answers as the first one did."""
        self._step = 0

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        """Return the endpoint of each variable. Each has a `name`."""
        raise NotImplementedError(f"{type(self).__name__} has to define dispatch(varlist) -> list of endpoints")


class RoundRobin(PSDispatcher):
    """One after another, going on where the last call ended."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        chosen = []
        for _ in varlist:
            chosen.append(self._eps[self._step % len(self._eps)])
            self._step += 1
        return chosen


class HashName(PSDispatcher):
    """By the CRC-32 of the name: the same on every node and in every run (Python's `hash` of a string is neither)."""

    def dispatch(self, varlist: Sequence[Any]) -> list[str]:
        return [self._eps[zlib.crc32(var.name.encode()) % len(self._eps)] for var in varlist]


def dispatched(dispatcher: PSDispatcher, varlist: Sequence[Any]) -> list[str]:
    """Ask a dispatcher, the user's own included, and check its answer. Raises SpecError."""
    said: object = dispatcher.dispatch(varlist)
    kind = type(dispatcher).__name__
    if not isinstance(said, Iterable) or isinstance(said, str):
        raise SpecError(f"{kind}.dispatch gave {said!r}; expected a list of endpoints, one for each variable")
    answer = list(said)
    if len(answer) != len(varlist):
        raise SpecError(f"{kind}.dispatch gave {len(answer)} endpoints for {len(varlist)} variables; expected one each")
    for var, endpoint in zip(varlist, answer, strict=True):
        if endpoint not in dispatcher.eps:
            raise SpecError(
                f"{kind}.dispatch sends {var.name!r} to {endpoint!r}, which is none of the servers {dispatcher.eps}",
                variable=var.name,
                got=endpoint,
            )
    return answer
