"""A step's exchange with servers reads gradients where they arise, and its rows where they arrive: without copies.

A recorded sparse gradient is a concatenation: of the parts of one table, of all replicas; its values are columns of a
larger gradient. `send_step` reads the pieces instead, in the same order, and copies them once, into its message.
Rows that were looked up together are cut into views, which are concatenated side by side again: neighbours that come
next to each other are one view. The same bits: tensors are copied.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.graph.analysis.liveness import drop_unread
from penstock.graph.analysis.origins import COPIES, FLATTENED, Origins, Source
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref
from penstock.program.program import Program
from penstock.ps.remote import PREFETCH, SEND_STEP

_UNBIND = "aten.unbind.int"


def fuse_remote_copies(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, without these copies. `kept`: what is fetched is still made."""
    if not any(h.op.type in {SEND_STEP, PREFETCH} for h in graph.handles):
        return graph
    origins = Origins(graph, program)
    makers = {n: h for h in graph.handles for n in h.makes()}
    rewriter = Rewriter(graph)
    views: set[str] = set()
    for handle in graph.handles:
        if handle.op.type == SEND_STEP:
            _put_send(rewriter, graph, origins, handle)
        elif (runs := _runs(handle.op, makers, origins)) is not None:
            _put_beside(rewriter, graph, handle, runs, views)
        else:
            rewriter.keep(handle)
    return drop_unread(rewriter.finish(), kept, COPIES | FLATTENED | {_UNBIND})


# ---------------------------------------------------------------- gradients


def _put_send(rewriter: Rewriter, graph: Graph, origins: Origins, handle: OpHandle) -> None:
    values, rows, matrices, *rest, text = handle.op.args
    spec = json.loads(str(text))
    found = [_pieces(origins, handle, r, v) for r, v in zip(_names(rows), _names(matrices), strict=True)]
    widths = [_width(origins, v) for v in _names(matrices)]
    if "pieces" in spec or not found or None in widths:
        rewriter.keep(handle)
        return
    ids = list(dict.fromkeys(r.name for of in found for r, _ in of))
    sources = list(dict.fromkeys(v.name for of in found for _, v in of))
    spec["pieces"] = [
        [width, [[ids.index(r.name), sources.index(v.name), v.column] for r, v in of]]
        for width, of in zip(widths, found, strict=True)
    ]
    args = (values, tuple(Ref(n) for n in ids), tuple(Ref(n) for n in sources), *rest, json.dumps(spec))
    copies = {i for of in found for piece in of for source in piece for i in source.through}
    gathers = [graph.handles[i] for i in sorted(copies) if graph.handles[i].kind == "gather"]
    op = replace(handle.op, args=args)
    rewriter.put(handle.kind, op, handle.replica, handle.rows_of, [handle, *gathers], parts=handle.parts)


def _pieces(origins: Origins, at: OpHandle, rows: str, values: str) -> list[tuple[Source, Source]]:
    """Return the ids and the columns that a sparse gradient consists of; itself, if they cannot be read instead."""
    ids, columns = origins.flattened(rows), origins.columns(values)
    if len(ids) != len(columns) or any(origins.is_overwritten(s, at) for s in (*ids, *columns)):
        return [(Source(rows), Source(values))]
    return list(zip(ids, columns, strict=True))


def _width(origins: Origins, values: str) -> int | None:
    shape = origins.shape(values)
    return shape[1] if shape is not None and len(shape) == 2 and isinstance(shape[1], int) else None


def _names(args: Arg) -> Iterator[str]:
    assert isinstance(args, tuple)
    for arg in args:
        assert isinstance(arg, Ref)
        yield arg.name


# ---------------------------------------------------------------- rows


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours among rows that were looked up together: `count` from `first` on, of `width`. `name`: the first."""

    rows: str
    first: int
    width: int
    name: str
    count: int = 1

    def follows(self, other: str | _Run | None) -> bool:
        """Whether it comes behind what another run has."""
        return isinstance(other, _Run) and (other.rows, other.first + other.count) == (self.rows, self.first)


def _runs(op: Operator, makers: Mapping[str, OpHandle], origins: Origins) -> list[str | _Run] | None:
    """Return what a concatenation of matrices side by side reads, neighbours as one; None: nothing is to be gained."""
    if op.type != "aten.cat.default" or op.kwargs or len(op.args) != 2 or op.args[1] not in (1, -1):
        return None
    out: list[str | _Run] = []
    for name in op.input_names():
        run, last = _run(name, makers, origins), out[-1] if out else None
        if isinstance(last, _Run) and run is not None and run.follows(last):
            out[-1] = replace(last, count=last.count + 1)
        else:
            out.append(run or name)
    return out if len(out) < len(op.input_names()) else None


def _run(name: str, makers: Mapping[str, OpHandle], origins: Origins) -> _Run | None:
    """Return where a matrix is cut from the second dimension of rows that were looked up."""
    maker = makers.get(name)
    if maker is None or maker.op.type != _UNBIND or maker.op.args[1] != 1:
        return None
    (rows,) = maker.op.input_names()
    shape = origins.shape(rows)
    if rows not in makers or makers[rows].op.type != PREFETCH or shape is None or len(shape) != 3:
        return None
    return _Run(rows, maker.makes().index(name), shape[2], name) if isinstance(shape[2], int) else None


def _put_beside(
    rewriter: Rewriter, graph: Graph, handle: OpHandle, runs: Sequence[str | _Run], views: set[str]
) -> None:
    """Concatenate views of all rows of neighbours. `views`: those that have been made."""
    operands = [
        run if isinstance(run, str) else run.name if run.count == 1 else _put_view(rewriter, graph, handle, run, views)
        for run in runs
    ]
    rewriter.keep(handle, replace(handle.op, args=(tuple(Ref(n) for n in operands), handle.op.args[1])))


def _put_view(rewriter: Rewriter, graph: Graph, at: OpHandle, run: _Run, views: set[str]) -> str:
    """Make a view of neighbours as one matrix, unless a concatenation before has the same; return its name."""
    some = f"{run.rows}@{run.first}-{run.first + run.count}"
    whole = f"{some}@BESIDE"
    if whole in views:
        return whole
    views.add(whole)
    calls: list[tuple[str, str, tuple[Arg, ...]]] = [
        (some, "aten.slice.Tensor", (Ref(run.rows), 1, run.first, run.first + run.count)),
        (whole, "aten.view.default", (Ref(some), (-1, run.count * run.width))),
    ]
    for name, type_, args in calls:
        rewriter.declare(replace(graph.variables[run.rows], key=name, name=name))
        op = replace(at.op, name=name, type=type_, args=args, outputs=(name,), role_vars=())
        rewriter.put(at.kind, op, at.replica, at.rows_of)
    return whole
