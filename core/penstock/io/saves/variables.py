"""Save the persistable variables of a Program: Fluid's `save_vars` family, and `save`; what `io.loads` loads.

A save goes to one manifest and one safetensors file; a later one of the same name replaces it as a whole. What a
load needs is read and checked completely before the first variable of the scope changes. Variables are replaced,
not written into, so that replicas of a ParallelExecutor take their copies anew (`Scope.revision`). Buffers that
each replica has for itself are saved as replica 0 has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.errors import UserError
from penstock.exec.feeding import resolved_seed
from penstock.exec.parallel import CompiledProgram, ParallelExecutor
from penstock.io.saves.files import read_manifest, read_tensors, saving_to, store_text, write_save
from penstock.io.saves.manifest import Manifest, ServersPart, StoredFile, StoredVariable, check_wanted
from penstock.program.ir import VarDesc
from penstock.program.program import Program
from penstock.program.record.context import default_main_program
from penstock.scope import Scope, global_scope

DEFAULT_NAME = "variables"
"""Name of a save for which no `filename` is given; `save_params` and `save_persistables` share it, as in Fluid."""

Folder = str | os.PathLike[str]
Predicate = Callable[[VarDesc], bool]


def save_vars(
    executor: object,
    dirname: Folder,
    main_program: Program | CompiledProgram | None = None,
    vars: Sequence[Any] | None = None,
    predicate: Predicate | None = None,
    filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Save `vars`, or the persistable variables for which `predicate` holds, to `<dirname>/<filename>.json`.

    Raises UserError, with nothing written, for a variable without a value; OSError, with the previous save whole.
    """
    program = plain(main_program)
    chosen = chosen_variables(program, vars, predicate)
    place = manifest_path(dirname, filename)
    write_variables(place, program, chosen, scope_of(executor, scope))


