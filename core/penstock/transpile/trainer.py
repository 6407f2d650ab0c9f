"""The trainer's programs. Main: forward, backward, clipping as recorded; gradients go to servers, parameters come back.

Each gradient is sent right after the operator that makes it. Sync: one barrier over all sends, then the parameters are
pulled, then a barrier over all pulls. Asynchronous modes have no barriers: a parameter is pulled after its own send.
A table with sparse gradients is looked up on the servers; this process never allocates it.
GEO: it trains by itself, tables included; `geo` follows each update of a parameter, and the communicator behind it
counts the steps, pushes the difference divided by the number of trainers, and adds what the others have changed.
Startup: what the servers keep is not made here; what they share is pulled, so all trainers begin with the same values.
Source: get_trainer_program, GeoSgdTranspiler (Fluid 1.8), spec 3.2, 3.4, 3.6; `recv` writes the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from penstock.errors import ProgramError
from penstock.program.ir import Operator, Role
from penstock.program.program import Program
from penstock.ps.remote import REMOTE_TYPES, Descriptor
from penstock.transpile.joined_lookups import joined_lookups
from penstock.transpile.partition import LOOKUP, Partition, Update, is_clip
from penstock.transpile.placement import Placement
from penstock.transpile.remote_calls import RemoteCalls

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED


def make_trainer_program(
    program: Program, partition: Partition, placement: Placement, descriptor: Descriptor
) -> set[str]:
    """Rewrite `program` in place, for all modes but GEO; return the persistable variables that left this process.

    Raises ProgramError, with `program` unchanged, for a table that is used other than by lookups.
    """
    tables = {u.parameter: u for u in partition.updates if u.sparse}
    _check_tables(partition, tables)
    calls = RemoteCalls(program, placement, descriptor)
    updates = [partition.update(name) for name in placement.parameters()]
    operators = _with_sends(partition, updates, tables, calls)
    operators += _pulls([u for u in updates if not u.sparse], updates, calls)
    gone = _remove(program, operators)
    for name in tables:
        program.variables[name] = replace(program.variables[name], distributed=True)
    program.operators[:] = operators
    program.revision += 1
    return gone | set(tables)


def is_server_side(op: Operator) -> bool:
    """Whether an operator of a minimised program runs on servers."""
    return bool(op.role & _UPDATE) and not is_clip(op)


def is_transpiled(program: Program) -> bool:
    """Whether a program talks to servers already."""
    return any(op.type in REMOTE_TYPES for op in program.operators)


def _check_tables(partition: Partition, tables: Mapping[str, Update]) -> None:
    for op in (*partition.compute, *partition.local):
        of = {parameter for parameter, _ in op.role_vars}
        for name in op.input_names():
            looks_up = op.type == LOOKUP and name == op.input_names()[0]
            if name in tables and not looks_up:
                raise ProgramError(
                    f"operator {op.name!r} ({op.source}) uses table {name!r}, whose rows are on parameter servers: a "
                    "trainer can look them up (fluid.layers.embedding) and nothing else. Use is_sparse=False for it",
                    operator=op.name,
                    variable=name,
                )
        clipped = of & tables.keys()
        if is_clip(op) and clipped:
            raise ProgramError(
                f"operator {op.name!r} ({op.source}) clips the sparse gradient of table {min(clipped)!r}, for which a "
                "trainer needs as much memory as the table takes; its rows are on parameter servers. Clip the other "
                "parameters only (fluid.clip.set_gradient_clip(clip, param_list=…)), or use is_sparse=False for it",
                operator=op.name,
                variable=min(clipped),
            )


def _with_sends(
    partition: Partition, updates: Iterable[Update], tables: Mapping[str, Update], calls: RemoteCalls
) -> list[Operator]:
    """The operators that stay, with lookups of `tables` asked of servers, and each send right after what it sends."""
    waiting = {u.parameter: (u, set(u.sent)) for u in updates}
    operators: list[Operator] = []
    recorded = partition.program.global_block().ops
    together = joined_lookups(recorded, tables, partition.program.variables)
    earlier = {view.name for joined in together.values() for view in joined.views}
    for op in recorded:
        if is_server_side(op) or op.name in earlier:
            continue
        joined = together.get(op.name)
        if joined is None:
            operators.append(op)
        else:
            operators += [*joined.views, *calls.prefetch_together(joined.lookups, tables[op.input_names()[0]])]
        made = set(op.output_names())
        for parameter, (update, missing) in list(waiting.items()):
            missing -= made
            if not missing:
                operators += calls.send(update)
                del waiting[parameter]
    return operators


def _pulls(dense: Iterable[Update], updates: Iterable[Update], calls: RemoteCalls) -> list[Operator]:
    sent = {u.parameter: f"{u.gradient}@SENT" for u in updates}
    operators: list[Operator] = []
    barrier: tuple[str, ...] = ()
    if calls.descriptor.mode == "sync":
        operators.append(calls.send_barrier(sent.values()))
        barrier = operators[-1].output_names()
    received: list[str] = []
    for update in dense:
        operators += calls.recv(update, barrier or (sent[update.parameter],))
        received += operators[-1].output_names()
    if barrier:
        operators.append(calls.fetch_barrier(received or barrier))
    return operators


def _remove(program: Program, kept: Iterable[Operator]) -> set[str]:
    """Remove the variables that only operators of servers mention; return the persistable ones."""
    variables = program.variables
    mentioned = {n for op in kept for n in (*op.input_names(), *op.output_names())}
    mentioned |= {variables[n].storage for n in mentioned if n in variables}
    removed = {n for op in program.operators if is_server_side(op) for n in (*op.input_names(), *op.output_names())}
    gone = {n for n in removed - mentioned if n in variables and not variables[n].parameter and not variables[n].feed}
    gradients = {v for u in variables.values() if u.kind == "selected_rows" for v in (u.rows, u.values)}
    persistable = {n for n in gone if variables[n].persistable}
    for name in gone - gradients:
        del variables[name]
    return persistable


def make_geo_program(program: Program, partition: Partition, placement: Placement, descriptor: Descriptor) -> None:
    """Rewrite `program` in place. Raises ProgramError, with `program` unchanged, for a distributed table."""
    for update in partition.updates:
        if update.distributed:
            raise ProgramError(
                f"table {update.parameter!r} is distributed, so no trainer has all of it; in GEO mode each trainer "
                "trains a copy of its own. Use is_distributed=False, or another mode",
                variable=update.parameter,
            )
    calls = RemoteCalls(program, placement, descriptor)
    last = {u.operators[-1].name: u for u in partition.updates}
    operators: list[Operator] = []
    for op in partition.program.global_block().ops:
        operators.append(op)
        if op.name in last:
            operators.append(calls.geo(last[op.name]))
    program.operators[:] = operators
    program.revision += 1


def check_startup(startup: Program, updates: Iterable[Update]) -> None:
    """Raise ProgramError if a parameter is not initialised by `startup`."""
    made = {n for op in startup.operators for n in op.output_names()}
    for update in updates:
        if update.parameter not in made:
            raise ProgramError(
                f"parameter {update.parameter!r} is not initialised by the startup program that transpile was given. "
                "Pass the one that belongs to the program: transpile(…, startup_program=…)",
                variable=update.parameter,
            )


def make_trainer_startup(
    startup: Program, gone: Set[str], partition: Partition, placement: Placement, descriptor: Descriptor
) -> None:
    """Rewrite `startup` in place: leave out the variables `gone`, and pull every parameter that is still there."""
    startup.operators[:] = [
        op for op in startup.operators if not gone & {*op.output_names(), *op.input_names(), *op.writes}
    ]
    for name in gone & startup.variables.keys():
        del startup.variables[name]
    calls = RemoteCalls(startup, placement, descriptor)
    received: list[str] = []
    for name in placement.parameters():
        if name not in gone:
            for op in calls.recv(partition.update(name), ()):
                startup.append(op)
            received += startup.operators[-1].output_names()
    startup.append(calls.fetch_barrier(received))
