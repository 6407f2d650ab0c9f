"""Where Fluid puts saved variables: a file for each in a folder, one file for all, or the pickles of `fluid.save`.

A file for all has no names: its tensors are in the order of the sorted names of what was saved. A name with slashes is
a path below the folder; one that leads out of it is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from penstock.errors import UserError
from penstock.io.fluid.pickles import read_pickle, write_files
from penstock.io.fluid.tensors import FluidTensor, Reading, read_selected_rows, read_tensor, write_tensor
from penstock.io.saves.files import not_read
from penstock.io.saves.manifest import Damaged

MODEL = "__model__"
PARAMS, OPTIMIZER = ".pdparams", ".pdopt"
_VERSION_BYTES = 4
_OURS = (".json", ".safetensors", ".program.txt", ".tmp", PARAMS, OPTIMIZER, ".pdmodel")

Progress = Callable[[str], None]


def is_separate(folder: Path, names: Sequence[str]) -> bool:
    """Whether a folder has a file for one of the variables."""
    return any((folder / name).is_file() for name in names if _is_below(name))


def names_in(folder: Path) -> list[str]:
    """Return the names of the variables that have a file in a folder, sorted: paths below it, with slashes."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.endswith(_OURS) and not name.startswith((MODEL, ".")))


def is_of_another_kind(path: Path) -> bool:
    """Whether a file begins as none of Fluid's variables does, whose version is 0. An empty one is a damaged variable.

    Raises OSError.
    """
    with path.open("rb") as file:
        head = file.read(_VERSION_BYTES)
    return bool(head.strip(b"\0"))


def file_of(folder: Path, name: str) -> Path:
    """Return where a variable lies. Raises UserError for a name that leads out of the folder."""
    if not _is_below(name):
        raise UserError(f"the variable {name!r} has no file below {folder}: its name leads elsewhere", variable=name)
    return folder / name


def _is_below(name: str) -> bool:
    return bool(name) and not name.startswith("/") and "\0" not in name and ".." not in PurePosixPath(name).parts


def read_separate(folder: Path, names: Sequence[str], progress: Progress | None = None) -> dict[str, FluidTensor]:
    """Return variables by name. Raises UserError for one that has no file, or a damaged one."""
    found = {}
    for name in names:
        found[name] = _read_one(file_of(folder, name), name)
        if progress is not None:
            progress(name)
    return found


def _read_one(path: Path, name: str) -> FluidTensor:
    """Return the only tensor of a file. Which kind it is, the file does not say: selected rows are tried second."""
    try:
        with path.open("rb") as file:
            reading = Reading(file, path)
            try:
                return _whole(reading, read_tensor(reading))
            except Damaged as first:
                file.seek(0)
                reading = Reading(file, path)
                try:
                    return _whole(reading, read_selected_rows(reading))
                except Damaged:
                    raise first from None
    except OSError as error:
        raise not_read(
            path, f"should hold the variable {name!r} as Fluid saves it, but cannot be read", error
        ) from error


def _whole(reading: Reading, tensor: FluidTensor) -> FluidTensor:
    if reading.left:
        raise reading.damaged(f"{reading.left} bytes follow its tensor; is it a file of several variables?")
    return tensor


def read_combined(path: Path, names: Sequence[str], progress: Progress | None = None) -> dict[str, FluidTensor]:
    """Return the variables of one file, which has those of the sorted `names`. Raises UserError for another number."""
    try:
        with path.open("rb") as file:
            return dict(_each(Reading(file, path), sorted(names), progress))
    except OSError as error:
        raise not_read(path, "should hold variables as Fluid saves them, but cannot be read", error) from error


def _each(reading: Reading, names: Sequence[str], progress: Progress | None) -> Iterator[tuple[str, FluidTensor]]:
    for index, name in enumerate(names):
        if not reading.left:
            raise UserError(
                f"{reading.path} holds {index} variables; {len(names)} were expected, from {names[0]!r} to "
                f"{names[-1]!r}. A file for all has no names: give the program, or the names, that it was saved with",
                file=reading.path, got=index, expected=len(names),
            )  # fmt: skip
        yield name, read_tensor(reading)
        if progress is not None:
            progress(name)
    if reading.left:
        raise UserError(
            f"{reading.path} holds more than the {len(names)} variables that were expected: {reading.left} bytes are "
            "left. A file for all has no names: give the program, or the names, that it was saved with",
            file=reading.path,
        )


def read_pickles(prefix: Path) -> dict[str, FluidTensor]:
    """Return what `fluid.save(program, prefix)` wrote: parameters and, if there, optimizer state."""
    found = {}
    for suffix in (PARAMS, OPTIMIZER):
        path = prefix.with_name(prefix.name + suffix)
        if suffix == PARAMS or path.is_file():
            found.update({name: FluidTensor(value) for name, value in read_pickle(path).items()})
    return found


def write_separate(folder: Path, variables: Mapping[str, FluidTensor], progress: Progress | None = None) -> None:
    """Write a file for each variable. Raises UserError, OSError."""
    paths = {name: file_of(folder, name) for name in variables}
    for name, variable in variables.items():
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        _replace(paths[name], partial(_write_each, variables={name: variable}, progress=progress))


def write_combined(path: Path, variables: Mapping[str, FluidTensor], progress: Progress | None = None) -> None:
    """Write one file of all variables, in the order of their sorted names. Raises UserError, OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: variables[name] for name in sorted(variables)}
    _replace(path, lambda file: _write_each(file, ordered, progress))


def write_model(path: Path, content: bytes) -> None:
    """Write `__model__`. Raises OSError; a file that was there before is then as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, lambda file: file.write(content))


def write_pickles(prefix: Path, params: Mapping[str, FluidTensor], state: Mapping[str, FluidTensor]) -> None:
    """Write what `fluid.load(program, prefix)` reads in Fluid: both files, or none where an error is raised.

    Without state no file of it stays behind. Raises UserError, OSError.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    parts = {PARAMS: params, **({OPTIMIZER: state} if state else {})}
    write_files(
        {
            prefix.with_name(prefix.name + suffix): {name: one.values for name, one in variables.items()}
            for suffix, variables in parts.items()
        }
    )
    if not state:
        prefix.with_name(prefix.name + OPTIMIZER).unlink(missing_ok=True)


def _write_each(file: BinaryIO, variables: Mapping[str, FluidTensor], progress: Progress | None) -> None:
    for name, variable in variables.items():
        write_tensor(file, variable)
        if progress is not None:
            progress(name)


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
