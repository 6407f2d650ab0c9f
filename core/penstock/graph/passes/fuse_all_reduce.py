"""Buckets: dense gradients of AllReduce mode are exchanged several at a time, in the order in which they are made.

Invariant: an exchange moves later only, to where the last gradient of its bucket is made, and never past a handle that
touches the memory of a gradient in it: such a handle (an update, clipping, a user's operator) closes the bucket. The
buckets and their order are a function of the Program and of `Buckets` alone, so every process makes the same ones.
Sparse gradients are left alone (they are gathered), and so are large ones (`split_exchange.py` cuts them into parts),
and what Reduce mode sums for owners. Exchanges with other processes are put together in every mode.
Sums are those of single exchanges, to the bit: each element is added in the order of the replicas. Gradients stay where
their operators wrote them: a bucket is a list of pieces, not an array of its own.

Source: coalesce_grad_tensor_pass.cc, fuse_all_reduce_op_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.graph.across import SUMS
from penstock.graph.passes.choice import Buckets
from penstock.graph.passes.gradient_bytes import gradient_bytes
from penstock.graph.passes.rewrite import Rewriter
from penstock.graph.passes.split_exchange import LARGE_BYTES
from penstock.graph.ssa import Graph, OpHandle
from penstock.program.ir import Operator, Ref
from penstock.program.program import Program

_EXCHANGES = frozenset({"penstock.all_reduce_.default", *SUMS})


def fuse_exchanges(graph: Graph, program: Program, buckets: Buckets) -> Graph:
    """Put the exchanges of dense gradients into buckets. O(operands of all handles)."""
    if not any(handle.op.type in _EXCHANGES for handle in graph.handles):
        return graph
    found = _buckets(graph, program, buckets)
    bucket_of = {h.index: bucket for bucket in found for h in bucket.handles}
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        bucket = bucket_of.get(handle.index)
        if bucket is None:
            rewriter.keep(handle)
        elif handle is bucket.handles[-1]:
            _put(rewriter, graph, bucket)
    return rewriter.finish()


def _buckets(graph: Graph, program: Program, limits: Buckets) -> list[_Bucket]:
    """Every exchange of a dense gradient, but a large one, in its bucket: those of one dtype, as they are made."""
    layer_of = {s.handles[-1]: _layer(s.parameter) for s in graph.syncs if not s.sparse}
    found: list[_Bucket] = []
    opened: dict[str, _Bucket] = {}  # by dtype
    for handle in graph.handles:
        touched = _storages(graph, handle)
        opened = {dtype: bucket for dtype, bucket in opened.items() if not touched & bucket.storages}
        layer = layer_of.get(handle.index)
        gradient = graph.variables[handle.op.writes[0]].name if handle.op.type in _EXCHANGES else ""
        if layer is None or gradient not in program.variables:
            continue
        num_bytes = gradient_bytes(program, gradient)
        if num_bytes > LARGE_BYTES:
            continue
        dtype = program.variables[gradient].dtype
        if dtype not in opened or opened[dtype].is_full(layer, limits):
            opened[dtype] = _Bucket()
            found.append(opened[dtype])
        opened[dtype].append(handle, touched, layer, num_bytes)
    return found


@dataclass(slots=True)
class _Bucket:
    """Exchanges that wait to be put, in the order of their gradients."""

    handles: list[OpHandle] = field(default_factory=list)
    storages: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    num_bytes: int = 0

    def append(self, handle: OpHandle, storages: set[str], layer: str, num_bytes: int) -> None:
        self.handles.append(handle)
        self.storages |= storages
        self.layers.add(layer)
        self.num_bytes += num_bytes

    def is_full(self, layer: str, limits: Buckets) -> bool:
        """Whether a gradient of `layer` belongs to the next bucket."""
        past = layer not in self.layers and 0 < limits.num_layers <= len(self.layers)
        return past or 0 < limits.num_bytes <= self.num_bytes


def _put(rewriter: Rewriter, graph: Graph, bucket: _Bucket) -> None:
    first = bucket.handles[0]
    if len(bucket.handles) == 1:
        rewriter.keep(first)
        return
    keys = tuple(key for h in bucket.handles for key in h.op.writes)
    name = "fused_" + first.op.name
    refs = tuple(Ref(k) for k in keys)
    if first.op.type in SUMS:
        op = replace(first.op, name=name, args=(refs, *first.op.args[1:]), writes=keys)
    else:
        op = Operator(
            name,
            "penstock.fused_all_reduce_.default",
            (refs, graph.active),
            (),
            writes=keys,
            role=first.op.role,
        )
    rewriter.put("all_reduce", op, first.replica, first.rows_of, bucket.handles)


def _storages(graph: Graph, handle: OpHandle) -> set[str]:
    return {graph.variables[n].storage for n in (*handle.reads(), *handle.makes(), *handle.op.writes)}


def _layer(parameter: str) -> str:
    """What comes before the last dot: 'fc_0' of 'fc_0.w_0'."""
    return parameter.rpartition(".")[0] or parameter
