"""Conversion of saves: from Fluid's files to Penstock's, and back. No Program is needed, only names.

State of optimizers is translated by name (`io.fluid.names`), the number of updates to and from powers of the betas. A
LoD or selected rows have no counterpart in a save of Penstock: they become variables `<name>@LOD<level>`, `<name>@ROWS`
and `<name>@HEIGHT` beside the values, from which they are made again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from penstock.errors import UserError
from penstock.io.fluid import folders, models
from penstock.io.fluid.folders import Progress
from penstock.io.fluid.loading import power_in
from penstock.io.fluid.names import from_fluid, powers, powers_kept, state_of, to_fluid, updates_of
from penstock.io.fluid.tensors import FluidTensor
from penstock.io.fluid.writing.model import written_model
from penstock.io.saves.files import read_manifest, read_tensors, saving_to, write_save
from penstock.io.saves.inference import MODEL_NAME, stored_program
from penstock.io.saves.manifest import FORMAT, Manifest, StoredFile, StoredVariable
from penstock.io.saves.variables import manifest_path, persistables, write_variables
from penstock.scope import Scope

_LOD, _ROWS, _HEIGHT = "@LOD", "@ROWS", "@HEIGHT"
_PART = re.compile(rf"(.+)(?:{_LOD}\d+|{_ROWS}|{_HEIGHT})")


@dataclass(frozen=True, slots=True)
class Options:
    """What the files do not say. `filename`: one file for all, of that name. `names_from`: `__model__`, or a text of a
    name a line, for a file for all that is read. `optimizer`: name of Penstock's optimizer. `betas`: Adam's.
    `parameters_only`: of an inference model of Penstock, the values without a `__model__`."""

    filename: str | None = None
    names_from: Path | None = None
    optimizer: str | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    parameters_only: bool = False


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. `names`: of the source with those of the target. `left_out`: of the source."""

    direction: str
    target: str
    names: dict[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def convert(source: Path, target: Path, options: Options, progress: Progress | None = None) -> Converted:
    """Convert a save of Fluid to one of Penstock in the folder `target`, or the other way round, by what `source` is.

    `source`: a folder, a file for all, what `fluid.save` wrote (`model.pdparams`), a folder with `__model__`; of
    Penstock a manifest (`variables.json`), or the folder of one. `target` of Fluid's files: a folder, or
    `<prefix>.pdparams`. An inference model becomes `__model__` and its parameters in a folder, parameters alone as
    `<prefix>.pdparams`. Raises UserError, OSError; a file that was there before is then as it was, or replaced whole.
    """
    place = _manifest_of(source)
    if place is not None:
        manifest = read_manifest(place)
        if manifest.fetches and not options.parameters_only and target.suffix != folders.PARAMS:
            return _model_to_fluid(manifest, place, target, options, progress)
        return _to_fluid(manifest, place, target, options, progress)
    if (source / folders.MODEL).is_file():
        return _model_from_fluid(source, target, options)
    return _from_fluid(source, target, options, progress)


def _manifest_of(source: Path) -> Path | None:
    if source.is_file():
        return source if source.suffix == ".json" else None
    found = [path for path in sorted(source.glob("*.json")) if _is_manifest(path)] if source.is_dir() else []
    if len(found) > 1:
        raise UserError(f"{source} holds several saves: {[p.name for p in found]}. Name one of these files")
    return found[0] if found else None


def _is_manifest(path: Path) -> bool:
    """Whether a file says that it is one: models come with settings in JSON, too."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


# -- from Fluid ------------------------------------------------------------------------------------------------------


def _from_fluid(source: Path, target: Path, options: Options, progress: Progress | None) -> Converted:
    found, others = _read(source, options, progress)
    names = from_fluid(list(found), options.optimizer)
    tensors: dict[str, torch.Tensor] = {}
    for theirs, ours in names.items():
        tensors.update(_parts(ours, found[theirs]))
    steps = _updates(found, names, options)
    tensors.update(steps)
    place = manifest_path(target, options.filename)
    with saving_to(place.parent):
        write_save(place, tensors, lambda values: Manifest(values, _stored(tensors)))
    left_out = sorted({*others, *(set() if steps else set(found) - set(names))})
    return Converted("from-fluid", str(place), names, _shown(tensors), left_out)


def _read(source: Path, options: Options, progress: Progress | None) -> tuple[dict[str, FluidTensor], list[str]]:
    """Return the variables, and the names of files in a folder that are none."""
    if source.suffix in (folders.PARAMS, folders.OPTIMIZER):
        return folders.read_pickles(source.with_suffix("")), []
    if source.is_dir():
        present = folders.names_in(source)
        others = [name for name in present if folders.is_of_another_kind(source / name)]
        names = [name for name in present if name not in others]
        if not names:
            raise UserError(f"{source} holds no variables; expected files that Fluid saved, or a manifest of Penstock")
        return folders.read_separate(source, names, progress), others
    if source.with_name(source.name + folders.PARAMS).is_file():
        return folders.read_pickles(source), []
    if not source.is_file():
        raise UserError(f"{source} is not there; expected a folder or file that Fluid or Penstock saved")
    return folders.read_combined(source, _listed_names(source, options.names_from), progress), []


def _listed_names(source: Path, names_from: Path | None) -> list[str]:
    if names_from is None:
        raise UserError(
            f"{source} is one file of all variables, which has no names: pass --names-from with the {folders.MODEL} "
            "beside it, or with a text of the names, one a line"
        )
    if not names_from.is_file():
        raise UserError(f"{names_from} is not there; expected a {folders.MODEL}, or a text of names")
    content = names_from.read_bytes()
    if b"\0" not in content and b"\n" in content.strip() and names_from.name != folders.MODEL:
        return content.decode().split()
    return models.read_model(names_from).persistables()


def _parts(name: str, saved: FluidTensor) -> dict[str, torch.Tensor]:
    values = saved.values.reshape(()) if name.endswith(".learning_rate") and saved.values.numel() == 1 else saved.values
    found = {name: values, **{f"{name}{_LOD}{i}": torch.from_numpy(level) for i, level in enumerate(saved.lod)}}
    if saved.rows is not None:
        found[name + _ROWS] = torch.from_numpy(np.array(saved.rows))
        found[name + _HEIGHT] = torch.tensor(saved.height)
    return found


def _updates(found: Mapping[str, FluidTensor], names: Mapping[str, str], options: Options) -> dict[str, torch.Tensor]:
    """The number of updates of each optimizer that has powers of betas."""
    counts = {}
    for ours in names.values():
        state = state_of(ours, names.values())
        pair = powers([state.parameter], found) if state is not None else None
        if state is None or pair is None:
            continue
        first, second = (None if one is None else power_in(found[one], one, "the save") for one in pair)
        assert first is not None  # `powers` has found it
        counts[f"{state.optimizer}.step"] = torch.tensor(float(updates_of(first, second, options.betas)))
    return counts


def _model_from_fluid(source: Path, target: Path, options: Options) -> Converted:
    """An inference model; with `filename`, its parameters are in that file."""
    scope = Scope()
    program, feeds, fetches = models.load_model(source, scope, None, options.filename)
    place = manifest_path(target, MODEL_NAME)
    listed = persistables(program)
    write_variables(
        place, program, listed, scope, text=str(program), feeds=feeds, fetches=[var.name for var in fetches]
    )
    values = {v.name: scope.find(v.name) for v in listed}
    shown = _shown({name: value for name, value in values.items() if value is not None})
    return Converted("from-fluid", str(place), {v.name: v.name for v in listed}, shown)


def _stored(tensors: Mapping[str, torch.Tensor]) -> tuple[StoredVariable, ...]:
    return tuple(StoredVariable(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items())


def _shown(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {one.name: f"{one.dtype}{list(one.shape)}" for one in _stored(tensors)}


# -- to Fluid --------------------------------------------------------------------------------------------------------


def _model_to_fluid(
    manifest: Manifest, place: Path, target: Path, options: Options, progress: Progress | None
) -> Converted:
    """An inference model; its `__model__` comes last, so that a folder that has one is whole."""
    model = written_model(stored_program(manifest, place), manifest.feeds, manifest.fetches)
    stored = {one.name: one for one in manifest.variables if one.name in model.parameters}
    values = read_tensors(_beside(place, manifest.values), stored)
    found = {theirs: _joined(ours, values) for ours, theirs in model.parameters.items()}
    _write(target, found, model.parameters, options, progress)
    folders.write_model(target / folders.MODEL, model.content)
    left_out = sorted(one.name for one in manifest.variables if one.name not in stored)
    return Converted("to-fluid", str(target), dict(model.parameters), _fluid_shown(found), left_out)


def _to_fluid(manifest: Manifest, place: Path, target: Path, options: Options, progress: Progress | None) -> Converted:
    stored = {one.name: one for one in manifest.variables}
    values = read_tensors(_beside(place, manifest.values), stored)
    parts = {name for name in stored if (match := _PART.fullmatch(name)) and match[1] in stored}
    names = to_fluid([name for name in stored if name not in parts])
    found = {theirs: _joined(ours, values) for ours, theirs in names.items()}
    found.update(_powers(values, names, options))
    _write(target, found, names, options, progress)
    left_out = sorted(name for name in set(stored) - set(names) - parts if not name.endswith(".step"))
    return Converted("to-fluid", str(target), names, _fluid_shown(found), left_out)


def _fluid_shown(found: Mapping[str, FluidTensor]) -> dict[str, str]:
    return _shown({name: one.values for name, one in found.items()})


def _beside(place: Path, file: StoredFile) -> Path:
    return place.parent / file.name


def _joined(name: str, values: Mapping[str, torch.Tensor]) -> FluidTensor:
    """A variable with its LoD or rows. Fluid has no variable without dimensions: a number becomes [1]."""
    value = values[name].reshape(1) if values[name].dim() == 0 else values[name]
    if name + _ROWS in values:
        return FluidTensor(value, rows=values[name + _ROWS].numpy(), height=int(values[name + _HEIGHT]))
    lod: list[np.ndarray] = []
    while (level := f"{name}{_LOD}{len(lod)}") in values:
        lod.append(values[level].numpy())
    return FluidTensor(value, lod)


def _powers(values: Mapping[str, torch.Tensor], names: Mapping[str, str], options: Options) -> dict[str, FluidTensor]:
    """Powers of the betas of each parameter whose optimizer counts its updates."""
    found = {}
    for name in names:
        state = state_of(name, names)
        count = None if state is None else values.get(f"{state.optimizer}.step")
        if state is None or count is None:
            continue
        for key, beta in zip(powers_kept(state.optimizer, list(names)), options.betas, strict=False):
            power = torch.tensor([beta ** (float(count) + 1.0)], dtype=values[name].dtype)
            found[f"{state.parameter}_{key}_0"] = FluidTensor(power)
    return found


def _write(
    target: Path,
    found: Mapping[str, FluidTensor],
    names: Mapping[str, str],
    options: Options,
    progress: Progress | None,
) -> None:
    _check_kinds(target, found, pickled=target.suffix == folders.PARAMS, combined=options.filename is not None)
    if target.suffix == folders.PARAMS:
        own = {
            theirs for ours, theirs in names.items() if state_of(ours, names) is None and ours[-14:] != ".learning_rate"
        }
        params, state = ({n: one for n, one in found.items() if (n in own) is is_own} for is_own in (True, False))
        folders.write_pickles(target.with_suffix(""), params, state)
    elif options.filename is not None:
        folders.write_combined(target / options.filename, found, progress)
    else:
        folders.write_separate(target, found, progress)


def _check_kinds(target: Path, found: Mapping[str, FluidTensor], *, pickled: bool, combined: bool) -> None:
    """Raise UserError for what Fluid keeps in files of their own alone: selected rows, and of pickles a LoD."""
    rows = sorted(name for name, one in found.items() if one.rows is not None)
    lods = sorted(name for name, one in found.items() if one.lod)
    for names, kind, refused in ((rows, "selected rows", pickled or combined), (lods, "a LoD", pickled)):
        if names and refused:
            raise UserError(
                f"{target}: {names} have {kind}, which Fluid keeps only in a file for each variable. Convert to a "
                "folder, without --filename",
                variable=names[0],
            )
