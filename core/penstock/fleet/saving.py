"""What fleet saves, and a server that begins from it.

A save of a job is a folder: `variables.json` with its values, written by worker 0 as `fluid.io` does it (parameters as
the servers have them, and what the worker keeps itself), and in `servers/` a folder of this save's own, into which each
server writes its part, state of the updates and tables included. `variables.json` names that too, and comes last, so
that a save that breaks off anywhere leaves the one before, as a whole. Parts name rows by where they are in the whole
variable, so that any number of servers can take them back. Servers on several hosts need a file system that they share.

A save without such parts (`fluid.io.save_persistables`, or worker 0 alone) gives parameters and the state of their
updates by name. Parameters are all in a save, with the rows that the program gives them, or it is refused; what else
is missing begins anew, and is named.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.errors import SpecError, UserError
from penstock.exec.parallel import CompiledProgram, ParallelExecutor
from penstock.fleet.strategy import StrategyTypeError
from penstock.io.saves import inference
from penstock.io.saves.files import flush, read_manifest, read_tensors
from penstock.io.saves.inference import pruned
from penstock.io.saves.manifest import Manifest, ServersPart
from penstock.io.saves.variables import manifest_path, persistables, write_variables
from penstock.logger import warn_once
from penstock.program.program import Program
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import descriptor_of, remotes
from penstock.ps.durability.server_snapshots import ServerSnapshot
from penstock.ps.remote import SPARSE_TABLE
from penstock.scope import Scope, global_scope
from penstock.serving.storage import NUMBERS, ProgramStorage
from penstock.transpile.remote_variables import RemoteVariable, remote_variables

_log = logging.getLogger(__name__)
SERVERS = "servers"
_ROWS_AT_ONCE = 1 << 16


def checked_arguments(call: str, executor: object, main_program: object) -> Program:
    """Return the program. Raises StrategyTypeError, and SpecError for a program that talks to no servers."""
    if isinstance(executor, ParallelExecutor) or not hasattr(executor, "run"):
        raise StrategyTypeError(
            f"fleet.{call} is given the executor {executor!r}; expected a fluid.Executor", got=str(executor)
        )
    if isinstance(main_program, CompiledProgram) or not isinstance(main_program, Program):
        raise StrategyTypeError(
            f"fleet.{call} is given a {type(main_program).__name__} as main_program; expected fleet.main_program",
            got=str(main_program),
        )
    descriptor_of(main_program)
    return main_program


def saves(worker: int, call: str, fleet: object) -> bool:
    """Return whether this worker saves: the first one does, for all. Another one logs once a fleet that it does not."""
    if worker:
        warn_once(_log, f"fleet.{call}: worker {worker} saves nothing; worker 0 saves for the whole job", fleet)
    return worker == 0


def save_persistables(folder: Path, program: Program, startup: Program, origin: Program) -> None:
    """Write a save of the job. Raises Unavailable, PeerError, OSError; an earlier save stays whole then."""
    values = _values(program, startup, origin)
    kept = [v for v in persistables(origin) if values.find(v.name) is not None]
    parts = folder / SERVERS / str(time.time_ns())
    parts.mkdir(parents=True)
    _client(program).save(str(parts.absolute()))
    flush(parts.parent)
    written = ServersPart(f"{SERVERS}/{parts.name}", len(descriptor_of(program).endpoints))
    write_variables(manifest_path(folder, None), origin, kept, values, resumes=True, servers=written)
    for other in (folder / SERVERS).iterdir():
        if other.name != parts.name:
            shutil.rmtree(other)


def save_inference_model(
    folder: Path, feeds: str | Sequence[str], targets: Any, program: Program, startup: Program, origin: Program
) -> None:
    """Write the model. Raises SpecError for one that needs a table of any ids."""
    listed = targets if isinstance(targets, (list, tuple)) else [targets]
    names = [t if isinstance(t, str) else t.name for t in listed]
    fed = [feeds] if isinstance(feeds, str) else list(feeds)
    needed = pruned(origin.clone(for_test=True), fed, names)
    spread = [v.name for v in remote_variables([program]) if v.kind == "ids" and v.name in needed.variables]
    if spread:
        raise SpecError(
            f"the model needs the rows of table {spread[0]!r}, whose ids may be any number, so that it cannot be part "
            "of a model. Save with fleet.save_persistables, or make the table with is_distributed=False",
            variable=spread[0],
        )
    values = _values(program, startup, origin)
    inference.save_inference_model(folder, fed, names, None, origin, scope=values)


def _values(program: Program, startup: Program, origin: Program) -> Scope:
    """Return a scope with the values of the origin's variables: the servers', else this worker's."""
    mine, values, found = global_scope(), Scope(), set[str]()
    for variable in remote_variables([program, startup]):
        if variable.kind != "ids" and variable.name in origin.variables:
            values.set(variable.name, pulled(_client(program), variable, origin))
        found.add(variable.name)
    for var in persistables(origin):
        own = mine.find(var.name) if var.name not in found else None
        if own is not None:
            values.set(var.name, own)
    values.set_steps(origin, mine.steps(program))
    return values


def pulled(client: TrainerClient, variable: RemoteVariable, origin: Program) -> torch.Tensor:
    """Return a variable as the servers have it now. Raises Unavailable."""
    var = origin.variables[variable.name]
    out = torch.empty([int(str(d)) for d in var.shape], dtype=getattr(torch, var.dtype))
    blocks, at, heights = list(variable.blocks), list(variable.at), list(variable.heights)
    if variable.kind == "dense":
        client.recv(variable.name, blocks, at, list(torch.split(out, heights)))
        return out
    for first in range(0, len(out), _ROWS_AT_ONCE):
        part = out[first : first + _ROWS_AT_ONCE]
        ids = torch.arange(first, first + len(part), dtype=torch.int64)
        client.prefetch(variable.name, blocks, at, heights, ids, part)
    return out


def _client(program: Program) -> TrainerClient:
    # Not the remote: a communicator would take the tensors of a save for the program's own.
    return remotes.client(str(descriptor_of(program)))


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
                _log.warning("%s has no rows of table %r, which begins anew", place, name)
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
        _log.warning("%s has no values of %s, which begin anew", place, ", ".join(missing))
