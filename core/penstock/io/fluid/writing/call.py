"""One recorded call with its operands by the names of torch's schema, as the rules read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.compat.torch import schema_of
from penstock.io.fluid.writing.description import Attribute, Value
from penstock.io.fluid.writing.writer import Inputs, ModelWriter, Unsupported
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Operator, Ref, VarDesc
from penstock.program.kernels import resolve

Result = Value | Sequence[Value | None]
"""What a rule returns: a variable, or one for each result of the call; None for one that Fluid's form has not."""
Rule = Callable[["Call"], Result]


def results_of(op: Operator) -> list[str | None]:
    """Return the names of all results, lists taken apart; None for one that the Program drops."""
    return [name for out in op.outputs for name in (out if isinstance(out, tuple) else (out,))]


class Call:
    """A recorded call, whose operands are variables of the model."""

    def __init__(self, writer: ModelWriter, op: Operator, makers: Mapping[str, Operator]) -> None:
        specs = schema_of(resolve(op)).arguments
        given = dict(zip((spec.name for spec in specs), op.args, strict=False)) | dict(op.kwargs)
        self.args: dict[str, Any] = {spec.name: given.get(spec.name, spec.default_value) for spec in specs}
        self.writer, self.op, self._makers = writer, op, makers

    @property
    def x(self) -> Value:
        """The operand `self`. Raises Unsupported for one that Fluid's form has not."""
        return self.value("self")

    def value(self, key: str) -> Value:
        """Return an operand that is a variable. Raises Unsupported."""
        found = self.optional(key)
        if found is None:
            raise Unsupported(f"its operand {key!r} is {self.args[key]!r}; expected a variable")
        return found

    def optional(self, key: str) -> Value | None:
        """Return an operand that is a variable, or None."""
        given = self.args[key]
        return self.writer.value(given.name) if isinstance(given, Ref) else None

    def values(self, key: str) -> list[Value]:
        """Return the variables of a list."""
        return [self.writer.value(one.name) for one in self.args[key]]

    def number(self, key: str) -> float:
        """Return an operand that is a number. Raises Unsupported for a size that a feed determines."""
        given = self.args[key]
        if isinstance(given, (bool, int, float)):
            return given
        raise Unsupported(f"its operand {key!r} is {given}; expected a number")

    def ints(self, key: str, rank: int = 0) -> list[int]:
        """Return integers; one stands for `rank` of them. Raises Unsupported for sizes that a feed determines."""
        given = self.args[key]
        items = list(given) if isinstance(given, (list, tuple)) else [given]
        if any(isinstance(item, (Expr, Ref)) or item is None for item in items):
            raise Unsupported(f"its operand {key!r} is [{', '.join(map(str, items))}]; expected integers")
        return [int(item) for item in items] * (rank if len(items) == 1 and rank else 1)

    def maker(self, key: str) -> Operator | None:
        """Return the recorded call that makes an operand."""
        given = self.args[key]
        return self._makers.get(given.name) if isinstance(given, Ref) else None

    def behind(self, op: Operator | None, *steps: tuple[int, str]) -> Operator | None:
        """Return the call behind operands: of each (place, kind) the operand there, which such a call has to make.

        A kind is a type without its namespace ("view.default"). None if one is made otherwise.
        """
        for at, kind in steps:
            given = op.args[at] if op is not None and at < len(op.args) else None
            op = self._makers.get(given.name) if isinstance(given, Ref) else None
            if op is None or op.type.partition(".")[2] != kind:
                return None
        return op

    def result(self, index: int = 0) -> VarDesc:
        """Return the description of a result; of one that the Program drops, that of the first that it has."""
        name = results_of(self.op)[index] or self.op.output_names()[0]
        return self.writer.program.variables[name]

    def shape(self, index: int = 0) -> tuple[Dim, ...]:
        """Return the sizes of a result."""
        return tuple(self.result(index).shape)

    def dtype(self, index: int = 0) -> str:
        """Return the dtype of a result."""
        return self.result(index).dtype

    def add(self, kind: str, inputs: Inputs, attrs: Mapping[str, Attribute] | None = None, out: str = "Out") -> Value:
        """Append an operator whose result has the sizes and the dtype of the call's."""
        return self.writer.add(kind, inputs, attrs, shape=self.shape(), dtype=self.dtype(), out=out)

    def axis(self, key: str, rank: int | None = None) -> int:
        """Return an axis counted from the front."""
        (given,), size = self.ints(key), len(self.x.shape) if rank is None else rank
        return given + size if given < 0 else given

    def axes(self, key: str) -> list[int]:
        """Return axes of `self` counted from the front; all for None or none."""
        rank = len(self.x.shape)
        given = range(rank) if not self.args.get(key) and self.args.get(key) != 0 else self.ints(key)
        return [axis + rank if axis < 0 else axis for axis in given]
