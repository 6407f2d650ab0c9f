"""Forward operators that keep state of the runs, counters and what follows from them: the same on every replica.

A replica without rows runs no forward pass. What no fed row, no size and no random number reaches has the same value
everywhere, though: a counter of runs, and the learning rate that a Switch chooses by it. Where such operators write
persistable variables, or make what updates read, a replica that left them out would fall behind for good. They run on
every replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.program.expr import Expr
from penstock.program.ir import Arg, Operator, Role
from penstock.program.legality import RNG
from penstock.program.program import Program

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED
_OTHERS = _UPDATE | Role.BACKWARD | Role.RPC | Role.DIST


def state_of_runs(program: Program) -> frozenset[str]:
    """Return the names of those operators. Cost: a few walks over the Program."""
    free = _free(program)
    storage = {name: var.storage for name, var in program.variables.items()}
    needed = {storage[n] for op in program.operators if op.role & _UPDATE for n in op.input_names()}
    needed |= {storage[n] for op in free for n in op.writes if program.variables[storage[n]].persistable}
    found: set[str] = set()
    for op in reversed(free):
        touched = {storage[n] for n in (*op.output_names(), *op.writes)}
        if touched & needed:
            found.add(op.name)
            needed |= {storage[n] for n in op.input_names()}
    return frozenset(found)


def _free(program: Program) -> Sequence[Operator]:
    """Forward operators that nothing of one replica reaches, neither now nor through state of a run before."""
    storage = {name: var.storage for name, var in program.variables.items()}
    reached = {var.storage for var in program.variables.values() if var.feed or var.name == RNG}
    while True:
        known = len(reached)
        free = []
        for op in program.operators:
            own = {storage[n] for n in op.input_names()}
            if op.role & _UPDATE:
                continue  # exchanged gradients, on every replica alike
            if op.role & _OTHERS or own & reached or _has_sizes((*op.args, *(v for _, v in op.kwargs))):
                reached |= {storage[n] for n in (*op.output_names(), *op.writes)}
            else:
                free.append(op)
        if len(reached) == known:
            return free


def _has_sizes(value: Arg) -> bool:
    return isinstance(value, Expr) or (isinstance(value, tuple) and any(map(_has_sizes, value)))
