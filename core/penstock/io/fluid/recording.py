"""A model's operators as those of a Program, in the order of their blocks.

Types of `program.framework.kinds` are recorded as when a script appends them, those of `io.fluid.blocks` run blocks of
the model, or work on arrays. Models are at rest: batch-norm uses its running statistics, tables are dense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import ProgramError, UserError
from penstock.io.fluid import schema
from penstock.io.fluid.scopes import Names
from penstock.program.framework.appending import record_into
from penstock.program.framework.kinds.table import KINDS
from penstock.program.record.context import default_main_program
from penstock.program.record.declared import written
from penstock.program.record.opening import recording_of
from penstock.program.record.renaming import rename_recorded

_AT_REST = {"is_test": True, "is_sparse": False, "is_distributed": False}
_DTYPE_ATTRIBUTES = ("dtype", "in_dtype", "out_dtype")
"""Records an operator with its attributes; the reader, and the names of the block that it is in."""
Runs = Callable[["Reader", Any, Names], None]


class Reader:
    """What records the blocks of one model. `runs`: types that are no kinds, with what records them."""

    def __init__(self, path: str, blocks: Sequence[Any], runs: Mapping[str, Runs]) -> None:
        self.path, self.blocks, self._runs = path, blocks, runs

    def names(self, index: int, outer: Names | None = None) -> Names:
        """Return the names of a block, none of which stands for anything yet."""
        return Names(self.path, frozenset(var.name for var in self.blocks[index].vars), outer)

    def record(self, operators: Sequence[Any], names: Names) -> None:
        """Record operators. Raises UserError for what is not supported, and for what nothing has made."""
        for op in operators:
            try:
                self._record(op, names)
            except (ProgramError, UserError) as error:
                if str(error).startswith(self.path):
                    raise
                raise UserError(f"{self.path}: {error}", file=self.path) from error

    def _record(self, op: Any, names: Names) -> None:
        if op.type in self._runs:
            self._runs[op.type](self, op, names)
            return
        inputs = {slot: [names.read(name, op.type) for name in own] for slot, own in arguments(op.inputs).items()}
        attrs = {**attributes(op), **_AT_REST}
        record_into(arguments(op.outputs), op.type, inputs, attrs, lambda name, value: self.write(name, value, names))

    def write(self, name: str, value: Any, names: Names) -> None:
        """Let a name stand for a value: a variable that is there is written."""
        owner = names.owner(name)
        if name in owner.own:
            owner.own[name] = written(owner.own[name], value)
        else:
            owner.own[name] = value if names.outer is not None else _named(name, value)


def supported(runs: Mapping[str, Runs]) -> list[str]:
    """Return the types that a model may have."""
    return sorted({*(name for name, kind in KINDS.items() if not kind.updates), *runs})


def arguments(slots: Iterable[Any]) -> dict[str, list[str]]:
    """Return the names in the slots of an operator."""
    return {slot.parameter: list(slot.arguments) for slot in slots}


def attributes(op: Any) -> dict[str, Any]:
    """Return attributes by name; of those that hold a dtype, its name."""
    found: dict[str, Any] = {}
    for attr in op.attrs:
        value = getattr(attr, schema.ATTRIBUTE_FIELDS.get(attr.type, "i"))
        found[attr.name] = list(value) if hasattr(value, "extend") else value
    return {name: schema.DTYPES.get(v, v) if name in _DTYPE_ATTRIBUTES else v for name, v in found.items()}


def _named(name: str, value: Any) -> Any:
    """Return what was just recorded under the model's name."""
    program = default_main_program()
    if value.name == name:
        return value
    recording = recording_of(program)
    if name in program.variables:
        rename_recorded(recording, program.handle(name).fake, program.unique(f"{name}.inner"))
    rename_recorded(recording, value.fake, name)
    return recording.handle(value.fake)
