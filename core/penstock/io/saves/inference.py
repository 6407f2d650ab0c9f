"""Inference models: what the targets need of a Program at rest, with the values that it reads.

The Program is stored as its text and read by Penstock's own grammar; names of inputs and results are stored in the
manifest. Nothing in a model is executed while it is loaded.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ProgramError, UserError
from penstock.exec.parallel import CompiledProgram
from penstock.io.saves.files import read_manifest
from penstock.io.saves.manifest import Manifest
from penstock.io.saves.variables import (
    Folder,
    assign,
    checked_values,
    manifest_path,
    persistables,
    plain,
    scope_of,
    write_variables,
)
from penstock.program import legality
from penstock.program.ir import VarDesc, unknown_variable
from penstock.program.program import Program, nested_blocks
from penstock.program.pruning import cut_down, needed_for
from penstock.program.sequences import STEPS, levels_of
from penstock.scope import Scope

_log = logging.getLogger(__name__)
MODEL_NAME = "__model__"


def pruned(program: Program, feeds: Sequence[str], targets: Sequence[str]) -> Program:
    """Return a copy with what `targets` need; its inputs are exactly `feeds`, in their order, and lengths of sequences.

    Raises UserError for a target or feed that is not in the Program, and for a needed input that is not in `feeds`.
    """
    _check(program, feeds, targets)
    feeds = [name for feed in feeds for name in _with_lengths(program, feed)]
    kept, needed = needed_for(program, targets)
    for var in program.feeds():
        if var.name in needed and var.name not in feeds:
            raise UserError(
                f"the targets {list(targets)} need the input {var.name!r} (created at {var.source}), but it is not "
                f"among feeded_var_names {list(feeds)}",
                variable=var.name,
            )
    return cut_down(program, kept, needed, feeds)


def _with_lengths(program: Program, feed: str) -> list[str]:
    """Return an input with those that executors feed beside it."""
    steps = [feed + STEPS] if feed + STEPS in program.variables else []
    return [*levels_of(program, feed), feed, *steps]


def _check(program: Program, feeds: Sequence[str], targets: Sequence[str]) -> None:
    if not targets:
        raise UserError("target_vars is empty; expected at least one variable to compute")
    for name in (*feeds, *targets):
        if name not in program.variables:
            raise UserError(unknown_variable(name, program.variables), variable=name)
    for name in feeds:
        if not program.variables[name].feed:
            raise UserError(
                f"feeded_var_names holds {name!r}, which is no input of the program; "
                f"expected some of {[v.name for v in program.feeds()]}",
                variable=name,
            )


def save_inference_model(
    dirname: Folder,
    feeded_var_names: str | Sequence[str],
    target_vars: Any,
    executor: object,
    main_program: Program | CompiledProgram | None = None,
    model_filename: str | None = None,
    params_filename: str | None = None,
    export_for_deployment: bool = True,
    *,
    scope: Scope | None = None,
) -> list[str]:
    """Save what `target_vars` need of the Program at rest; return the targets' names.

    Without `export_for_deployment` the whole Program is saved as it is, to be trained on; then there may be no targets.
    `params_filename` is Fluid's; it has no effect, because values are part of the model's own save.

    Raises UserError for a target that only training makes, for an input that is needed but not named, and for py_func;
    then nothing is written.
    """
    program = plain(main_program)
    feeds = [feeded_var_names] if isinstance(feeded_var_names, str) else list(feeded_var_names)
    targets = [t if isinstance(t, str) else t.name for t in _listed(target_vars)]
    for name in targets:
        program.var(name)
    model = pruned(_at_rest(program, targets), feeds, targets) if export_for_deployment else program
    legality.check(model)
    for op in itertools.chain(model.operators, *(block.operators for _, block in nested_blocks(model))):
        if op.type.startswith("penstock.py_func"):
            raise UserError(
                f"operator {op.name!r} ({op.source}) calls a function of this process, which no file can hold; save "
                "targets that do without py_func, or write it with layers",
                operator=op.name,
            )
    write_variables(
        _place(dirname, model_filename, params_filename), model, persistables(model), scope_of(executor, scope),
        text=str(model), feeds=feeds, fetches=targets,
    )  # fmt: skip
    return targets


def _listed(targets: Any) -> list[Any]:
    return list(targets) if isinstance(targets, (list, tuple)) else [targets]


def _at_rest(program: Program, targets: Sequence[str]) -> Program:
    rest = program.clone(for_test=True)
    for name in targets:
        if name not in rest.variables:
            raise UserError(
                f"target {name!r} (created at {program.variables[name].source}) is made by training alone; "
                "expected a variable of the forward pass",
                variable=name,
            )
    return rest


def _place(dirname: Folder, model_filename: str | None, params_filename: str | None) -> Path:
    if params_filename is not None:
        text = "params_filename %r has no effect; values are part of the model's own save"
        _log.warning(text, params_filename)
    return manifest_path(dirname, model_filename or MODEL_NAME)


def load_inference_model(
    dirname: Folder,
    executor: object,
    model_filename: str | None = None,
    params_filename: str | None = None,
    *,
    scope: Scope | None = None,
) -> tuple[Program, list[str], list[VarDesc]]:
    """Return (program, names to feed, variables to fetch) of a saved model, its values put into the scope.

    Raises UserError, with the scope unchanged, for a model that is absent, damaged, or no inference model.
    """
    place = _place(dirname, model_filename, params_filename)
    manifest = read_manifest(place)
    program = stored_program(manifest, place)
    values = checked_values(manifest, place, program, persistables(program))
    assign(manifest, values, program, scope_of(executor, scope), resumes=False)
    return program, list(manifest.feeds), [program.variables[name] for name in manifest.fetches]


def stored_program(manifest: Manifest, place: Path) -> Program:
    """Return the Program of a saved model. Raises UserError for a save without one, and for a damaged one."""
    if manifest.program is None:
        raise UserError(
            f"{place} holds variables without a model; expected what save_inference_model wrote", file=str(place)
        )
    file = place.parent / manifest.program.name
    try:
        program = Program.parse(file.read_text(encoding="utf-8"))
        legality.check(program)
    except (ProgramError, UnicodeDecodeError) as error:
        raise UserError(f"{file} holds no program: {error}", file=str(file)) from error
    for name in (*manifest.feeds, *manifest.fetches):
        if name not in program.variables:
            raise UserError(
                f"{file}: the manifest names the variable {name!r}, which the program lacks", file=str(file)
            )
    return program
