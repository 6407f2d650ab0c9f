"""Values of a Program as a dict of arrays: `fluid.load_program_state` and `fluid.set_program_state` (Fluid 1.8)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import UserError
from penstock.exec.parallel import CompiledProgram
from penstock.io.fluid import folders
from penstock.io.fluid.loading import Saved, load_saved, those_in
from penstock.io.fluid.tensors import FluidTensor
from penstock.io.saves.files import read_manifest, read_tensors
from penstock.io.saves.variables import Folder, persistables, plain
from penstock.program.program import Program
from penstock.program.record.context import default_main_program
from penstock.scope import Scope, global_scope, tensor_of

_log = logging.getLogger(__name__)


def get_program_parameter(program: Program) -> list[Any]:
    """Return the parameters of a Program."""
    return list(program.all_parameters())


def get_program_persistable_vars(program: Program) -> list[Any]:
    """Return the variables of a Program that outlive a run."""
    return [one for one in program.list_vars() if one.persistable]


def get_parameter_value(para: Any, executor: object = None) -> np.ndarray:
    """Return the value of a persistable variable in the current scope. Raises ProgramError if it has none."""
    return tensor_of(global_scope(), para.program, para.name).detach().cpu().numpy().copy()


def get_parameter_value_by_name(name: str, executor: object = None, program: Program | None = None) -> np.ndarray:
    """Return the value of a persistable variable, by its name, in the current scope. Raises ProgramError."""
    return get_parameter_value((program or default_main_program()).global_block().var(name), executor)


def load_program_state(model_path: Folder, var_list: Sequence[Any] | None = None) -> dict[str, np.ndarray]:
    """Return the values that `save` wrote under a path, or Fluid's `fluid.save` or `save_vars`, by the names there.

    `var_list`: the variables to read; needed for a file of Fluid that holds all. Raises UserError.
    """
    path = Path(model_path)
    names = None if var_list is None else [v if isinstance(v, str) else v.name for v in var_list]
    found = _stored(path, names)
    absent = [name for name in names or () if name not in found]
    if absent:
        raise UserError(f"{path} has no variables {absent}; it holds {sorted(found)[:5]} and others", file=str(path))
    return {name: value.numpy() for name, value in found.items() if names is None or name in names}


def _stored(path: Path, names: list[str] | None) -> dict[str, torch.Tensor]:
    place = Path(f"{os.fspath(path)}.json")
    if place.is_file():
        manifest = read_manifest(place)
        return read_tensors(place.parent / manifest.values.name, {v.name: v for v in manifest.variables})
    prefix = path.with_suffix("") if path.suffix in (folders.PARAMS, folders.OPTIMIZER, ".pdmodel") else path
    if prefix.with_name(prefix.name + folders.PARAMS).is_file():
        found = folders.read_pickles(prefix)
    elif path.is_dir():
        found = folders.read_separate(path, folders.names_in(path) if names is None else names)
    elif path.is_file() and names is not None:
        found = folders.read_combined(path, names)
    else:
        said = "is one file of all variables; pass var_list" if path.is_file() else "is not there"
        raise UserError(f"{path} {said}: expected what save, fluid.save or save_vars wrote", file=str(path))
    return {name: one.values for name, one in found.items()}


def set_program_state(
    program: Program | CompiledProgram, state_dict: Mapping[str, Any], *, scope: Scope | None = None
) -> None:
    """Set the persistable variables that a dict has, by Penstock's names or Fluid's; the others keep their values.

    Logs a warning of names that are no variable of the Program. Raises UserError for another dtype or shape; then
    nothing has changed.
    """
    whole = plain(program)
    values = {name: FluidTensor(_tensor(name, value)) for name, value in state_dict.items()}
    saved = Saved("set_program_state", list(values), lambda wanted: {name: values[name] for name in wanted})
    used = those_in(saved, whole, persistables(whole))
    load_saved(saved, whole, [whole.variables[name] for name in used], scope or global_scope())
    unused = sorted(set(values) - {theirs for some in used.values() for theirs in some})
    if unused:
        _log.warning("set_program_state: not set, as the program has no such variables: %s", ", ".join(unused))


def _tensor(name: str, value: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"set_program_state: {name!r} is a {type(value).__name__} that no tensor can be ({error}); expected an "
            "array of numbers of at most 64 bits",
            variable=name,
        ) from error
