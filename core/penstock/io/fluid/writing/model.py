"""A Program at rest as `__model__` of Fluid: a function of plain data, which reads and writes no file.

Each recorded call becomes operators of Fluid by its rule, and those that the fetches need are written. Calls that have
no rule, or a use of one that Fluid has no form for, are one error that names each with the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import UserError
from penstock.io.fluid.names import to_fluid
from penstock.io.fluid.writing.call import Call, Rule, results_of
from penstock.io.fluid.writing.description import Value, needed, program_message
from penstock.io.fluid.writing.elements import ELEMENTS
from penstock.io.fluid.writing.layouts import LAYOUTS
from penstock.io.fluid.writing.lookups import LOOKUPS
from penstock.io.fluid.writing.networks import NETWORKS
from penstock.io.fluid.writing.sequences import SEQUENCES
from penstock.io.fluid.writing.writer import ModelWriter, Unsupported
from penstock.program.ir import Operator, Structure, VarDesc, unknown_variable
from penstock.program.sequences import ragged_with_rows

RULES: Mapping[str, Rule] = {**ELEMENTS, **LAYOUTS, **LOOKUPS, **NETWORKS, **SEQUENCES}
"""What each recorded call becomes."""
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """`content`: of `__model__`. `parameters`: the Program's names of what lies beside it, with Fluid's, which differ
    for statistics of batch-norm."""

    content: bytes
    parameters: dict[str, str]


def written_model(program: Structure, feeds: Sequence[str], fetches: Sequence[str]) -> WrittenModel:
    """Return the model that makes `fetches` of `feeds`, with variables of the Program's names.

    Lengths of ragged inputs are no feeds in Fluid: they are the LoD of the inputs. Sizes that a feed determines are -1.
    Raises UserError for a name that the Program lacks, and for calls that Fluid's operators do not express.
    """
    for name in (*feeds, *fetches):
        if name not in program.variables:
            raise UserError(unknown_variable(name, program.variables), variable=name)
    writer = ModelWriter(program)
    makers = {name: op for op in program.operators for name in op.output_names()}
    given = [writer.value(name) for name in feeds if program.variables[name].is_data]
    for op in program.operators:
        _write(writer, op, makers)
    results = [_fetched(writer, name) for name in fetches]
    operators = needed(writer.operators, results)
    _refuse([op.problem for op in operators if op.problem])
    values = {id(v): v for v in (*results, *(v for op in operators for v in op.values())) if v.persistable}
    named = to_fluid([value.name for value in values.values()])
    parameters = {value.name: named.get(value.name, value.name) for value in values.values()}
    for value in values.values():
        value.name = parameters[value.name]
    return WrittenModel(program_message(operators, given, results), parameters)


def _write(writer: ModelWriter, op: Operator, makers: Mapping[str, Operator]) -> None:
    """Append what a call becomes; where it becomes nothing, the reason."""
    names, before = results_of(op), len(writer.operators)
    try:
        made = _made(writer, op, makers)
    except Unsupported as error:
        del writer.operators[before:]
        made = [None if name is None else _unwritten(writer.program.variables[name]) for name in names]
        known = [writer.values[name] for name in op.input_names() if name in writer.values]
        writer.append("", {"": known}, {"": [value for value in made if value is not None]}, {})
        writer.operators[-1].problem = str(error)
        writer.operators[-1].is_needed = bool(op.writes)  # others read what it writes under its old name
    for new in writer.operators[before:]:
        if new.problem:
            new.problem = f"{op.type!r} ({op.name}, {op.source or 'no line'}): {new.problem}"
    for name, value in zip(names, made, strict=True):
        if name is not None and value is not None:
            value.name = value.name or name
            writer.values[name] = value


def _unwritten(var: VarDesc) -> Value:
    """What stands for a result that there is no form for, until it is known whether the targets need it."""
    return Value(tuple(var.shape), var.dtype, name=var.name)


def _made(writer: ModelWriter, op: Operator, makers: Mapping[str, Operator]) -> list[Value | None]:
    rule = RULES.get(op.type)
    if rule is None:
        raise Unsupported("no operator of Fluid does the same")
    if op.writes:
        raise Unsupported(f"it writes {', '.join(op.writes)} in place, and variables of a model are written once")
    result = rule(Call(writer, op, makers))
    return [result] if isinstance(result, Value) else list(result)


def _fetched(writer: ModelWriter, name: str) -> Value:
    """The variable to fetch, under its name and with its LoD."""
    try:
        value = writer.value(name)
        shape = writer.program.variables[name].shape
        owner = ragged_with_rows(writer.program, shape[0]) if shape else None
        found = value if owner is None or value.maker is None else writer.with_lod(value, owner.name)
    except Unsupported as error:
        raise UserError(f"the target {name!r} cannot be written for Fluid: {error}", variable=name) from None
    if found is value and value.name != name:
        found = writer.add("assign", {"X": value}, shape=value.shape)
    if found is not value:
        value.name = "" if value.name == name else value.name
        found.name = name
    return found


def _refuse(problems: Sequence[str]) -> None:
    if not problems:
        return
    shown = [*problems[:_MOST_SHOWN], *([f"and {len(problems) - _MOST_SHOWN} more"] * (len(problems) > _MOST_SHOWN))]
    calls = sorted({kind.split(".")[1] for kind in RULES})
    lines = "\n  ".join(shown)
    raise UserError(
        f"Fluid's operators do not express {len(problems)} of the calls that the targets need:\n  {lines}\n"
        f"Choose targets that do without them, or other layers. A model may have: {', '.join(calls)}",
        problems=list(problems),
    )
