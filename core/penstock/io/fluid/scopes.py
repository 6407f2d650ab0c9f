"""The variables of a model's blocks while they are recorded: names to what they stand for.

A name belongs to the innermost block that describes it, as in Fluid: a block writes what is described outside, and what
it describes itself ends with it, even under the name of a variable outside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import UserError


@dataclass
class Names:
    """The names of one block. `described`: those that are the block's own; `outer`: of the block around it."""

    path: str
    described: frozenset[str]
    outer: Names | None = None
    own: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str, type_: str) -> Any:
        """Return what a name stands for. Raises UserError for one that nothing has made."""
        at: Names | None = self
        while at is not None:
            if name in at.own:
                return at.own[name]
            at = at.outer
        raise UserError(
            f"{self.path}: operator {type_!r} reads {name!r}, which no operator before it makes", file=self.path
        )

    def owner(self, name: str) -> Names:
        """Return the names of the block that a variable belongs to."""
        at = self
        while name not in at.described and at.outer is not None:
            at = at.outer
        return at

    def of_others(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that belong to blocks around this one."""
        return [name for name in dict.fromkeys(names) if self.owner(name) is not self]
