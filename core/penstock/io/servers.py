"""What `load_persistables` loads for a server's program: its rows of the whole variables of a save.

The save is of one process, or of a trainer (`save_persistables`), whatever the number of servers. State of updates that
is not in it begins anew, and is named; so do tables of any ids. A save of fleet is what `fleet.init_server` loads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.errors import UserError
from penstock.io.saves.files import read_manifest, read_tensors
from penstock.program.program import Program
from penstock.ps.remote import SPARSE_TABLE
from penstock.scope import Scope
from penstock.serving.storage import NUMBERS, ProgramStorage, prepared_storage
from penstock.transpile.pserver import Served

_log = logging.getLogger(__name__)


def load_into_server(place: Path, program: Program, scope: Scope) -> None:
    """Restore this server's rows from the save at `place`, a manifest; its startup program has run.

    Raises UserError, with nothing changed, for a save that lacks a parameter or rows of it, and for a damaged one;
    ProgramError for parameters of another dtype or width.
    """
    manifest = read_manifest(place)
    values = read_tensors(place.parent / manifest.values.name, {v.name: v for v in manifest.variables})
    storage = prepared_storage(program, scope)
    tables = {op.block for op in program.operators if op.type == SPARSE_TABLE}
    served = [one for one in storage.description.served if one.block not in tables]
    for one in served:
        _check(place, one, storage, values)
    for parameter in dict.fromkeys(one.parameter for one in served):
        storage.restore(f"{parameter}@0", values)
    storage.restore(NUMBERS, values)
    states = storage.states()
    anew = {name for one in served for name in states[one.parameter] if name not in values}
    anew |= {one.parameter for one in storage.description.served if one.block in tables}
    if anew:
        _log.warning("%s has no values of %s, which begin anew", place, ", ".join(sorted(anew)))


def _check(place: Path, served: Served, storage: ProgramStorage, values: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError unless the save has the rows of a block."""
    mine, given = storage.value(served.name), values.get(served.parameter)
    wanted = served.first_row + _num_rows(mine)
    if given is None or _num_rows(given) < wanted:
        found = "no such variable" if given is None else f"{_num_rows(given)} rows of it"
        raise UserError(
            f"{place} has {found}, but server {storage.description.endpoint} keeps rows {served.first_row} to "
            f"{wanted - 1} of {served.parameter!r}. Expected a save of all persistables of the program that was "
            "distributed",
            file=str(place),
            variable=served.parameter,
        )


def _num_rows(value: torch.Tensor) -> int:
    return len(value) if value.dim() else 1
