"""What passes did to a graph, as plain data that the graph carries with it.

A handle is the same before and after a pass if operator name and replica are: `Key`. The operators and edges that a
pass took away are all that is stored; `graph/earlier.py` makes the part of the graph document of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penstock.protocol.graphdoc import OpKind, RoleName


class Form(NamedTuple):
    """What a handle is besides its name and its operands."""

    type: str
    kind: OpKind
    role: RoleName
    module: str
    source: str


class Key(NamedTuple):
    """A handle. `nth`: among those with this name on this replica, 0 unless a pass gives a name twice."""

    name: str
    replica: int
    nth: int


Edges = frozenset[tuple[Key, Key]]


@dataclass(frozen=True, slots=True)
class AppliedPass:
    """The difference between a graph and the one before. `changed`: handles that stay, with what they were."""

    name: str
    title: str
    removed: tuple[tuple[Key, Form], ...] = ()
    added: tuple[Key, ...] = ()
    changed: tuple[tuple[Key, Form], ...] = ()
    edges_removed: Edges = frozenset()
    edges_added: Edges = frozenset()
