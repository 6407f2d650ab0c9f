"""A Program's exchange with its servers as one push and one pull, for the plain Executor.

What `graph/passes/fuse_remote.py` does with a graph of an async or half-async program, under the same conditions: the
pushes and pulls of a step become one of each at the last of them, or all stay as they are. So a step is one message a
server, over a channel where there is one, and threads that train in step meet once. Programs of other modes stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.graph.passes.fuse_remote import pull_step, push_step
from penstock.program.ir import Operator
from penstock.program.program import Program
from penstock.ps.remote import RECV, SEND, SEND_ROWS, Descriptor

_MODES = ("async", "half_async")
_REMOTE = {SEND: 1, SEND_ROWS: 2, RECV: 2}

Numbered = tuple[int, Operator]


def with_one_exchange(program: Program) -> list[Numbered]:
    """Return the operators of block 0 in the order in which they run, with their numbers in the Program."""
    operators = list(enumerate(program.global_block().operators))
    exchange = [one for one in operators if one[1].type in _REMOTE]
    remotes = {str(op.args[_REMOTE[op.type]]) for _, op in exchange}
    if len(remotes) != 1 or Descriptor.parse(next(iter(remotes))).mode not in _MODES:
        return operators
    pushes = [one for one in exchange if one[1].type != RECV]
    pulls = [one for one in exchange if one[1].type == RECV]
    if len(exchange) < 3 or not pushes or not _may_wait(program, operators, pushes, pulls):
        return operators
    end = exchange[-1][0]
    last = pushes[-1][1]
    fused = [(end, push_step([op for _, op in pushes], last, ()))]
    if pulls:
        sent = {name for _, op in pushes for name in op.output_names()}
        written = {name for _, op in pulls for name in op.writes}
        waited = [n for _, op in pulls for n in op.input_names() if n not in sent and n not in written]
        after = [*last.output_names(), *waited]
        fused.append((end, pull_step([op for _, op in pulls], pulls[-1][1], after)))
    gone = {number for number, _ in exchange}
    rest = [one for one in operators if one[0] not in gone]
    return [*(one for one in rest if one[0] < end), *fused, *(one for one in rest if one[0] > end)]


def _may_wait(
    program: Program, operators: Sequence[Numbered], pushes: Sequence[Numbered], pulls: Sequence[Numbered]
) -> bool:
    """Whether nothing notices that all pushes and pulls wait for the last of them."""
    end = max(number for number, _ in (*pushes, *pulls))
    fused = {number for number, _ in (*pushes, *pulls)}
    others = [one for one in operators if one[0] <= end and one[0] not in fused]
    sent = {name for _, op in pushes for name in op.output_names()}
    readers = [op for number, op in operators if number not in {n for n, _ in pulls}]

    def storages(names: Iterable[str]) -> set[str]:
        return {program.variables[name].storage for name in names if name in program.variables}

    def is_rewritten(number: int, op: Operator) -> bool:
        read = storages(op.input_names())
        written = (storages(other.writes) | storages(other.output_names()) for at, other in others if at > number)
        return any(not read.isdisjoint(found) for found in written)

    def is_touched(number: int, op: Operator) -> bool:
        own = storages(op.writes)
        named = (storages((*o.input_names(), *o.writes, *o.output_names())) for at, o in others if at > number)
        return any(not own.isdisjoint(found) for found in named)

    return not (
        any(is_rewritten(number, op) for number, op in pushes)
        or any(not sent.isdisjoint(op.input_names()) for op in readers)
        or any(is_touched(number, op) for number, op in pulls)
    )
