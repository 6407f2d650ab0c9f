"""What fleet saves; `loading` takes it back.

A save of a job is a folder: `variables.json` with its values, written by worker 0 as `fluid.io` does it (parameters as
the servers have them, and what the worker keeps itself), and in `servers/` a folder of this save's own, into which each
server writes its part, state of the updates and tables included. `variables.json` names that too, and comes last, so
that a save that breaks off anywhere leaves the one before, as a whole. Parts name rows by where they are in the whole
variable, so that any number of servers can take them back. Servers on several hosts need a file system that they share.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.errors import SpecError
from penstock.exec.parallel import CompiledProgram, ParallelExecutor
from penstock.fleet.strategy import StrategyTypeError
from penstock.io.saves import inference
from penstock.io.saves.files import flush
from penstock.io.saves.manifest import ServersPart
from penstock.io.saves.prune import pruned
from penstock.io.saves.variables import manifest_path, persistables, write_variables
from penstock.program.program import Program
from penstock.program.strict_fields import say_once
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import descriptor_of
from penstock.ps.opening import opened_client
from penstock.scope import Scope, global_scope
from penstock.transpile.remote_variables import RemoteVariable, remote_variables

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


def saves(worker: int, call: str) -> bool:
    """Return whether this worker saves: the first one does, for all."""
    if worker:
        say_once(f"fleet.{call}: worker {worker} saves nothing; worker 0 saves for the whole job")
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
    return opened_client(str(descriptor_of(program)))