def save_params(
    executor: object,
    dirname: Folder,
    main_program: Program | CompiledProgram | None = None,
    filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Save the parameters. Buffers and optimizer state are left out: `save_persistables` has them too."""
    save_vars(executor, dirname, main_program, None, is_parameter, filename, scope=scope)


def save_persistables(
    executor: object,
    dirname: Folder,
    main_program: Program | CompiledProgram | None = None,
    filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> None:
    """Save what a training needs to go on to the bit: parameters, buffers, optimizer state, step and seed."""
    program = plain(main_program)
    found = scope_of(executor, scope)
    write_variables(manifest_path(dirname, filename), program, persistables(program), found, resumes=True)


def save(program: Program | CompiledProgram, model_path: Folder, *, scope: Scope | None = None) -> None:
    """Save the text of a Program and its persistables as `<model_path>.json` with its files. Errors as `save_vars`."""
    whole = plain(program)
    place = Path(f"{os.fspath(model_path)}.json")
    write_variables(place, whole, persistables(whole), scope or global_scope(), resumes=True, text=str(whole))


# -- what is saved -----------------------------------------------------------------------------------


def is_parameter(var: Any) -> bool:
    """Whether a variable, or its description, is a parameter."""
    return bool(getattr(var, "desc", var).parameter)


def is_persistable(var: Any) -> bool:
    """Whether a variable, or its description, outlives a run."""
    return bool(getattr(var, "desc", var).persistable)


def persistables(program: Program) -> list[VarDesc]:
    """Return the variables that outlive a run in this process; tables of parameter servers do not."""
    return [v for v in program.variables.values() if v.persistable and not v.distributed]


def chosen_variables(program: Program, vars: Iterable[Any] | None, predicate: Predicate | None) -> list[VarDesc]:
    """Return the descriptions of `vars` (handles or names), else the persistables that `predicate` takes."""
    if vars is None:
        return [v for v in persistables(program) if predicate is None or predicate(v)]
    chosen = [program.var(v if isinstance(v, str) else v.name) for v in vars]
    for var in chosen:
        if not var.persistable:
            raise UserError(
                f"variable {var.name!r} (created at {var.source}) lives for one step, so it cannot be saved or loaded; "
                "expected a parameter or other persistable variable. Fetch its value instead",
                variable=var.name,
            )
    return chosen


def plain(program: Program | CompiledProgram | None) -> Program:
    """Return the Program behind what a user passes; the default main Program for None."""
    if isinstance(program, CompiledProgram):
        return program._program
    return program if program is not None else default_main_program()


def scope_of(executor: object, scope: Scope | None) -> Scope:
    """Return `scope`, else the one of a ParallelExecutor, else the global one."""
    if scope is None and isinstance(executor, ParallelExecutor):
        return executor.core.memory.scope
    return scope or global_scope()


def manifest_path(dirname: Folder, filename: str | None) -> Path:
    """Return where the manifest of a save lies. Raises UserError for a filename with folders in it."""
    name = filename or DEFAULT_NAME
    if Path(name).name != name:
        raise UserError(f"filename is {name!r}; expected a name without folders, which belong into dirname")
    return Path(dirname) / f"{name}.json"


def write_variables(
    place: Path,
    program: Program,
    variables: Sequence[VarDesc],
    scope: Scope,
    *,
    resumes: bool = False,
    text: str | None = None,
    feeds: Sequence[str] = (),
    fetches: Sequence[str] = (),
    servers: ServersPart | None = None,
) -> None:
    """Write a save. `resumes`: with step and seed, so that training goes on where it was. `servers`: written before."""
    tensors = {var.name: value_of(program, var, scope) for var in variables}
    stored = tuple(
        StoredVariable(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    )
    step, seed = (scope.steps(program), resolved_seed(program)) if resumes else (-1, -1)
    with saving_to(place.parent):
        program_file = None if text is None else store_text(place, text)

        def describe(values: StoredFile) -> Manifest:
            return Manifest(values, stored, program_file, step, seed, tuple(feeds), tuple(fetches), servers)

        write_save(place, tensors, describe)


def value_of(program: Program, var: VarDesc, scope: Scope) -> torch.Tensor:
    """Return the value of a persistable variable. Raises UserError if it has none yet."""
    tensor = scope.find(var.name)
    tensor = program.captured.get(var.name) if tensor is None else tensor
    if tensor is None:
        raise UserError(
            f"variable {var.name!r} (created at {var.source}) has no value to save. "
            "Run the startup program first: exe.run(fluid.default_startup_program())",
            variable=var.name,
        )
    return tensor


def read_variables(
    place: Path, program: Program, variables: Sequence[VarDesc], scope: Scope, *, resumes: bool = False
) -> Manifest:
    """Read and check everything, then replace the variables in the scope."""
    manifest = read_manifest(place)
    assign(manifest, checked_values(manifest, place, program, variables), program, scope, resumes=resumes)
    return manifest


def checked_values(
    manifest: Manifest, place: Path, program: Program, variables: Sequence[VarDesc]
) -> dict[str, torch.Tensor]:
    """Return the values of `variables`. Raises UserError for one that is absent, or of another dtype or shape."""
    wanted = {v.name: (v.dtype, tuple(int(str(d)) for d in v.shape)) for v in variables}
    stored = {v.name: v for v in manifest.variables}
    check_wanted(wanted, stored, str(place), lambda name: program.variables[name].source)
    return read_tensors(place.parent / manifest.values.name, {name: stored[name] for name in wanted})


def assign(
    manifest: Manifest, values: Mapping[str, torch.Tensor], program: Program, scope: Scope, *, resumes: bool
) -> None:
    """Put checked values into the scope, and the Program where it was when saved."""
    for name, tensor in values.items():
        scope.set(name, tensor)
    if resumes and manifest.step >= 0:
        scope.set_steps(program, manifest.step)
        if program.seed == 0:
            program.fresh_seed = manifest.seed
