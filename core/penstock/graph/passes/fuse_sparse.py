"""Sparse updates read their gradients where they arise, and those of many tables are one operator.

A sparse gradient is recorded as copies: ids are flattened and cloned, values are columns of a larger gradient (the one
of a concatenation) and cloned, the parts of one table and those of all replicas are concatenated. An update that reads
such copies alone becomes `penstock.fused_sparse_…_`, which reads (ids, columns) piece by piece, in the same order:
the same bits. Of sums over sequences it reads the gradient of the sum, which is that of every row. Updates of one kind
on one replica, with equal hyper-parameters and gradients in the same matrices, are one operator, so that none waits for
more than before. Copies that nothing else reads have no handle any more.

An update moves as `analysis/movement.py` says, and reads no memory that a handle between the copy and the update has
written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from penstock.graph.analysis.liveness import drop_unread
from penstock.graph.analysis.movement import grouped
from penstock.graph.analysis.origins import COPIES, FLATTENED, POOL_GRADIENT, Origins, Source
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Arg, Ref
from penstock.program.program import Program
from penstock.program.record.arithmetic import ONE, mul, of_dim

_RULES: Mapping[str, tuple[str, str, str]] = {
    "penstock.sparse_sgd_.default": (
        "penstock.fused_sparse_sgd_.default",
        "p rows values lr",
        "p* rows values pieces lengths ragged lr",
    ),
    "penstock.sparse_adam_.default": (
        "penstock.fused_sparse_adam_.default",
        "p m s step rows values lr beta1 beta2 epsilon",
        "p* m* s* step rows values pieces lengths ragged lr beta1 beta2 epsilon",
    ),
    "penstock.sparse_adagrad_.default": (
        "penstock.fused_sparse_adagrad_.default",
        "p m rows values lr epsilon",
        "p* m* rows values pieces lengths ragged lr epsilon",
    ),
}
"""Of each update: what replaces it, the names of its operands, and those of the replacement's: `p*` is a list."""
_OWN = {"rows", "values", "pieces", "lengths", "ragged"}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a gradient: their ids, and the matrix that has their values from a column on; `lengths` of the
    sequences that have one row of it each, or none."""

    rows: str
    values: str
    column: int
    lengths: str


@dataclass(frozen=True, slots=True)
class _Update:
    """An update, its operands by name, its gradient, and the handles that made the copies which it read."""

    handle: OpHandle
    values: dict[str, Arg]
    pieces: tuple[_Piece, ...]
    copies: tuple[int, ...]
    key: tuple[object, ...]
    reads: frozenset[str]
    writes: frozenset[str]


def fuse_sparse_updates(graph: Graph, program: Program, kept: Collection[str] = ()) -> Graph:
    """Return the graph, built from `program`, with such updates. `kept`: what is fetched is still made.

    Cost: linear in the handles and pieces, but for handles between two updates of a group.
    """
    groups = grouped(graph, {u.handle.index: u for u in _find(graph, program)})
    if not groups:
        return graph
    members = {u.handle.index for group in groups for u in group}
    last = {group[-1].handle.index: group for group in groups}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index in last:
            _put(rewriter, graph, last[handle.index])
        elif handle.index not in members:
            rewriter.keep(handle)
    return drop_unread(rewriter.finish(), kept, COPIES | FLATTENED | {POOL_GRADIENT})


def _find(graph: Graph, program: Program) -> list[_Update]:
    origins = Origins(graph, program)
    return [u for h in graph.handles if h.op.type in _RULES and (u := _update(graph, program, origins, h))]


def _update(graph: Graph, program: Program, origins: Origins, handle: OpHandle) -> _Update | None:
    """The update, None if it reads no copy, or one of something that was overwritten meanwhile."""
    fused, given, wanted = _RULES[handle.op.type]
    names = given.split()
    if handle.op.kwargs or len(handle.op.args) != len(names):
        return None
    values = dict(zip(names, handle.op.args, strict=True))
    parameter, rows, matrix = values["p"], values["rows"], values["values"]
    if not (isinstance(parameter, Ref) and isinstance(rows, Ref) and isinstance(matrix, Ref)):
        return None
    ids, columns = origins.flattened(rows.name), origins.columns_of_sums(matrix.name)
    copies = tuple(sorted({i for source in (*ids, *columns) for i in source.through}))
    if not copies or any(origins.is_overwritten(s, handle) for s in (*ids, *columns)):
        return None
    if not _are_pairs(origins, ids, origins.columns(matrix.name)):
        return None
    pieces = tuple(_Piece(r.name, v.name, v.column, v.lengths) for r, v in zip(ids, columns, strict=True))
    storages = {graph.variables[n].storage for p in pieces for n in (p.rows, p.values, p.lengths) if n}
    reads = {graph.variables[n].storage for n in handle.reads() if n not in (rows.name, matrix.name)}
    dtype = program.variables[graph.variables[parameter.name].name].dtype
    same = tuple(values[n] for n in wanted.split() if not n.endswith("*") and n not in _OWN)
    matrices = frozenset(p.values for p in pieces)
    return _Update(
        handle, values, pieces, copies,
        (handle.replica, handle.rows_of, handle.kind, fused, dtype, same, matrices),
        frozenset(storages | reads), frozenset(graph.variables[n].storage for n in handle.op.writes),
    )  # fmt: skip


def _are_pairs(origins: Origins, ids: Sequence[Source], columns: Sequence[Source]) -> bool:
    """Whether the i-th ids are those of the i-th gradient's rows: as many, for every batch."""
    if len(ids) != len(columns):
        return False
    for one, other in zip(ids, columns, strict=True):
        given, rows = origins.shape(one.name), origins.shape(other.name)
        if given is None or not rows or reduce(mul, map(of_dim, given), ONE) != of_dim(rows[0]):
            return False
    return True


