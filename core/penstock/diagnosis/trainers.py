"""Rules about trainers: one is later than the others, and in which operator; or its reader keeps it from data."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from penstock.diagnosis.case import NOTICED, Case, lane, ms, percent, where
from penstock.diagnosis.sums import Finding, OpSum, Trainer


def straggler(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    late, ns = case.late, case.late_ns
    if late is None or case.share(ns) < NOTICED / 2:
        return
    others = [one for one in stepping if one is not late]
    between = late.between_ns - statistics.median(one.between_ns for one in others)
    name = f"trainer {late.index}"
    if between > 0.6 * ns:
        return  # the reader's, which `_input` names
    sentence = f"{name} is {ms(ns)} later than the others"
    op, more = _slower_op(late, others)
    if op is not None and more > 0.8 * ns:
        sentence += f" in `{op.name}`{where(op)}"
    elif op is not None and more > 0.25 * ns:
        sentence += f", {ms(more)} of it in `{op.name}`{where(op)}"
    yield Finding(cause="trainer", sentence=sentence, share=case.share(ns), ms=ns / 1e6, place=name, tab="timeline",
                  op=None if op is None else op.index, graph=late.graph, query=lane(late))  # fmt: skip


def _slower_op(late: Trainer, others: Sequence[Trainer]) -> tuple[OpSum | None, float]:
    """The operator whose mean exceeds that of the others' most, and by how much."""
    means: dict[str, list[float]] = defaultdict(list)
    for one in others:
        for op in one.ops:
            if op.count and op.role != "communication":
                means[op.name].append(op.total_ns / op.count)
    best: OpSum | None = None
    most = 0.0
    for op in late.ops:
        if op.count == 0 or not means[op.name]:
            continue
        more = op.total_ns / op.count - statistics.median(means[op.name])
        if more > most:
            best, most = op, more
    return best, most


def input_of(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    worst = max(stepping, key=lambda one: one.between_ns + one.role_ns("input"))
    ns = worst.between_ns + worst.role_ns("input")
    rest = [one.between_ns for one in stepping if one is not worst]
    only = bool(rest) and worst.between_ns > 2 * statistics.median(rest) + 0.05 * case.turn_ns
    who = f" of trainer {worst.index}" if only else ""
    share = min(1.0, ns / worst.turn_ns)
    where = f": {ms(worst.between_ns)} between steps" if worst.between_ns > 0.5 * ns else ""
    sentence = f"input: {percent(share)} of the step{who} waits for data{where}"
    yield Finding(cause="input", sentence=sentence, share=share, ms=ns / 1e6,
                  place=f"trainer {worst.index}" if only else "input", tab="metrics")  # fmt: skip
