"""Where the elements of a temporary come from: the tensors that it is a copy, a view or a concatenation of.

Copies of ids and of columns are what a recorded program makes of sparse gradients; a pass that knows their sources may
read those instead, as long as nothing overwrites them in between (`is_overwritten`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.graph.ssa import Graph, OpHandle
from penstock.program.expr import Dim
from penstock.program.ir import Operator, Ref
from penstock.program.program import Program

FLATTENED = frozenset(
    {
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.squeeze.default",
        "aten.unsqueeze.default",
        "aten.view.default",
        "aten.alias.default",
        "aten.detach.default",
    }
)
"""Views that keep the order of all elements, whatever the shape."""
COPIES = frozenset({"aten.clone.default", "aten.cat.default", "aten.slice.Tensor"})


POOL_GRADIENT = "penstock.sequence_pool_backward.default"


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor, all of it or the columns from `column` on, and the handles through which it was copied.

    `lengths`: its rows are those of sequences of these lengths; each is that of all rows of its sequence.
    """

    name: str
    column: int = 0
    through: tuple[int, ...] = ()
    lengths: str = ""


class Origins:
    """Answers for one graph, built from `program`."""

    def __init__(self, graph: Graph, program: Program) -> None:
        self._graph, self._program = graph, program
        self._makers = {name: handle for handle in graph.handles for name in handle.makes()}
        self._writers: dict[str, list[int]] = {}
        for handle in graph.handles:
            for name in handle.op.writes:
                self._writers.setdefault(graph.variables[name].storage, []).append(handle.index)

    def flattened(self, name: str) -> list[Source]:
        """Return the tensors whose elements, flattened and one tensor after another, are those of `name`."""
        handle = self._makers.get(name)
        if handle is None:
            return [Source(name)]
        if _is_joined(handle.op):
            return [_via(handle, s) for n in handle.reads() for s in self.flattened(n)]
        if handle.op.type in FLATTENED or handle.op.type == "aten.clone.default":
            return [_via(handle, s) for s in self.flattened(handle.reads()[0])]
        return [Source(name)]

    def columns(self, name: str) -> list[Source]:
        """Return the matrices whose columns, one matrix below another, are the rows of the matrix `name`."""
        handle = self._makers.get(name)
        if handle is None:
            return [Source(name)]
        if _is_joined(handle.op):
            return [_via(handle, s) for n in handle.reads() for s in self.columns(n)]
        if handle.op.type == "aten.clone.default" or (handle.op.type in FLATTENED and self._keeps_shape(handle)):
            return [_via(handle, s) for s in self.columns(handle.reads()[0])]
        first = self._first_column(handle)
        return [Source(name)] if first is None else [Source(handle.reads()[0], first, (handle.index,))]

    def columns_of_sums(self, name: str) -> list[Source]:
        """Return as `columns` does, but for gradients of sums over sequences those of the sums, with their lengths."""
        return [self._of_sum(source) for source in self.columns(name)]

    def _of_sum(self, source: Source) -> Source:
        handle = self._makers.get(source.name)
        if handle is None or handle.op.type != POOL_GRADIENT or handle.op.kwargs or handle.op.args[4] != "sum":
            return source
        grad, _, lengths, *_ = handle.op.args
        shape = self.shape(grad.name) if isinstance(grad, Ref) else None
        found = self.columns(grad.name) if isinstance(grad, Ref) and shape is not None and len(shape) == 2 else []
        if len(found) != 1 or not isinstance(lengths, Ref):
            return source
        through = (*source.through, handle.index, *found[0].through)
        return Source(found[0].name, source.column + found[0].column, through, lengths.name)

    def is_overwritten(self, source: Source, reader: OpHandle) -> bool:
        """Whether a handle after the first copy of `source`, and before `reader`, writes into its memory."""
        if not source.through:
            return False
        storages = {self._graph.variables[n].storage for n in (source.name, source.lengths) if n}
        writers = [index for storage in storages for index in self._writers.get(storage, ())]
        return any(min(source.through) < index < reader.index for index in writers)

    def shape(self, name: str) -> Sequence[Dim] | None:
        """Return the sizes of a variable as they were recorded, None if the program does not have it."""
        found = self._program.variables.get(self._graph.variables[name].name)
        return None if found is None else found.shape

    def one_dtype(self, names: Sequence[str]) -> bool:
        """Whether variables have one dtype, as they were recorded."""
        found = [self._program.variables.get(self._graph.variables[n].name) for n in names]
        return len({None if v is None else v.dtype for v in found}) == 1 and None not in found

    def _keeps_shape(self, handle: OpHandle) -> bool:
        before, after = self.shape(handle.reads()[0]), self.shape(handle.makes()[0])
        return before is not None and before == after and len(before) == 2

    def _first_column(self, handle: OpHandle) -> int | None:
        """The first column of a slice of all rows of a matrix."""
        shape = self.shape(handle.reads()[0]) if handle.op.type == "aten.slice.Tensor" else None
        if shape is None or len(shape) != 2 or handle.op.kwargs:
            return None
        _, dim, start, *_ = (*handle.op.args, 0, None)
        step = handle.op.args[4] if len(handle.op.args) > 4 else 1
        if dim not in (1, -1) or step != 1 or not isinstance(start, int):
            return None
        return start if start >= 0 else None


def _is_joined(op: Operator) -> bool:
    """Whether an operator concatenates tensors along dimension 0."""
    if op.type != "aten.cat.default" or op.kwargs or not isinstance(op.args[0], tuple):
        return False
    along = op.args[1] if len(op.args) > 1 else 0
    return along == 0 and all(isinstance(v, Ref) for v in op.args[0])


def _via(handle: OpHandle, source: Source) -> Source:
    return replace(source, through=(*source.through, handle.index))