def _put(rewriter: Rewriter, graph: Graph, updates: Sequence[_Update]) -> None:
    handles = [u.handle for u in updates]
    fused, _, wanted = _RULES[handles[0].op.type]
    lists: dict[str, list[str]] = {
        "rows": list(dict.fromkeys(p.rows for u in updates for p in u.pieces)),
        "values": list(dict.fromkeys(p.values for u in updates for p in u.pieces)),
        "lengths": list(dict.fromkeys(p.lengths for u in updates for p in u.pieces if p.lengths)),
    }
    args = tuple(_argument(name, updates, lists) for name in wanted.split())
    op = replace(
        handles[0].op,
        name=f"fused_{handles[0].op.name}",
        type=fused,
        args=args,
        writes=tuple(dict.fromkeys(w for h in handles for w in h.op.writes)),
        role_vars=tuple(dict.fromkeys(pair for h in handles for pair in h.op.role_vars)),
    )
    gathers = [graph.handles[i] for u in updates for i in u.copies if graph.handles[i].kind == "gather"]
    last = handles[-1]
    rewriter.put(
        last.kind, op, last.replica, last.rows_of, [*handles, *gathers], parts=tuple(h.op for h in handles)
    )  # fmt: skip


def _argument(name: str, updates: Sequence[_Update], lists: Mapping[str, list[str]]) -> Arg:
    if name in lists:
        return tuple(Ref(n) for n in lists[name])
    if name == "pieces":
        return tuple(_numbers(updates, lists))
    if name == "ragged":
        known = {n: i for i, n in enumerate(lists["lengths"])}
        return tuple(known.get(p.lengths, -1) for u in updates for p in u.pieces) if known else ()
    many = tuple(u.values[name.rstrip("*")] for u in updates)
    return many if name.endswith("*") else many[0]


def _numbers(updates: Sequence[_Update], lists: Mapping[str, list[str]]) -> Iterator[int]:
    """Four numbers a piece: the update, its ids, its matrix, the first column."""
    rows, values = ({n: i for i, n in enumerate(lists[k])} for k in ("rows", "values"))
    for number, update in enumerate(updates):
        for piece in update.pieces:
            yield from (number, rows[piece.rows], values[piece.values], piece.column)
