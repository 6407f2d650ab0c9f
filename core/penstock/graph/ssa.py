"""Operator handles and the edges between them.

A *physical variable* is a variable on one replica: `name#r`, or plain `name` when all replicas share it.
Every write of a storage makes a new *version*. For a storage s and versions v0, v1, …:

1 read after write   who reads s@v runs after the writer of s@v
2 write after read   the writer of s@v+1 runs after every reader of s@v
3 write after write  the writer of s@v+1 runs after the writer of s@v
4 a view             who reads a view also runs after the operator that made the view

`GraphBuilder.add` derives the edges from these four rules and nothing else; `check.py` proves the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from penstock.program.ir import Operator
from penstock.protocol.graphdoc import OpKind

Mode = Literal["local", "all_reduce", "reduce"]
SHARED = -1


@dataclass(frozen=True, slots=True)
class Physical:
    """A variable on a replica (`replica == SHARED`: on all). `storage`: the physical variable that owns the memory."""

    key: str
    name: str
    replica: int
    storage: str
    persistable: bool
    feed: bool


@dataclass(slots=True)
class OpHandle:
    """One node. `op`: the operator on physical names; `rows_of`: the replica whose sizes its expressions mean."""

    index: int
    kind: OpKind
    op: Operator
    replica: int
    rows_of: int
    before: set[int] = field(default_factory=set)

    def reads(self) -> tuple[str, ...]:
        """Physical names of all operands."""
        return self.op.input_names()

    def makes(self) -> tuple[str, ...]:
        """Physical names of all results."""
        return self.op.output_names()


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """The gradient exchange of one parameter. `owner`: replica that updates it, -1 for every one."""

    parameter: str
    gradient: str
    owner: int
    sparse: bool
    handles: tuple[int, ...]


@dataclass(slots=True)
class Graph:
    """A built graph. `active`: number of replicas that have rows; `num_replicas`: that hold parameters."""

    mode: Mode
    num_replicas: int
    active: int
    handles: list[OpHandle]
    variables: dict[str, Physical]
    syncs: list[SyncPlan]
    owners: dict[str, int]

    def edges(self) -> list[tuple[int, int]]:
        """Return (before, after) pairs, sorted."""
        return sorted((b, h.index) for h in self.handles for b in h.before)


class GraphBuilder:
    """Appends handles in a valid sequential order and derives their edges."""

    def __init__(self) -> None:
        self.handles: list[OpHandle] = []
        self.variables: dict[str, Physical] = {}
        self._writer: dict[str, int] = {}  # storage -> handle that made its newest version
        self._readers: dict[str, set[int]] = {}  # storage -> readers of its newest version
        self._maker: dict[str, int] = {}  # variable -> handle that made it

    def declare(self, variable: Physical) -> str:
        """Add a physical variable; return its key."""
        self.variables[variable.key] = variable
        return variable.key

    def add(self, kind: OpKind, op: Operator, replica: int, rows_of: int) -> OpHandle:
        """Append a handle with the edges that the four rules give."""
        handle = OpHandle(len(self.handles), kind, op, replica, rows_of)
        writes = {self._storage(w) for w in op.writes} | {
            self._storage(o) for o in op.output_names() if not self._is_view(o)
        }
        reads = {self._storage(n) for n in op.input_names()}
        for name in op.input_names():
            handle.before |= _some(self._maker.get(name))  # 4, and 1 for temporaries
        for storage in reads | writes:
            handle.before |= _some(self._writer.get(storage))  # 1 and 3
        for storage in writes:
            handle.before |= self._readers.get(storage, set())  # 2
        handle.before.discard(handle.index)
        self._advance(handle, reads, writes)
        self.handles.append(handle)
        return handle

    def _advance(self, handle: OpHandle, reads: set[str], writes: set[str]) -> None:
        for storage in reads - writes:
            self._readers.setdefault(storage, set()).add(handle.index)
        for storage in writes:
            self._writer[storage] = handle.index
            self._readers[storage] = set()
        for name in handle.makes():
            self._maker[name] = handle.index
            if self._is_view(name):
                self._readers.setdefault(self._storage(name), set()).add(handle.index)

    def _storage(self, key: str) -> str:
        return self.variables[key].storage

    def _is_view(self, key: str) -> bool:
        return self.variables[key].storage != key


def _some(index: int | None) -> set[int]:
    return set() if index is None else {index}


def reduce_edges(handles: Iterable[OpHandle]) -> None:
    """Drop edges that others imply (a before b before c makes a before c superfluous). O(edges x handles / 64)."""
    ancestors: list[int] = []  # bit i of ancestors[j]: i runs before j
    for handle in handles:
        reach = 0
        keep: set[int] = set()
        for before in sorted(handle.before, reverse=True):
            if not reach >> before & 1:
                keep.add(before)
                reach |= ancestors[before] | 1 << before
        handle.before = keep
        ancestors.append(reach)
