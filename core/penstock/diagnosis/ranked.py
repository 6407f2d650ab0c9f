"""The findings about a job, what explains the most first.

A *turn* is a step and the time until the next one begins; every share is of the turn, or of operator time where the
sentence says so. Each rule looks for one cause and names the place:

1. no step has finished for long: which trainer has not arrived, or which server all wait for
2. a link between a trainer and a parameter server: bytes are on the way while the step waits
3. other waits for parameter servers: one straggler among them, one table, one trainer's way to one, or all
4. one trainer is later than the others, and in which operator, or because it waits for data
5. time between steps and in input operators: the reader
6. gradient exchange between replicas or ranks
7. threads without work; cores of a machine on which none of the job's threads computes
8. operators so short that the batch is too small for them
9. one layer of several alike, or one operator of several alike, that takes longer
10. a node of the job whose disk is full

Below `NOTICED` of a turn nothing counts as slow: the first finding then says what the step does, and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.diagnosis.case import NOTICED, Case, case_of, percent, where
from penstock.diagnosis.compute import exchange, small, threads
from penstock.diagnosis.layers import layers
from penstock.diagnosis.links import links
from penstock.diagnosis.servers import servers, ways
from penstock.diagnosis.stalled import stalled
from penstock.diagnosis.sums import Finding, OpSum, Sums, Trainer
from penstock.diagnosis.trainers import input_of, straggler

FULL_BYTES = 16 << 20
"""Below this many free bytes a disk is full: no part of a recording or of a checkpoint fits."""


def _disks(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Every node of the job whose disk is full."""
    for disk in case.sums.disks:
        if case.sums.running and disk.total_bytes > 0 and disk.free_bytes < FULL_BYTES:
            sentence = (
                f"the disk of {disk.node} is full: {disk.free_bytes / 1e6:.1f} MB of {disk.total_bytes / 1e6:,.0f} MB "
                "are free for logs, checkpoints and recorded telemetry"
            )
            yield Finding(cause="full_disk", sentence=sentence, share=1.0, ms=0.0, place=disk.node, tab="config")


_RULES: tuple[Callable[[Case, Sequence[Trainer]], Iterable[Finding]], ...] = (
    _disks, links, servers, ways, straggler, input_of, exchange, threads, small, layers,
)  # fmt: skip


def diagnose(sums: Sums) -> list[Finding]:
    """Return what makes the job as slow as it is, the largest part first. Empty before any step was reported."""
    stepping = [one for one in sums.trainers if one.turn_ns > 0]
    if not stepping:
        return []
    case = case_of(sums, stepping)
    silent = stalled(case, stepping)
    found = [finding for rule in _RULES for finding in rule(case, stepping)]
    found.sort(key=lambda finding: -finding.share)
    if silent:
        return [*silent, *found]
    if any(finding.share >= NOTICED for finding in found):
        return found
    return [_healthy(case, stepping), *found]


def _healthy(case: Case, stepping: Sequence[Trainer]) -> Finding:
    one = max(stepping, key=lambda one: one.turn_ns)
    lost = one.between_ns + case.waiting_ns(one) + one.role_ns("input")
    share = max(0.0, 1 - lost / one.turn_ns)
    ops = [op for op in one.ops if op.role not in ("communication", "input")]
    total = sum(op.total_ns for op in one.ops)
    sentence = f"nothing is slow: {percent(share)} of the step computes"
    rate = _matrix_share(one)
    if rate > 0:
        sentence += f", {percent(rate)} of the machine's matrix rate"
    op: OpSum | None = None
    if ops and total:
        op = max(ops, key=lambda op: op.total_ns)
        sentence += f", `{op.name}`{where(op)} {percent(op.total_ns / total)} of operator time"
    return Finding(cause="healthy", sentence=sentence, share=share, ms=one.turn_ns / 1e6, place="", tab="graph",
                   op=None if op is None else op.index, graph=one.graph)  # fmt: skip


def _matrix_share(one: Trainer) -> float:
    """Floating-point operations of a step's matmuls over what its threads would multiply in that time; 0 if unknown."""
    threads = one.workers * one.intra_op_threads
    flops = sum(op.flops * op.count for op in one.ops) / one.num_steps
    return min(1.0, flops / (one.turn_ns * one.matrix_gflops * threads)) if threads and one.matrix_gflops else 0.0
