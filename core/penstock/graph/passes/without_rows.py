"""What a rank without rows runs in a step of the others: their exchanges, in the same order and of the same sizes, and
its own updates, so that its parameters stay theirs.

Made from the graph that it runs with rows, after the passes that place exchanges. Forward and backward operators are
left out, but counters of runs and what follows from them alone; what an exchange would read of the others is zeros, and
no rows of sparse gradients. Buffers that the forward pass writes from rows (running statistics) stay as they are.
"""

from __future__ import annotations

from penstock.errors import ProgramError
from penstock.graph.across import BEGINS, GATHERS, SUMS
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle, Physical
from penstock.graph.state_of_runs import state_of_runs
from penstock.program.ir import Operator, Role, TorchConst, VarDesc
from penstock.program.program import Program

_UPDATE = Role.OPTIMIZE | Role.LR_SCHED


def without_rows(graph: Graph, program: Program, *, updates: bool) -> Graph:
    """Return that graph. `updates`: gradients are exchanged (else parameters, and updates are each rank's own).

    Raises ProgramError for an update that reads what the forward pass makes.
    """
    rewriter = Rewriter(graph)
    made: set[str] = set()
    everywhere = state_of_runs(program) if updates else frozenset()
    for handle in graph.handles:
        exchange = handle.op.type in SUMS | GATHERS
        own = updates and (handle.op.role & _UPDATE or handle.op.name in everywhere)
        if handle.op.type in BEGINS or not (exchange or own):
            continue
        if exchange:
            for ref in _refs(handle):
                if ref not in made and not _lasts(graph, ref):
                    _put_zeros(rewriter, graph, program, ref, sparse=handle.op.type in GATHERS)
                    made.add(ref)
        _check(graph, handle, made)
        rewriter.keep(handle)
        made.update(handle.makes())
    return rewriter.finish()


def _refs(handle: OpHandle) -> tuple[str, ...]:
    """The tensors that a rank gives to an exchange: of a sum all that it writes, of a gathering rows and values."""
    return handle.op.writes or handle.op.input_names()[:2]


def _lasts(graph: Graph, key: str) -> bool:
    variable = graph.variables[key]
    root = graph.variables[variable.storage]
    return variable.persistable or root.persistable or variable.feed


def _put_zeros(rewriter: Rewriter, graph: Graph, program: Program, key: str, *, sparse: bool) -> None:
    physical = graph.variables[key]
    var = program.variables[physical.name]
    rewriter.declare(Physical(key, physical.name, physical.replica, key, False, False))
    op = Operator(
        f"zeros.{key}", "aten.zeros.default", (_shape(var, sparse=sparse),), (key,),
        (("dtype", TorchConst("dtype", var.dtype)),), role=Role.DIST,
    )  # fmt: skip
    rewriter.put("computation", op, physical.replica, 0)


def _shape(var: VarDesc, *, sparse: bool) -> tuple[int, ...]:
    sizes = (0, *var.shape[1:]) if sparse else var.shape
    if not all(isinstance(d, int) for d in sizes):
        raise ProgramError(
            f"the exchange of {var.name!r}, whose sizes {list(var.shape)} follow the batch", variable=var.name
        )
    return tuple(d for d in sizes if isinstance(d, int))


def _check(graph: Graph, handle: OpHandle, made: set[str]) -> None:
    for key in handle.reads():
        if key not in made and not _lasts(graph, key):
            raise ProgramError(
                f"this rank cannot take part without rows: {handle.op.name!r} ({handle.op.source}) updates by "
                f"{graph.variables[key].name!r}, which the forward pass makes. Feed every rank equally many batches",
                operator=handle.op.name,
                variable=graph.variables[key].name,
            )
