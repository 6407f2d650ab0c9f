"""Passes over the exchange of gradients: buckets of small ones, parts of large ones, one broadcast an owner.

Buckets (`fuse_exchanges`): dense gradients are exchanged several at a time, in the order in which they are made. An
exchange moves later only, to where the last gradient of its bucket is made, and never past a handle that touches the
memory of a gradient in it: such a handle (an update, clipping, a user's operator) closes the bucket. The buckets and
their order are a function of the Program and of `Buckets` alone, so every process makes the same ones. Sparse gradients
are left alone (they are gathered), and what Reduce mode sums for owners. Exchanges with other processes are put
together in every mode. Gradients stay where their operators wrote them: a bucket is a list of pieces, not an array of
its own.

Parts (`split_exchanges`): an exchange is one instruction, and an instruction runs on one worker, so a large gradient
would be summed at the rate of one core. Each part sums its own elements of the same tensors (`ssa.are_disjoint`). Only
CPU graphs have parts. In both, each element is added in the order of the replicas: the bits are those of one exchange.

Broadcasts (`fuse_broadcasts`): only graphs over devices have them (`graph/devices.py`). Those that nothing follows are
fused; a copy that a later operator of the step reads stays where it is. Each group waits for all its updates: fewer and
larger messages against an earlier start.

Order (`order_exchanges`): exchanges with other processes happen in the order in which the graph lists them, so that no
two ranks each wait in the exchange that the other makes later. The list is a function of the Program and its settings,
so it is equal on all ranks. With several rings (nccl_comm_num) exchanges alternate between them, and each ring has an
order of its own. `run_in_program_order`: on each replica one operator runs after another; exchanges between replicas
are in the chain of every replica whose tensors they read or write, so that all replicas meet them in the same order.

Source: coalesce_grad_tensor_pass.cc, fuse_all_reduce_op_pass.cc, fuse_broadcast_ops, all_reduce_deps_pass.cc,
sequential_execution_pass.cc (Fluid 1.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from penstock.graph.across import GATHERS, SUMS
from penstock.graph.choice import Buckets
from penstock.graph.rewrite import Rewriter
from penstock.graph.ssa import PARTS, SHARED, Graph, OpHandle
from penstock.program.ir import Arg, Operator, Ref, Role
from penstock.program.program import Program

_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4}


def gradient_bytes(program: Program, name: str) -> int:
    """Return the bytes of a variable, 0 where they depend on the batch."""
    variable = program.variables[name]
    sizes = [d for d in variable.shape if isinstance(d, int)]
    return math.prod(sizes) * _ITEM_BYTES.get(variable.dtype, 8) if len(sizes) == len(variable.shape) else 0


LARGE_BYTES = 1 << 20
"""A gradient of more bytes is exchanged by itself, in parts: less is done before a second worker has woken."""
_PART_BYTES = 1 << 18


def split_exchanges(graph: Graph, program: Program, at_once: int) -> Graph:
    """Cut large exchanges into parts, at most `at_once`: as many as operators run at a time. Linear in the handles."""
    counts = {h.index: _num_parts(graph, program, h, at_once) for h in graph.handles}
    if all(count == 1 for count in counts.values()):
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        count = counts[handle.index]
        if count == 1:
            rewriter.keep(handle)
            continue
        for part in range(count):
            op = replace(
                handle.op,
                name=f"{handle.op.name}.part{part}",
                type=PARTS[handle.op.type],
                args=(*handle.op.args, part, count),
            )
            rewriter.keep(handle, op)
    return rewriter.finish()


def _num_parts(graph: Graph, program: Program, handle: OpHandle, at_once: int) -> int:
    if handle.op.type not in PARTS:
        return 1
    name = graph.variables[handle.op.writes[0]].name
    num_bytes = gradient_bytes(program, name) if name in program.variables else 0
    return max(1, min(at_once, num_bytes // _PART_BYTES)) if num_bytes > LARGE_BYTES else 1


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


_BROADCAST = "penstock.broadcast_.default"


def fuse_broadcasts(graph: Graph) -> Graph:
    """Fuse the broadcasts at the end of the graph that have one source replica and the same receivers."""
    groups = _groups(graph, _last_broadcasts(graph))
    fused = {h.index for group in groups for h in group}
    if not fused:
        return graph
    rewriter = Rewriter(graph)
    for handle in graph.handles:
        if handle.index not in fused:
            rewriter.keep(handle)
    for group in groups:
        rewriter.put("broadcast", _fused(group), group[0].replica, group[0].rows_of, group)
    return rewriter.finish()


def _last_broadcasts(graph: Graph) -> list[OpHandle]:
    waited_for = {b for h in graph.handles for b in h.before}
    return [h for h in graph.handles if h.op.type == _BROADCAST and h.index not in waited_for]


def _groups(graph: Graph, handles: list[OpHandle]) -> list[list[OpHandle]]:
    found: dict[tuple[int, ...], list[OpHandle]] = {}
    for handle in handles:
        receivers = (graph.variables[n].replica for n in handle.op.writes)
        found.setdefault((handle.replica, *receivers), []).append(handle)
    return [group for group in found.values() if len(group) > 1]


def _fused(group: list[OpHandle]) -> Operator:
    """Destinations replica by replica, each in the order of the sources."""
    lists = [h.op.writes for h in group]
    destinations = tuple(names[k] for k in range(len(lists[0])) for names in lists)
    sources: Arg = tuple(Ref(h.op.input_names()[-1]) for h in group)
    args: tuple[Arg, ...] = (tuple(Ref(d) for d in destinations), sources)
    return Operator(
        f"fused_broadcast.{group[0].replica}.{group[0].op.name.removeprefix('broadcast.')}",
        "penstock.fused_broadcast_.default", args, (), writes=destinations, role=Role.DIST,
    )  # fmt: skip


def order_exchanges(graph: Graph, rings: tuple[str, ...] = ()) -> Graph:
    """Return the graph with its exchanges in order, spread over `rings` (none: those that they name)."""
    if not any(handle.op.type in SUMS | GATHERS for handle in graph.handles):
        return graph
    rewriter = Rewriter(graph)
    last: dict[str, int] = {}
    count = 0
    for handle in graph.handles:
        if handle.op.type not in SUMS | GATHERS:
            rewriter.keep(handle)
            continue
        ring = rings[count % len(rings)] if rings else str(handle.op.args[-1])
        count += 1
        op = replace(handle.op, args=(*handle.op.args[:-1], ring))
        last[ring] = rewriter.keep(handle, op, control=[last[ring]] if ring in last else []).index
    return rewriter.finish()


def run_in_program_order(graph: Graph) -> Graph:
    """Chain the handles of each replica. A handle of all replicas ends and begins every chain."""
    rewriter = Rewriter(graph)
    last: dict[int, int] = {}
    for handle in graph.handles:
        mine = _replicas(graph, handle)
        kept = rewriter.keep(handle, control={last[r] for r in mine if r in last})
        last.update(dict.fromkeys(mine, kept.index))
    return rewriter.finish()


def _replicas(graph: Graph, handle: OpHandle) -> set[int]:
    """The replicas whose memory a handle touches; all of them if it touches none's own."""
    names = (*handle.reads(), *handle.makes(), *handle.op.writes)
    own = {graph.variables[n].replica for n in names} | {handle.replica}
    return {r for r in own if r != SHARED} if handle.kind == "computation" else set(range(graph.num_replicas))
