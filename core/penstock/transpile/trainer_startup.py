"""The trainer's startup program: what the servers keep is not made here; what they share is pulled from them.

So all trainers begin with the servers' values, whatever their own initialisers drew.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from penstock.errors import ProgramError
from penstock.program.program import Program
from penstock.ps.remote import Descriptor
from penstock.transpile.partition import Partition, Update
from penstock.transpile.placement import Placement
from penstock.transpile.remote_calls import RemoteCalls


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
