"""A parameter server that begins from a checkpoint: its rows of what all servers wrote, whatever their number was.

A server that was started again in its place has a newer state of its own, its snapshot and log, and goes on from that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import PeerError, UserError
from penstock.io.checkpoints import server_parts
from penstock.io.checkpoints.reading import StoredCheckpoint, newest
from penstock.program.program import Program
from penstock.ps.durability.server_snapshots import Item, ServerSnapshot
from penstock.ps.persistence import has_state
from penstock.ps.remote import LISTEN_AND_SERV, SPARSE_TABLE
from penstock.scope import Scope
from penstock.serving.storage import NUMBERS, ProgramStorage, prepared_storage
from penstock.transpile.tables import is_state

_log = logging.getLogger(__name__)


def is_server(program: Program) -> bool:
    """Whether a program serves parameters."""
    return any(op.type == LISTEN_AND_SERV for op in program.operators)


def restore_server(directory: Path, program: Program, scope: Scope, *, strict: bool) -> StoredCheckpoint | None:
    """Restore this server's part; its startup program has run. None: no checkpoint, or a newer state of its own.

    Raises UserError, and ProgramError for a checkpoint of another program.
    """
    from penstock.serving.server import settings_of  # loads a server, which trainers do without

    storage = prepared_storage(program, scope)
    own = settings_of(storage).folder
    if own is not None and has_state(own):
        _log.info("goes on from %s, which is newer than any checkpoint", own)
        return None
    found = newest(directory, strict=strict, sets_aside=False)
    if found is None:
        return None
    try:
        _take(found, storage, program)
    except (PeerError, OSError):
        if found.path.is_dir():
            raise
        found = newest(directory, strict=strict, sets_aside=False)  # a trainer has given it its name back meanwhile
        if found is None:
            raise
        _take(found, storage, program)
    storage.restored = server_parts.copy_of(found)
    return found


def _take(found: StoredCheckpoint, storage: ProgramStorage, program: Program) -> None:
    ends, states = dict[str, int](), storage.states()
    for item in _items(found):
        parameter, _, part = item.name.rpartition("@")
        value = item.tensors.get(parameter)
        if value is not None and not item.is_part:
            ends[parameter] = max(ends.get(parameter, 0), int(part) + (len(value) if value.dim() else 1))
        _check_optimizer(item, states.get(parameter), found.path)
        storage.restore(item.name, item.tensors)
    _check(storage, program, ends, found.path)


def _items(found: StoredCheckpoint) -> Iterator[Item]:
    servers = found.record.servers
    if servers is None:
        raise UserError(
            f"the checkpoint {found.path} is of a training of kind {found.record.kind!r}, without servers; they cannot "
            "begin from it",
            file=str(found.path),
        )
    for part in server_parts.parts(found.path, servers):
        yield from ServerSnapshot(part).items()


def _check_optimizer(item: Item, mine: set[str] | None, path: Path) -> None:
    """Raise UserError if another optimizer has kept what an item holds. `mine`: None for what is not here."""
    parameter, _, part = item.name.rpartition("@")
    if mine is None or not (part.isdigit() or part.endswith(f".{NUMBERS}")):
        return
    theirs = {name for name in item.tensors if is_state(name, parameter)}
    if theirs != mine:
        raise UserError(
            f"the checkpoint {path} has {_listed(theirs)} beside {parameter!r}, and this program keeps "
            f"{_listed(mine)}: it was trained by another optimizer, or in GEO mode, where trainers keep that. Restore "
            "with the optimizer and mode that wrote it; to change them, give another folder, and begin from a save of "
            "the parameters (docs/saving.md)",
            variable=parameter, got=sorted(theirs), expected=sorted(mine),
        )  # fmt: skip


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"


def _check(storage: ProgramStorage, program: Program, ends: dict[str, int], path: Path) -> None:
    """Raise UserError unless all rows of what this server keeps were in the checkpoint."""
    tables = {op.block for op in program.operators if op.type == SPARSE_TABLE}
    for served in storage.description.served:
        if served.block in tables:
            continue
        mine = storage.value(served.name)
        end = served.first_row + (len(mine) if mine.dim() else 1)
        if ends.get(served.parameter, 0) < end:
            raise UserError(
                f"the checkpoint {path} has {ends.get(served.parameter, 0)} rows of {served.parameter!r}, of which "
                f"this server keeps those up to {end}: another program wrote it",
                variable=served.parameter,
            )
