"""A plausible built graph of CTR-DNN, and steps of it as a thread pool would run them.

Invented, for tests of the page only: shapes and roles are those of the example, durations are drawn from a seeded
generator. A step keeps the graph's order: no operator starts before those that it depends on have ended.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.protocol.graphdoc import Forms, GraphDocument, Op, OpKind, Pass, Passes, Removed, RoleName, Sync, Value
from penstock.protocol.runs import packed, packed_rows

SLOTS = ("carrier", "flight", "tailnum", "origin", "dest", "month", "day", "hour", "minute", "weekday", "route")
TOWER = (127, 400, 400, 400, 2)
ROWS = 500
ADAM = ("lerp", "mul", "addcmul", "sqrt", "div", "add", "addcdiv")


@dataclass
class Builder:
    """Collects operators; `writer` knows which operator wrote a name in a replica."""

    ops: list[Op] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    cost_us: list[float] = field(default_factory=list)
    writer: dict[tuple[str, int], int] = field(default_factory=dict)

    def op(
        self,
        name: str,
        type_: str,
        role: RoleName,
        replica: int,
        module: str,
        reads: Sequence[tuple[str, int]],
        shape: list[int],
        *,
        cost_us: float,
        kind: OpKind = "computation",
        line: int = 41,
        weight: str = "",
    ) -> int:
        index = len(self.ops)
        value = Value(name=f"{name}.out", dtype="float32", shape=shape)
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        inputs = [self.ops[self.writer[read]].outputs[0] for read in reads]
        inputs += [Value(name=weight, dtype="float32", shape=[400, shape[-1]])] if weight else []
        self.ops.append(
            Op(
                name=name,
                type=type_,
                kind=kind,
                role=role,
                replica=replica,
                module=module,
                source=f"train.py:{line}",
                inputs=inputs,
                outputs=[value],
                bytes=size * 2,
                flops=int(cost_us * 2e4) if "mm" in type_ else 0,
            )
        )
        self.edges += [(self.writer[read], index) for read in reads]
        self.cost_us.append(cost_us)
        self.writer[(name, replica)] = index
        return index


def _forward(b: Builder, r: int) -> None:
    for slot in (*SLOTS, "numeric", "label"):
        b.op(f"feed_{slot}", "penstock.feed", "input", r, "", [], [ROWS, 1], cost_us=6, kind="feed", line=20)
    for i, slot in enumerate(SLOTS):
        reads = [(f"feed_{slot}", r)]
        b.op(
            f"embedding_{i}", "penstock.embedding", "forward", r, f"embedding_{i}", reads, [ROWS, 10], cost_us=35,
            weight=f"embedding_{i}.w_0",
        )  # fmt: skip
    reads = [(f"embedding_{i}", r) for i in range(len(SLOTS))] + [("feed_numeric", r)]
    b.op("cat", "aten.cat.default", "forward", r, "concat", reads, [ROWS, TOWER[0]], cost_us=60, line=44)
    last = "cat"
    for i, width in enumerate(TOWER[1:]):
        module = f"tower.fc_{i}"
        b.op(
            f"addmm_{i}", "aten.addmm.default", "forward", r, module, [(last, r)], [ROWS, width], cost_us=_mm(i),
            weight=f"fc_{i}.w_0",
        )  # fmt: skip
        last = f"addmm_{i}"
        if i < len(TOWER) - 2:
            b.op(f"relu_{i}", "aten.relu.default", "forward", r, module, [(last, r)], [ROWS, width], cost_us=40)
            last = f"relu_{i}"
    b.op("softmax", "aten._softmax.default", "loss", r, "", [(last, r)], [ROWS, 2], cost_us=25, line=52)
    reads = [("softmax", r), ("feed_label", r)]
    b.op("cross_entropy", "penstock.cross_entropy", "loss", r, "", reads, [ROWS, 1], cost_us=30, line=53)
    b.op("mean", "aten.mean.default", "loss", r, "", [("cross_entropy", r)], [1], cost_us=8, line=54)


def _mm(i: int) -> float:
    return TOWER[i] * TOWER[i + 1] * ROWS * 2 / 1.5e4 / 1e3 + 15


def _backward(b: Builder, r: int) -> None:
    b.op("scale_loss_grad", "penstock.fill", "backward", r, "", [], [1], cost_us=3, kind="scale_loss_grad")
    reads = [("mean", r), ("scale_loss_grad", r), ("softmax", r)]
    b.op("ce_grad", "penstock.cross_entropy_backward", "backward", r, "", reads, [ROWS, 2], cost_us=30, line=53)
    last = "ce_grad"
    for i in reversed(range(len(TOWER) - 1)):
        module = f"tower.fc_{i}"
        if i < len(TOWER) - 2:
            reads = [(last, r), (f"relu_{i}", r)]
            b.op(f"thr_{i}", "aten.threshold_backward.default", "backward", r, module, reads, [ROWS, 4], cost_us=45)
            last = f"thr_{i}"
        below = (f"relu_{i - 1}", r) if i > 0 else ("cat", r)
        b.op(f"dw_{i}", "aten.mm.default", "backward", r, module, [(last, r), below], [TOWER[i], 400], cost_us=_mm(i))
        b.op(f"db_{i}", "aten.sum.dim_IntList", "backward", r, module, [(last, r)], [400], cost_us=20)
        b.op(f"dx_{i}", "aten.mm.default", "backward", r, module, [(last, r)], [ROWS, TOWER[i]], cost_us=_mm(i))
        last = f"dx_{i}"
    for i in range(len(SLOTS)):
        b.op(f"slice_{i}", "aten.slice.Tensor", "backward", r, "concat", [(last, r)], [ROWS, 10], cost_us=4)
        reads = [(f"slice_{i}", r)]
        module = f"embedding_{i}"
        b.op(f"rows_{i}", "penstock.embedding_rows", "backward", r, module, reads, [ROWS, 10], cost_us=30)


def _exchange(b: Builder, replicas: int, parameter: str, gradient: str, module: str, sizes: list[int]) -> None:
    sparse = gradient.startswith("rows")
    reads = [(gradient, r) for r in range(replicas)]
    dense_us = sizes[0] * sizes[-1] / 9e3 + 8
    owner = len(b.syncs) % replicas
    done = [b.op(f"reduce_{parameter}", "penstock.reduce", "communication", -1, module, reads, sizes,
                 cost_us=20 if sparse else dense_us, kind="reduce")]  # fmt: skip
    last = (f"reduce_{parameter}", -1)
    for step in ("rows_adam",) if sparse else ADAM:
        name = f"{step}_{parameter}"
        b.op(name, f"aten.{step}_.default", "optimize", owner, module, [last], sizes, cost_us=dense_us / 3, line=61)
        last = (name, owner)
    if not sparse:
        done.append(b.op(f"broadcast_{parameter}", "penstock.broadcast", "communication", -1, module, [last], sizes,
                         cost_us=dense_us, kind="broadcast"))  # fmt: skip
    size = 0 if sparse else 4 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    b.syncs.append(
        Sync(parameter=parameter, gradient=gradient, mode="reduce", owner=owner, bytes=size, sparse=sparse, ops=done)
    )


def ctr_graph(replicas: int = 2) -> tuple[GraphDocument, list[float]]:
    """Return the document and the cost of each operator in microseconds."""
    b = Builder()
    for r in range(replicas):
        _forward(b, r)
        _backward(b, r)
    for i in range(len(TOWER) - 1):
        _exchange(b, replicas, f"tower.fc_{i}.w", f"dw_{i}", f"tower.fc_{i}", [TOWER[i], TOWER[i + 1]])
        _exchange(b, replicas, f"tower.fc_{i}.b", f"db_{i}", f"tower.fc_{i}", [TOWER[i + 1]])
    for i in range(len(SLOTS)):
        _exchange(b, replicas, f"embedding_{i}.w", f"rows_{i}", f"embedding_{i}", [4043, 10])
    document = GraphDocument(
        program="ctr_dnn", mode="reduce", num_replicas=replicas, num_threads=2, batch=[ROWS] * replicas,
        ops=b.ops, edges=b.edges, syncs=b.syncs, passes=_passes(b.ops, replicas),
    )  # fmt: skip
    return document, b.cost_us


def _passes(ops: Sequence[Op], replicas: int) -> Passes:
    """One pass, which has removed a copy of each slot's rows; the concatenation has read the copies."""
    readers = [index for index, op in enumerate(ops) if op.type == "aten.cat.default"]
    texts = ["aten.clone.default", "computation", "forward", "embedding_", "train.py:41", "copy_", "aten.stack.default"]
    rows, changed = range(len(SLOTS)), len(readers)
    forms = {"kind": 1, "role": 2, "source": 4}
    removed = Removed(
        **{name: packed([text] * len(rows)) for name, text in forms.items()}, type=packed([0] * len(rows)),
        module=packed([3] * len(rows)), module_number=packed(rows), name=packed([5] * len(rows)),
        name_number=packed(rows), first=packed([0] * len(rows)), count=packed([replicas] * len(rows)),
    )  # fmt: skip
    was = Forms(
        **{name: packed([text] * changed) for name, text in forms.items()}, type=packed([6] * changed),
        module=packed([3] * changed), module_number=packed([0] * changed),
    )  # fmt: skip
    edges = ((len(ops) + row * replicas + r, readers[r]) for row in rows for r in range(replicas))
    one = Pass(
        name="fuse_lookups", title="lookups side by side", removed=len(rows) * replicas, added=[],
        changed=packed(readers), edges_removed=packed_rows(edges), edges_added=[],
    )  # fmt: skip
    return Passes(ran=[one], unchanged=["max pooling"], texts=texts, removed=removed, was=was)


@dataclass(frozen=True)
class Slice:
    """One run of one operator."""

    op: int
    thread: int
    start_ns: int
    duration_ns: int


def run_step(document: GraphDocument, cost_us: Sequence[float], threads: int, rng: random.Random) -> list[Slice]:
    """List-schedule one step: ready operators in index order, each on the thread that is free first."""
    waits = [0] * len(document.ops)
    after: list[list[int]] = [[] for _ in document.ops]
    for source, target in document.edges:
        waits[target] += 1
        after[source].append(target)
    ready = [(0, op) for op, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    free = [0] * threads
    slices: list[Slice] = []
    while ready:
        at, op = heapq.heappop(ready)
        thread = min(range(threads), key=lambda t: (max(free[t], at), t))
        start = max(free[thread], at) + rng.randrange(150, 400)
        duration = max(200, int(cost_us[op] * 1000 * rng.uniform(0.85, 1.3)))
        slices.append(Slice(op, thread, start, duration))
        free[thread] = start + duration
        for target in after[op]:
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(ready, (start + duration, target))
    return sorted(slices, key=lambda s: s.start_ns)
