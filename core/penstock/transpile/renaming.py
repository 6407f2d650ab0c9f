"""An operator with other variables in its place: what makes the update of a block from the update of a parameter. Pure.

Names that are not given another one stay. `sizes`: an expression over symbols of the trainer's program, such as its
number of looked-up rows, to what stands for it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.program.expr import Dim, Expr
from penstock.program.ir import Arg, Operator, Output, Ref


@dataclass(frozen=True, slots=True)
class Renaming:
    """New names of variables, and new sizes."""

    names: Mapping[str, str]
    sizes: Mapping[Dim, Dim]

    def name(self, name: str) -> str:
        """Return the new name of a variable."""
        return self.names.get(name, name)

    def dim(self, dim: Dim) -> Dim:
        """Return the new size for a size."""
        return self.sizes.get(dim, dim)

    def arg(self, value: Arg) -> Arg:
        """Return an operand with the new names and sizes. Plain integers are no sizes."""
        if isinstance(value, Ref):
            return Ref(self.name(value.name))
        if isinstance(value, Expr):
            return self.dim(value)
        if isinstance(value, tuple):
            return tuple(self.arg(v) for v in value)
        return value

    def operator(self, op: Operator, name: str, block: int) -> Operator:
        """Return the operator under another name, in another block; it updates no parameter of a trainer's program."""
        return replace(
            op,
            name=name,
            block=block,
            args=tuple(self.arg(a) for a in op.args),
            kwargs=tuple((k, self.arg(v)) for k, v in op.kwargs),
            outputs=tuple(self._output(o) for o in op.outputs),
            writes=tuple(self.name(w) for w in op.writes),
            role_vars=(),
        )

    def _output(self, value: Output) -> Output:
        if isinstance(value, tuple):
            return tuple(self.name(v) for v in value)
        return None if value is None else self.name(value)
