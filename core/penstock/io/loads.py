"""Load the persistable variables of a Program, and inference models: what Penstock saved, or what Fluid did.

A folder that has Penstock's manifest is read as such. Where there is none, files of Fluid 1.5 to 1.8 under the same
names are read: a file for each variable, one for all, the pickles of `fluid.save`, or `__model__`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.exec.parallel import CompiledProgram
from penstock.io.checkpoints.servers import is_server
from penstock.io.fluid.folders import MODEL
from penstock.io.fluid.loading import Saved, load_saved, parameters_in_fluid, saved_by_pickle, saved_in
from penstock.io.saves import inference
from penstock.io.saves.variables import (
    Folder,
    Predicate,
    chosen_variables,
    is_parameter,
    manifest_path,
    persistables,
    plain,
    read_variables,
    scope_of,
)
from penstock.io.servers import load_into_server
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.scope import Scope


def load_vars(
    executor: object,
    dirname: Folder,
    main_program: Program | CompiledProgram | None = None,
    vars: Sequence[Any] | None = None,
    predicate: Predicate | None = None,
    filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Load `vars`, or the persistable variables for which `predicate` holds. A save may hold more than these.

    Raises UserError naming file, variable, got and expected; then the scope is unchanged.
    """
    program = plain(main_program)
    chosen = chosen_variables(program, vars, predicate)
    _read(dirname, filename, program, chosen, scope_of(executor, scope))


def load_params(
    executor: object,
    dirname: Folder,
    main_program: Program | CompiledProgram | None = None,
    filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Load the parameters; from Fluid's files also statistics of batch-norm, which it counts as parameters.

    Errors as `load_vars`.
    """
    program = plain(main_program)
    chosen = chosen_variables(program, None, is_parameter)
    _read(dirname, filename, program, chosen, scope_of(executor, scope), fluids=parameters_in_fluid(program))


def load_persistables(
    executor: object,
    dirname: Folder,
    main_program: Program | CompiledProgram | None = None,
    filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Load all persistable variables, and go on at the step and with the seed of the save; errors as `load_vars`.

    Of a server's program: its rows of them, after its startup program has run (`io/servers.py`).
    """
    program = plain(main_program)
    found = scope_of(executor, scope)
    if is_server(program):
        load_into_server(manifest_path(dirname, filename), program, found)
        return
    _read(dirname, filename, program, persistables(program), found, resumes=True)


def load(
    program: Program | CompiledProgram,
    model_path: Folder,
    executor: object = None,
    var_list: Sequence[Any] | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Load the persistables of a Program (or `var_list`) from what `save` wrote. Errors as `load_vars`."""
    whole = plain(program)
    chosen = persistables(whole) if var_list is None else chosen_variables(whole, var_list, None)
    place, found = Path(f"{os.fspath(model_path)}.json"), scope_of(executor, scope)
    fluids = None if place.is_file() else _fluids(Path(model_path), whole, chosen)
    if fluids is not None:
        load_saved(fluids, whole, chosen, found)
        return
    read_variables(place, whole, chosen, found, resumes=var_list is None)


def _read(
    dirname: Folder,
    filename: str | None,
    program: Program,
    variables: Sequence[VarDesc],
    scope: Scope,
    *,
    resumes: bool = False,
    fluids: Sequence[VarDesc] | None = None,
) -> None:
    """Read variables; `fluids`: those to read from files of Fluid, if they are others."""
    place, wanted = manifest_path(dirname, filename), fluids or variables
    saved = None if place.is_file() else saved_in(Path(dirname), filename, program, wanted)
    if saved is not None:
        load_saved(saved, program, wanted, scope)
        return
    read_variables(place, program, variables, scope, resumes=resumes)


def _fluids(path: Path, program: Program, variables: Sequence[VarDesc]) -> Saved | None:
    """What Fluid saved under a path: pickles, a folder, or one file for all, as `fluid.load` of 1.8 takes them."""
    prefix = path.with_suffix("") if path.suffix in (".pdparams", ".pdopt", ".pdmodel") else path
    found = saved_by_pickle(prefix)
    if found is None and path.is_dir():
        found = saved_in(path, None, program, variables)
    return saved_in(path.parent, path.name, program, variables) if found is None and path.is_file() else found


def load_inference_model(
    dirname: Folder,
    executor: object,
    model_filename: str | None = None,
    params_filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> tuple[Program, list[str], list[VarDesc]]:
    """Return (program, names to feed, variables to fetch) of a saved model, its values put into the scope.

    Raises UserError, with the scope unchanged, for a model that is absent, damaged, or no inference model; of Fluid's
    also for operators that are not here.
    """
    folder, name = Path(dirname), model_filename or MODEL
    if not manifest_path(folder, name).is_file() and (folder / name).is_file():
        from penstock.io.fluid.models import load_model  # layers, which a load of Penstock's own need not import

        return load_model(folder, scope_of(executor, scope), model_filename, params_filename)
    return inference.load_inference_model(dirname, executor, model_filename, params_filename, scope=scope)
