"""The trainer's program in GEO mode: it trains by itself, tables included, and exchanges what has changed now and then.

`geo` follows each update of a parameter; the communicator behind it counts the steps, pushes the difference since the
last exchange divided by the number of trainers, and puts what the others have changed into the parameter.
Source: GeoSgdTranspiler (Fluid 1.8), spec 3.6.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.ps.remote import Descriptor
from penstock.transpile.partition import Partition
from penstock.transpile.placement import Placement
from penstock.transpile.remote_calls import RemoteCalls


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
