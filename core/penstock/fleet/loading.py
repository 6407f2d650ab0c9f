"""A server that begins from a save: of a job with any number of servers, or of a training on one machine.

The save of a job is what its servers wrote. Where there is no such part, parameters and the state of their updates are
taken from the values that `fluid.io.save_persistables` or worker 0 wrote, by name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from penstock.errors import SpecError, UserError
from penstock.exec.ps_storage import NUMBERS, ProgramStorage
from penstock.fleet.saving import POINTER, SERVERS
from penstock.io.files import read_manifest, read_tensors
from penstock.io.variables import manifest_path
from penstock.native.remote_ops import SPARSE_TABLE
from penstock.program.program import Program
from penstock.ps.snapshot import Snapshot


def checked_folder(model_dir: str | os.PathLike[str]) -> Path:
    """Return the folder of a save. Raises SpecError for one that is not there or holds none."""
    folder = Path(model_dir)
    names = (POINTER, manifest_path(folder, None).name)
    if not any((folder / name).is_file() for name in names):
        raise SpecError(
            f"model_dir {str(folder)!r} holds no save: neither {names[0]} nor {names[1]} is in it (working folder: "
            f"{Path.cwd()}). Expected what save_persistables wrote",
            pointer="model_dir",
            got=str(folder),
        )
    return folder


def load(folder: Path, storage: ProgramStorage, program: Program) -> None:
    """Restore what is this server's. Raises PeerError for a damaged save, UserError for one of another program."""
    pointer = folder / POINTER
    if not pointer.is_file():
        _load_values(manifest_path(folder, None), storage, program)
        return
    for part in _parts(folder, pointer):
        for item in Snapshot(part).items():
            storage.restore(item.name, item.tensors)


def _parts(folder: Path, pointer: Path) -> list[Path]:
    try:
        said = json.loads(pointer.read_text())
        name, count = str(said["folder"]), int(said["num_servers"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{pointer} is damaged: {error!r}", file=str(pointer)) from error
    parts = [folder / SERVERS / name / f"{index}-of-{count}" for index in range(count)]
    missing = [str(part) for part in parts if not part.is_dir()]
    if missing:
        raise UserError(
            f"the save in {folder} is of {count} servers, but {', '.join(missing)} is missing. Servers on several "
            "hosts have to save into a file system that they share, or their parts have to be copied together",
            file=missing[0],
        )
    return parts


def _load_values(place: Path, storage: ProgramStorage, program: Program) -> None:
    manifest = read_manifest(place)
    values = read_tensors(place.parent / manifest.values.name, {v.name: v for v in manifest.variables})
    tables = {op.block for op in program.operators if op.type == SPARSE_TABLE}
    for served in storage.description.served:
        if served.block in tables:
            print(f"penstock: {place} has no rows of table {served.parameter!r}, which begins anew", file=sys.stderr)
        elif served.parameter not in values:
            raise UserError(
                f"{place} has no variable {served.parameter!r}, which the program trains; it has {sorted(values)[:5]}",
                variable=served.parameter,
            )
        else:
            storage.restore(f"{served.parameter}@0", values)
    storage.restore(NUMBERS, values)
