"""Variables and operators of a model that is written, and the ProgramDesc that they become.

An operator refers to its variables themselves; those that have no name yet get one when the message is made.
Source: framework.proto and the makers of paddle/fluid/operators (Fluid 1.8), the protos of PaddlePaddle 2.6.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.io.fluid import schema
from penstock.program.expr import Dim

TYPES: Mapping[str, int] = {name: number for number, name in schema.DTYPES.items()}
"""Number of each dtype (VarType.Type)."""
_INT, _FLOAT, _STRING, _INTS, _FLOATS, _STRINGS, _BOOL, _LONG, _LONGS, _FLOAT64S = 0, 1, 2, 3, 4, 5, 6, 9, 11, 12
_FEED, _FETCH = "feed", "fetch"


class Long(int):
    """An attribute of 64 bits: Fluid tells LONG from INT."""


class Longs(tuple[int, ...]):
    """A list of them."""


class Float64s(tuple[float, ...]):
    """A list of numbers of 64 bits."""


Attribute = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]


@dataclass(eq=False, slots=True)
class Value:
    """A variable of the model.

    `shape`: sizes that a feed determines are Expr. `owner`: the ragged input whose LoD it has, "" for none.
    `levels`: of an input, the number of its LoD levels. `maker`: the operator that makes it.
    """

    shape: tuple[Dim, ...]
    dtype: str
    owner: str = ""
    name: str = ""
    levels: int = 0
    feed: bool = False
    persistable: bool = False
    maker: FluidOperator | None = None

    def made_by(self, *types: str) -> FluidOperator | None:
        """Return its operator, if that has one of these types."""
        return self.maker if self.maker is not None and self.maker.type in types else None


@dataclass(eq=False, slots=True)
class FluidOperator:
    """An operator of the model: variables by slot, and attributes.

    `problem`: why there is none for a recorded call. `is_needed`: whether or not its outputs are.
    """

    type: str
    inputs: dict[str, list[Value]] = field(default_factory=dict)
    outputs: dict[str, list[Value]] = field(default_factory=dict)
    attrs: dict[str, Attribute] = field(default_factory=dict)
    problem: str = ""
    is_needed: bool = False

    def values(self) -> list[Value]:
        """Return its variables, inputs first."""
        return [value for slots in (self.inputs, self.outputs) for values in slots.values() for value in values]


def needed(operators: Sequence[FluidOperator], results: Iterable[Value]) -> list[FluidOperator]:
    """Return the operators that `results` need, in order."""
    wanted, found = {id(value) for value in results}, []
    for op in reversed(operators):
        if op.is_needed or any(id(value) in wanted for values in op.outputs.values() for value in values):
            found.append(op)
            wanted.update(id(value) for values in op.inputs.values() for value in values)
    return found[::-1]


def program_message(operators: Sequence[FluidOperator], feeds: Sequence[Value], fetches: Sequence[Value]) -> bytes:
    """Return a ProgramDesc of one block, of version 0, as bytes that depend on nothing else.

    Its variables are those of the operators, the feeds and the fetches, in the order of their names.
    """
    program = schema.message("ProgramDesc")()
    program.version.version = 0
    block = program.blocks.add(idx=0, parent_idx=-1)
    used = {id(v): v for v in (*feeds, *fetches, *(value for op in operators for value in op.values()))}
    _give_names(list(used.values()))
    for name, kind in ((_FEED, schema.FEED_MINIBATCH), (_FETCH, schema.FETCH_LIST)):
        block.vars.add(name=name, persistable=True).type.type = kind
    for value in sorted(used.values(), key=lambda value: value.name):
        _add_variable(block, value)
    for column, value in enumerate(feeds):
        _add_operator(block, _FEED, {"X": [_FEED]}, {"Out": [value.name]}, {"col": column})
    for op in operators:
        inputs, outputs = (
            {slot: [v.name for v in vs] for slot, vs in side.items()} for side in (op.inputs, op.outputs)
        )
        _add_operator(block, op.type, inputs, outputs, op.attrs)
    for column, value in enumerate(fetches):
        _add_operator(block, _FETCH, {"X": [value.name]}, {"Out": [_FETCH]}, {"col": column})
    return bytes(program.SerializeToString(deterministic=True))


def _give_names(values: Sequence[Value]) -> None:
    taken, number = {value.name for value in values}, 0
    for value in values:
        while not value.name:
            name = f"{value.maker.type if value.maker else 'value'}.tmp_{number}"
            value.name, number = ("" if name in taken else name), number + 1


def _add_variable(block: Any, value: Value) -> None:
    described = block.vars.add(name=value.name, persistable=value.persistable, need_check_feed=value.feed)
    described.type.type = schema.LOD_TENSOR
    lod_tensor = described.type.lod_tensor
    lod_tensor.lod_level = value.levels or int(bool(value.owner))
    lod_tensor.tensor.data_type = TYPES[value.dtype]
    # Fluid 1.8 has no variable without dimensions: a number is [1]
    lod_tensor.tensor.dims.extend([size if isinstance(size, int) else -1 for size in value.shape or (1,)])


def _add_operator(
    block: Any,
    kind: str,
    inputs: Mapping[str, Sequence[str]],
    outputs: Mapping[str, Sequence[str]],
    attrs: Mapping[str, Attribute],
) -> None:
    op = block.ops.add(type=kind)
    for slots, given in ((op.inputs, inputs), (op.outputs, outputs)):
        for slot, names in sorted(given.items()):
            slots.add(parameter=slot, arguments=names)
    for name, value in sorted({**attrs, "op_role": 0}.items()):
        _add_attribute(op, name, value)


def _add_attribute(op: Any, name: str, value: Attribute) -> None:
    number = attribute_type(value)
    attr = op.attrs.add(name=name, type=number)
    field_name = schema.ATTRIBUTE_FIELDS[number]
    if isinstance(value, (bool, int, float, str)):
        setattr(attr, field_name, value)
    else:
        getattr(attr, field_name).extend(value)


def attribute_type(value: Attribute) -> int:
    """Return the number of an attribute's kind (AttrType). An empty list is one of INTS."""
    if isinstance(value, (bool, Long, Longs, Float64s, str)):
        return {bool: _BOOL, Long: _LONG, Longs: _LONGS, Float64s: _FLOAT64S, str: _STRING}[type(value)]
    if isinstance(value, (int, float)):
        return _INT if isinstance(value, int) else _FLOAT
    first = value[0] if value else 0
    return _STRINGS if isinstance(first, str) else _INTS if isinstance(first, int) else _FLOATS
