"""Operator handles and the edges between them.

A *physical variable* is a variable on one replica: `name#r`, or plain `name` when all replicas share it.
Every write of a storage makes a new *version*. For a storage s and versions v0, v1, …:

1 read after write   a reader of s@v runs after the writer of s@v
2 write after read   the writer of s@v+1 runs after every reader of s@v
3 write after write  the writer of s@v+1 runs after the writer of s@v
4 a view             a reader of a view also runs after the operator that made the view

A version has one writer, or several that write disjoint parts of it (`are_disjoint`), in no order among themselves.
`GraphBuilder.add` derives the edges from these four rules and nothing else; `check.py` proves the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.graph.applied import AppliedPass, Key
from penstock.program.ir import Operator

if TYPE_CHECKING:
    from penstock.protocol.graphdoc import OpKind

Mode = Literal["local", "all_reduce", "reduce"]
SHARED = -1
PARTS = {
    "penstock.all_reduce_.default": "penstock.all_reduce_.part",
    "penstock.reduce_.default": "penstock.reduce_.part",
}
"""Operators that can be cut into parts, and what each part is: the same with `part, num_parts` as last arguments."""


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
    """One node. `op`: the operator on physical names; `rows_of`: the replica whose sizes its expressions mean.

    `control`: handles that run before it although no storage requires it (a pass does); they are in `before` too,
    as far as other edges do not imply them. `parts`: of a handle that a pass has put in the place of several, the
    operators that were recorded, in the order in which its errors number them.
    """

    index: int
    kind: OpKind
    op: Operator
    replica: int
    rows_of: int
    before: set[int] = field(default_factory=set)
    control: frozenset[int] = frozenset()
    parts: tuple[Operator, ...] = ()

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
    """A built graph. `active`: number of replicas that have rows; `num_replicas`: that hold parameters.

    `homes`: the replica whose copy of a persistable variable the scope keeps, where it is not the first.
    `applied`: the passes that made it, in order, where they were recorded.
    """

    mode: Mode
    num_replicas: int
    active: int
    handles: list[OpHandle]
    variables: dict[str, Physical]
    syncs: list[SyncPlan]
    owners: dict[str, int]
    homes: dict[str, int] = field(default_factory=dict)
    applied: tuple[AppliedPass, ...] = ()

    def edges(self) -> list[tuple[int, int]]:
        """Return (before, after) pairs, sorted."""
        return sorted((b, h.index) for h in self.handles for b in h.before)


def keys_of(graph: Graph) -> list[Key]:
    """Return the key of each handle, in order: what it is called before and after a pass."""
    seen: Counter[tuple[str, int]] = Counter()
    keys = []
    for handle in graph.handles:
        place = (handle.op.name, handle.replica)
        keys.append(Key(*place, seen[place]))
        seen[place] += 1
    return keys


def are_disjoint(left: Operator, right: Operator) -> bool:
    """Whether two operators are different parts of one, so that they touch different elements of the same tensors."""
    if left.type != right.type or left.type not in PARTS.values():
        return False
    (*same, mine, count), (*others, other, total) = left.args, right.args
    return same == others and count == total and mine != other


class GraphBuilder:
    """Appends handles in a valid sequential order and derives their edges."""

    def __init__(self) -> None:
        self.handles: list[OpHandle] = []
        self.variables: dict[str, Physical] = {}
        self._writers: dict[str, set[int]] = {}  # storage -> handle that made its newest version, or those of its parts
        self._earlier: dict[str, set[int]] = {}  # storage -> handles that a writer of its newest version waits for
        self._readers: dict[str, set[int]] = {}  # storage -> readers of its newest version
        self._maker: dict[str, int] = {}  # variable -> handle that made it

    def declare(self, variable: Physical) -> str:
        """Add a physical variable; return its key."""
        self.variables[variable.key] = variable
        return variable.key

    def add(
        self, kind: OpKind, op: Operator, replica: int, rows_of: int, control: frozenset[int] = frozenset()
    ) -> OpHandle:
        """Append a handle with the edges that the four rules give, and those from the handles `control`."""
        handle = OpHandle(len(self.handles), kind, op, replica, rows_of, set(control), control)
        writes = {self._storage(w) for w in op.writes} | {
            self._storage(o) for o in op.output_names() if not self._is_view(o)
        }
        reads = {self._storage(n) for n in op.input_names()}
        for name in op.input_names():
            handle.before |= _some(self._maker.get(name))  # 4, and 1 for temporaries
        joined = {s for s in writes if self._joins(op, s)}
        for storage in (reads | writes) - joined:
            handle.before |= self._writers.get(storage, set())  # 1 and 3
        for storage in joined:
            handle.before |= self._earlier[storage]  # 3
        for storage in writes:
            handle.before |= self._readers.get(storage, set())  # 2
        handle.before.discard(handle.index)
        self._advance(handle, reads, writes, joined)
        self.handles.append(handle)
        return handle

    def _joins(self, op: Operator, storage: str) -> bool:
        """Whether an operator writes one more part of the newest version."""
        writers = self._writers.get(storage, set())
        return bool(writers) and all(are_disjoint(op, self.handles[w].op) for w in writers)

    def _advance(self, handle: OpHandle, reads: set[str], writes: set[str], joined: set[str]) -> None:
        for storage in reads - writes:
            self._readers.setdefault(storage, set()).add(handle.index)
        for storage in writes:
            if storage not in joined:
                self._earlier[storage] = self._writers.get(storage, set()) | self._readers.get(storage, set())
                self._writers[storage] = set()
            self._writers[storage].add(handle.index)
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
