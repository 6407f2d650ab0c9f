"""From a built graph and its sizes to the document that a browser draws."""

from __future__ import annotations

import math

from penstock.graph.earlier import passes_of
from penstock.graph.operands import Shares
from penstock.graph.ssa import SHARED, Graph, OpHandle
from penstock.program.expr import evaluate
from penstock.program.ir import Role
from penstock.program.legality import RNG
from penstock.program.program import Program
from penstock.protocol.graphdoc import GraphDocument, Op, OpKind, RoleName, Sync, Value
from penstock.ps.remote import GEO_STEP, PREFETCH, RECV_STEP, REMOTE_TYPES, SEND_AHEAD, SEND_STEP

_REMOTE = REMOTE_TYPES | {SEND_STEP, RECV_STEP, SEND_AHEAD, GEO_STEP}
_MATMULS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "penstock.product.default")
_CONVOLUTIONS = {"aten.convolution.default": 1, "aten.convolution_backward.default": 2}
"""Which input is the weight."""
_ROLES: list[tuple[Role, RoleName]] = [
    (Role.OPTIMIZE, "optimize"),
    (Role.LR_SCHED, "lr_sched"),
    (Role.RPC, "communication"),
    (Role.DIST, "communication"),
    (Role.BACKWARD, "backward"),
    (Role.FORWARD, "forward"),
]


def document(
    graph: Graph, program: Program, shares: Shares, *, name: str, num_threads: int, rows: list[int]
) -> GraphDocument:
    """Return the graph document of one plan."""
    values = _Values(graph, program, shares)
    ops = [_op(handle, values) for handle in graph.handles]
    syncs = [
        Sync(
            parameter=s.parameter,
            gradient=s.gradient,
            mode="reduce" if graph.mode == "reduce" else "all_reduce",
            owner=s.owner,
            bytes=0 if s.sparse else values.of(program.variables[s.gradient].name, 0)[1],
            sparse=s.sparse,
            ops=list(s.handles),
        )
        for s in graph.syncs
    ]
    return GraphDocument(
        program=name, mode=graph.mode, num_replicas=graph.num_replicas, num_threads=num_threads,
        batch=rows, ops=ops, edges=graph.edges(), syncs=syncs, passes=passes_of(graph),
    )  # fmt: skip


class _Values:
    def __init__(self, graph: Graph, program: Program, shares: Shares) -> None:
        self.graph, self.program, self.shares = graph, program, shares

    def of(self, name: str, replica: int) -> tuple[Value, int]:
        """Return a variable with its sizes on a replica, and its bytes."""
        var = self.program.variables.get(name)
        if var is None or name == RNG:
            return Value(name=name, dtype="int64", shape=[3]), 24
        bindings = self.shares.bindings[min(max(replica, 0), len(self.shares.bindings) - 1)]
        shape = [evaluate(d, bindings) for d in var.shape]
        value = Value(name=name, dtype=var.dtype, shape=shape)
        return value, value.num_bytes

    def physical(self, key: str, rows_of: int) -> tuple[Value, int]:
        variable = self.graph.variables[key]
        return self.of(variable.name, variable.replica if variable.replica >= 0 else rows_of)

    def _table(self, handle: OpHandle) -> Value:
        """The table that a prefetch reads rows of; -1 rows: they are allocated at their first use."""
        _, _, table, _, _, heights, *_ = handle.op.args
        rows, _ = self.physical(handle.makes()[0], handle.rows_of)
        counts = [n for n in heights if isinstance(n, int)] if isinstance(heights, tuple) else []
        return Value(name=str(table), dtype=rows.dtype, shape=[sum(counts) if counts else -1, rows.shape[-1]])

    def read_by(self, handle: OpHandle) -> list[tuple[Value, int]]:
        """Return the operands. Of a fused sparse update those of the recorded ones: gradients by their names; of a
        prefetch the table of the servers, too, of which it reads no more bytes than it makes.
        """
        if handle.op.type == PREFETCH:
            return [*(self.physical(k, handle.rows_of) for k in handle.reads()), (self._table(handle), 0)]
        if not handle.op.type.startswith("penstock.fused_sparse_"):
            return [self.physical(k, handle.rows_of) for k in handle.reads()]
        found: list[tuple[Value, int]] = []
        for key in dict.fromkeys(k for part in handle.parts for k in part.input_names()):
            variable = self.graph.variables[key]
            gathered = variable.replica == SHARED and not variable.persistable
            replicas = range(self.graph.active) if gathered else [handle.rows_of]
            found += [self.of(variable.name, r) if gathered else self.physical(key, r) for r in replicas]
        return found


def _op(handle: OpHandle, values: _Values) -> Op:
    kind, role = kind_and_role(handle)
    inputs = values.read_by(handle)
    made = [values.physical(k, handle.rows_of) for k in (*handle.makes(), *handle.op.writes)]
    return Op(
        name=handle.op.name,
        type=handle.op.type,
        kind=kind,
        role=role,
        replica=handle.replica,
        module=handle.op.module,
        source=handle.op.source,
        inputs=[v for v, _ in inputs],
        outputs=[v for v, _ in made],
        bytes=sum(b for _, b in inputs) + sum(b for _, b in made),
        flops=_flops(handle, [v for v, _ in inputs], [v for v, _ in made]),
    )


def kind_and_role(handle: OpHandle) -> tuple[OpKind, RoleName]:
    """Return kind and role of a handle as the dashboard shows it.

    A call to servers is communication, though a prefetch has the role of the lookup in whose place it stands.
    """
    return ("rpc", "communication") if handle.op.type in _REMOTE else (handle.kind, _role(handle))


def _role(handle: OpHandle) -> RoleName:
    if handle.kind in ("all_reduce", "reduce", "gather", "broadcast"):
        return "communication"
    if handle.kind == "scale_loss_grad":
        return "loss"
    return next(name for flag, name in _ROLES if handle.op.role & flag)


def _flops(handle: OpHandle, inputs: list[Value], outputs: list[Value]) -> int:
    """Multiply-adds times two of a matmul or a convolution; 0 for everything else.

    The sizes of a matmul's operands and result decide, whichever of them are stored transposed: of [b, m, k], [b, k, n]
    and [b, m, n] the product is b^3 (m k n)^2.
    """
    kind = handle.op.type
    if kind in _MATMULS and inputs and outputs:
        first = 1 if kind == "aten.addmm.default" else 0
        shapes = [value.shape for value in (*inputs[first : first + 2], outputs[0])]
        batch = math.prod(shapes[2][:-2])
        return 2 * math.isqrt(math.prod(map(math.prod, shapes)) // batch) if batch else 0
    if kind in _CONVOLUTIONS and len(inputs) > _CONVOLUTIONS[kind] and outputs:
        at = _CONVOLUTIONS[kind]
        weight, result, made = inputs[at].shape, outputs[0], [value.shape for value in outputs]
        times = 1
        if kind == "aten.convolution_backward.default":  # of the result; which gradients there are, sizes tell
            result, times = inputs[0], (inputs[1].shape in made) + (weight in made)
        return 2 * times * math.prod(result.shape) * math.prod(weight[1:])
    return 0
