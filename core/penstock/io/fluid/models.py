"""Inference models of Fluid: `__model__` as a Program, whose variables have the names of the model's.

Nothing in a model is executed while it is read: its operators are recorded as `io.fluid.recording` says. Those that
are not there are one error that lists them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import UserError
from penstock.io.fluid import folders, schema
from penstock.io.fluid.blocks import RUNS
from penstock.io.fluid.loading import Saved, load_saved
from penstock.io.fluid.recording import Reader, arguments, attributes, supported
from penstock.io.saves.files import not_read
from penstock.program import layers
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.record.context import program_guard
from penstock.program.training.parameters import constant_state
from penstock.scope import Scope

_ENDS = {"feed", "fetch"}
_STATISTICS = ("Mean", "Variance")


@dataclass(frozen=True, slots=True)
class Model:
    """What `__model__` says: its blocks, of block 0 the variables by name and the operators, what to feed and fetch."""

    path: str
    blocks: list[Any]
    variables: dict[str, Any]
    operators: list[Any]
    feeds: list[str]
    fetches: list[str]

    def persistables(self) -> list[str]:
        """Names of the variables that are saved beside it, sorted."""
        return sorted(
            name for name, var in self.variables.items()
            if var.persistable and var.type.type in (schema.LOD_TENSOR, schema.SELECTED_ROWS)
        )  # fmt: skip


def read_model(path: Path) -> Model:
    """Return the model in a file. Raises UserError for a file that is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise not_read(path, "should be a model of Fluid, but cannot be read", error) from error
    program = schema.parsed("ProgramDesc", content, str(path))
    if not program.blocks:
        raise UserError(f"{path} holds no block of operators; expected a model that Fluid saved", file=str(path))
    block = program.blocks[0]
    for each in program.blocks:
        _check_names(each, str(path))
    ends = {kind: [op for op in block.ops if op.type == kind] for kind in _ENDS}
    return Model(
        str(path),
        list(program.blocks),
        {var.name: var for var in block.vars},
        [op for op in block.ops if op.type not in _ENDS],
        _columns(ends["feed"], lambda op: op.outputs, "Out", str(path)),
        _columns(ends["fetch"], lambda op: op.inputs, "X", str(path)),
    )


def _check_names(block: Any, path: str) -> None:
    """Raise UserError for a name that is no UTF-8: protobuf gives its bytes."""
    names = [var.name for var in block.vars]
    for op in block.ops:
        names.append(op.type)
        for slot in (*op.inputs, *op.outputs):
            names += [slot.parameter, *slot.arguments]
    broken = [name for name in names if not isinstance(name, str)]
    if broken:
        raise UserError(f"{path} has the name {broken[0]!r}, which is no UTF-8; the model is damaged", file=path)


def _columns(ops: Sequence[Any], side: Any, slot: str, path: str) -> list[str]:
    """Names that feed or fetch operators have, in the order of their columns."""
    found = []
    for op in ops:
        names = arguments(side(op)).get(slot)
        if not names:
            raise UserError(f"{path}: an operator {op.type!r} has no {slot!r}; the model is damaged", file=path)
        found.append((attributes(op).get("col", 0), names[0]))
    return [name for _, name in sorted(found)]


def program_of(model: Model) -> tuple[Program, list[str]]:
    """Return the Program of a model and its names of what is fetched.

    Raises UserError for operators, or uses of them, that are not here.
    """
    unknown = sorted({op.type for block in model.blocks for op in block.ops} - set(supported(RUNS)) - _ENDS)
    if unknown:
        raise UserError(
            f"{model.path} has operators that are not in Penstock: {', '.join(unknown)}. Build the network with layers "
            f"and load its parameters with load_params; operators of models: {', '.join(supported(RUNS))}",
            file=model.path,
        )
    program, reader = Program(), Reader(model.path, model.blocks, RUNS)
    for block in model.blocks:
        for var in block.vars:  # a model that was written of a Program has names like those that are given now
            program.reserve(var.name.partition(".tmp_")[0], operator=True)
    with program_guard(program, Program()):
        names = reader.names(0)
        names.own.update({name: _input(model, name) for name in model.feeds})
        names.own.update(_declared(model))
        reader.record(model.operators, names)
    missing = [name for name in model.fetches if name not in names.own]
    if missing:
        raise UserError(f"{model.path}: nothing makes the variables to fetch {missing}", file=model.path)
    return program.clone(for_test=True), [names.own[name].name for name in model.fetches]


def _input(model: Model, name: str) -> Any:
    described = _described(model, name)
    tensor = described.type.lod_tensor.tensor
    dims, dtype = [int(d) for d in tensor.dims], _dtype(model, name, tensor)
    return layers.data(name, dims, False, dtype, described.type.lod_tensor.lod_level)


def _described(model: Model, name: str) -> Any:
    if name not in model.variables:
        raise UserError(f"{model.path}: the variable {name!r} is used, but not described", file=model.path)
    return model.variables[name]


def _dtype(model: Model, name: str, tensor: Any) -> str:
    if tensor.data_type not in schema.DTYPES:
        raise UserError(f"{model.path}: variable {name!r} has a dtype of number {tensor.data_type}", file=model.path)
    return schema.DTYPES[tensor.data_type]


def _declared(model: Model) -> dict[str, Any]:
    """Declare the persistable variables: parameters, and statistics of batch-norm, which are none here."""
    statistics = {
        name
        for block in model.blocks
        for op in block.ops
        if op.type == "batch_norm"
        for slot, names in arguments(op.inputs).items()
        if slot in _STATISTICS
        for name in names
    }
    made: dict[str, Any] = {}
    for name in model.persistables():
        tensor = model.variables[name].type.lod_tensor.tensor
        sizes, dtype = [int(d) for d in tensor.dims], _dtype(model, name, tensor)
        if name in statistics:
            made[name] = constant_state(name, 0.0, dtype, sizes)
        else:
            made[name] = layers.create_parameter(sizes, dtype, name, is_bias=True)
    return made


def load_model(
    folder: Path, scope: Scope, model_filename: str | None = None, params_filename: str | None = None
) -> tuple[Program, list[str], list[VarDesc]]:
    """Return (program, names to feed, variables to fetch) of a model of Fluid, its values put into `scope`.

    Raises UserError; then the scope is unchanged.
    """
    model = read_model(folder / (model_filename or folders.MODEL))
    (program, fetches), names = program_of(model), model.persistables()
    wanted = [var for var in program.variables.values() if var.persistable and var.name not in program.captured]
    if params_filename is not None:
        found = folders.read_combined(folder / params_filename, names)
        saved = Saved(str(folder / params_filename), names, lambda some: {name: found[name] for name in some})
    else:
        saved = Saved(str(folder), names, lambda some: folders.read_separate(folder, some))
    load_saved(saved, program, wanted, scope)
    return program, model.feeds, [program.variables[name] for name in fetches]
