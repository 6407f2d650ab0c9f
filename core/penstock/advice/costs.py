"""What an operator would take under another setting, from what it took in the recorded run. Pure.

For each operator the recording has one time, at one number of rows. Of it
- `DISPATCH_NS`, `OPERAND_NS` for each operand and, of a matrix product or convolution, the bytes that do not depend on
  the batch over the memory rate are *fixed*: each replica pays them whole; the rest is in proportion to its rows
- intra-op threads divide the share of its kind (`_SPLIT_SHARE`), and cost `FORK_NS`

The rate of exchanges is measured in the recording where it has some. All other constants are those of one machine, two
cores of an AMD EPYC (Zen 4) with torch 2.13, from operators' times under one and two intra-op threads in `bench advise`
(docs/performance.md): other machines have other ones, so a prediction that changes the threads of an operator is the
least certain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from penstock.advice.recorded import Recorded
from penstock.advice.setting import Setting
from penstock.protocol.graphdoc import Op, Value

DISPATCH_NS = 2_000.0
OPERAND_NS = 300.0
"""What an operand of an operator of many costs, whatever its rows: a lookup side by side of 300 tables has 601."""
FORK_NS = 4_000.0
"""What it costs to start and join the intra-op threads of an operator."""
MEMORY_BYTES_PER_NS = 8.0
SUM_BYTES_PER_NS = 20.0
MOST_FIXED = 0.9
"""Of an operator's time at most so much counts as fixed by bytes: caches make the rate an underestimate."""
PARALLEL_FROM = 32_768
"""Elements from which torch splits an element-wise operator (at::internal::GRAIN_SIZE)."""

_MATRIX = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "penstock.product.", "aten.convolution")
_SPLIT_SHARE = {
    "penstock.product.": 0.88, "aten.mm.": 0.68, "aten.addmm.": 0.68, "aten.bmm.": 0.68, "aten.convolution": 0.76,
    "penstock.lookup": 0.88, "penstock.fused_sparse_": 0.2,
}  # fmt: skip
"""Share of an operator's time that its intra-op threads divide, by the beginning of its type."""
_ELEMENTWISE_SHARE = 0.25
CONVOLUTION_NS = 100_000.0
"""What a convolution takes beside its rows: oneDNN reorders weights and results for its kernel."""


class Costs:
    """The costs of one recorded run's operators under other settings, in ns."""

    def __init__(self, run: Recorded) -> None:
        self.run = run
        self._held = _held(run)
        self._sum_rate = _sum_rate(run)

    def of(self, op: Op, handles: Sequence[int], setting: Setting, *, has_rows: bool) -> float:
        """Return what one handle of an operator takes. `handles`: its own in the recording; `has_rows`: on replicas."""
        intra = self.run.setting.intra_op(self.run.cores)
        ns = statistics.fmean(self.run.op_ns[index] for index in handles)
        ns = _on_one(op, ns, intra, 1.0)
        share = 1.0
        if has_rows:
            share = self.run.setting.cpu_num / setting.cpu_num
            fixed = self._fixed_ns(op, ns)
            ns = fixed + (ns - fixed) * share
        return _on_several(op, ns, setting.intra_op(self.run.cores), share)

    def exchange(self, num_bytes: float, setting: Setting) -> float:
        """Return what the sum of gradients over all replicas takes: `num_bytes` of each."""
        writes = 1 if setting.exchange == "reduce" else setting.cpu_num
        moved = num_bytes * (setting.cpu_num + writes)
        intra = setting.intra_op(self.run.cores) if num_bytes / 4 > PARALLEL_FROM else 1
        return DISPATCH_NS + moved / self._sum_rate / intra

    def outside(self, setting: Setting) -> float:
        """Return what a step takes before and after its operators."""
        return self.run.outside_ns

    def _fixed_ns(self, op: Op, ns: float) -> float:
        values = [*op.inputs, *op.outputs]
        if not any(self._has_rows(value) for value in values):
            return ns
        if not op.type.startswith(_MATRIX):
            return min(ns * MOST_FIXED, DISPATCH_NS + OPERAND_NS * len(op.inputs))
        held = sum(value.num_bytes for value in values if not self._has_rows(value))
        own = CONVOLUTION_NS if op.type.startswith("aten.convolution") else DISPATCH_NS
        return min(ns * MOST_FIXED, own + held / MEMORY_BYTES_PER_NS)

    def _has_rows(self, value: Value) -> bool:
        """Whether a value grows with the batch: of no parameter, and with a size that is a multiple of the rows."""
        rows = max(self.run.graph.batch, default=0)
        if value.name in self._held or rows < 1:
            return False
        return any(size % rows == 0 and size > 0 for size in value.shape)


def split_share(op: Op, rows: float = 1.0) -> float:
    """Return the share of an operator that intra-op threads divide. `rows`: of the recorded ones, how many it has."""
    for beginning, share in _SPLIT_SHARE.items():
        if op.type.startswith(beginning):
            return share
    elements = max((math.prod(value.shape) for value in (*op.inputs[:1], *op.outputs)), default=0)
    return _ELEMENTWISE_SHARE if elements * rows > PARALLEL_FROM else 0.0


def _on_several(op: Op, ns: float, threads: int, rows: float) -> float:
    share = split_share(op, rows)
    split = ns * (1 - share + share / threads) + FORK_NS
    return split if threads > 1 and share and split < ns else ns


def _on_one(op: Op, ns: float, threads: int, rows: float) -> float:
    """Undo `_on_several`."""
    share = split_share(op, rows)
    whole = (ns - FORK_NS) / (1 - share + share / threads)
    return max(ns, whole) if threads > 1 and share else ns


def _sum_rate(run: Recorded) -> float:
    """Return bytes read and written a nanosecond by the recorded exchanges, or the constant if there are none."""
    dense = [sync for sync in run.graph.syncs if not sync.sparse]
    replicas = run.setting.cpu_num
    moved = sum(sync.bytes * (replicas + (1 if sync.mode == "reduce" else replicas)) for sync in dense)
    taken = sum(max(0.0, run.op_ns[index] - DISPATCH_NS) for index in {index for sync in dense for index in sync.ops})
    return moved / taken / run.setting.intra_op(run.cores) if taken > 0 and moved > 0 else SUM_BYTES_PER_NS


def _held(run: Recorded) -> frozenset[str]:
    """Names that updates write: parameters, their state; and gradients, which have their shapes."""
    names = {v.name for op in run.graph.ops if op.role in ("optimize", "lr_sched") for v in op.outputs}
    return frozenset(names | {f"{name}@GRAD" for name in names})
