"""A server that begins from a save: of a job with any number of servers, or of a training on one machine.

The save of a job is what its servers wrote. Where there is no such part, parameters and the state of their updates are
taken from the values that `fluid.io.save_persistables` or worker 0 wrote, by name. Parameters are all in a save, with
the rows that the program gives them, or it is refused; what else is missing begins anew, and is named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import SpecError, UserError
from penstock.io.saves.files import read_manifest, read_tensors
from penstock.io.saves.manifest import Manifest, ServersPart
from penstock.io.saves.variables import manifest_path, persistables
from penstock.program.program import Program
from penstock.ps.durability.snapshots import ServerSnapshot
from penstock.ps.remote import SPARSE_TABLE
from penstock.serving.storage import NUMBERS, ProgramStorage


def checked_folder(model_dir: str | os.PathLike[str]) -> Path:
    """Return the folder of a save. Raises SpecError for one that is not there or holds none."""
    folder = Path(model_dir)
    name = manifest_path(folder, None).name
    if not (folder / name).is_file():
        raise SpecError(
            f"model_dir {str(folder)!r} holds no save: {name} is not in it (working folder: {Path.cwd()}). Expected "
            "what save_persistables wrote",
            pointer="model_dir",
            got=str(folder),
        )
    return folder


def load(folder: Path, storage: ProgramStorage, program: Program, origin: Program) -> None:
    """Restore what is this server's. `origin`: the program before it was distributed.

    Raises PeerError and UserError for a damaged save, UserError and ProgramError for one of another program.
    """
    place = manifest_path(folder, None)
    manifest = read_manifest(place)
    if manifest.servers is None:
        _load_values(manifest, place, storage, program, origin)
        return
    rows: dict[str, int] = {}
    for part in _parts(folder, manifest.servers):
        for item in ServerSnapshot(part).items():
            parameter = item.name.rpartition("@")[0]
            value = item.tensors.get(parameter)
            rows[parameter] = rows.get(parameter, 0) + (0 if value is None else _num_rows(value.shape))
            storage.restore(item.name, item.tensors)
    _check_rows(folder, rows, storage, program, origin)


def _num_rows(shape: Sequence[object]) -> int:
    return int(str(shape[0])) if shape else 1


def _check_rows(
    place: Path, rows: Mapping[str, int], storage: ProgramStorage, program: Program, origin: Program
) -> None:
    """Raise UserError unless each parameter has as many rows in the save as in the program. Tables may have any."""
    tables = {op.block for op in program.operators if op.type == SPARSE_TABLE}
    for served in storage.description.served:
        name, found = served.parameter, rows.get(served.parameter)
        wanted = _num_rows(origin.variables[name].shape)
        if served.block in tables:
            if found is None:
                _say(f"{place} has no rows of table {name!r}, which begins anew")
        elif found is None:
            raise UserError(
                f"{place} has no variable {name!r}, which the program trains; it has {sorted(filter(None, rows))[:5]}",
                variable=name,
            )
        elif found != wanted:
            raise UserError(
                f"{place} has {found} rows of {name!r}, but the program gives it {wanted}: another program wrote it",
                variable=name,
            )


def _say(what: str) -> None:
    print(f"penstock: {what}", file=sys.stderr)


def _parts(folder: Path, servers: ServersPart) -> list[Path]:
    count = servers.num_servers
    parts = [folder / servers.folder / f"{index}-of-{count}" for index in range(count)]
    missing = [str(part) for part in parts if not part.is_dir()]
    if missing:
        raise UserError(
            f"the save in {folder} is of {count} servers, but {', '.join(missing)} is missing. Servers on several "
            "hosts have to save into a file system that they share, or their parts have to be copied together",
            file=missing[0],
        )
    return parts


def _load_values(manifest: Manifest, place: Path, storage: ProgramStorage, program: Program, origin: Program) -> None:
    values = read_tensors(place.parent / manifest.values.name, {v.name: v for v in manifest.variables})
    tables = {op.block for op in program.operators if op.type == SPARSE_TABLE}
    taken = [served for served in storage.description.served if served.block not in tables]
    found = {served.parameter for served in taken} & values.keys()
    _check_rows(place, {name: _num_rows(values[name].shape) for name in found}, storage, program, origin)
    for parameter in dict.fromkeys(served.parameter for served in taken):
        storage.restore(f"{parameter}@0", values)
    storage.restore(NUMBERS, values)
    keeps_state = storage.description.mode != "geo"
    missing = [v.name for v in persistables(origin) if v.name not in values and keeps_state]
    if missing:
        _say(f"{place} has no values of {', '.join(missing)}, which begin anew")
