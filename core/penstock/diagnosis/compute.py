"""Rules about what a step computes: gradient exchange, threads without work, unused cores, small operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from penstock.advice.costs import FORK_NS
from penstock.diagnosis.case import Case, lane, ms, percent, where
from penstock.diagnosis.sums import Finding, Trainer

SMALL_OP_NS = 15_000
DISPATCH_NS = 4_000
"""What an operator costs beside its kernel, about: a queue, two clock reads, a few tensors' headers."""


def exchange(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Gradient exchange without servers. The trainer with the least of it is the straggler."""
    if case.by_server:
        return
    one = min(stepping, key=lambda one: one.role_ns("communication"))
    ns = one.role_ns("communication")
    if ns <= 0:
        return
    op = max((op for op in one.ops if op.role == "communication"), key=lambda op: op.total_ns)
    sentence = f"{percent(case.share(ns))} of the step is gradient exchange, `{op.name}`{where(op)} most of all"
    yield Finding(cause="exchange", sentence=sentence, share=case.share(ns), ms=ns / 1e6, place=op.name, tab="sync",
                  op=op.index, graph=one.graph)  # fmt: skip


def threads(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Cores without a thread, and threads without an operator."""
    at: dict[str, list[Trainer]] = defaultdict(list)
    for one in stepping:
        at[one.node].append(one)
    yield from (finding for there in at.values() for finding in _unused_cores(case, there))
    one = max(stepping, key=lambda one: one.idle or 0.0)
    waited = case.waited[one.index] / max(1.0, one.step_ns)
    idle = max(0.0, (one.idle or 0.0) - waited)
    share = idle * one.step_ns / max(1.0, one.turn_ns)
    if one.workers < 2 or idle < 0.25:
        return
    sentence = f"{percent(idle)} of the time of {one.workers} threads is idle: operators wait for one another"
    yield Finding(cause="idle", sentence=sentence, share=share / 2, ms=share * case.turn_ns / 1e6, place="threads",
                  tab="timeline", graph=one.graph, query=lane(one))  # fmt: skip


def _unused_cores(case: Case, there: Sequence[Trainer]) -> Iterable[Finding]:
    """Trainers of one machine whose threads leave at least half of its cores alone.

    The share is what those cores would take off a step: by operators that wait for no other, or by more threads for
    each, whichever is more. A step that waits, or whose operators do not split, would gain nothing.
    """
    cores, used = there[0].num_cores, sum(one.workers * one.intra_op_threads for one in there)
    if any(one.intra_op_threads == 0 for one in there) or 2 * used > cores:
        return
    one = max(there, key=lambda one: one.turn_ns)
    ns = _saved_ns(one, cores // len(there))
    who = "one thread computes" if used == 1 else f"{used} threads compute"
    sentence = (
        f"{who} on a machine of {cores} cores, by the affinity or quota of the process; "
        f"all cores would take about {ms(ns)} off the step"
    )
    if ns > 0:
        yield Finding(cause="one_thread" if used == 1 else "few_threads", sentence=sentence, share=case.share(ns),
                      ms=ns / 1e6, place="threads", tab="timeline", graph=one.graph, query=lane(one))  # fmt: skip


def _saved_ns(one: Trainer, cores: int) -> float:
    """Nanoseconds of a step that `cores` would take off its operators."""
    means = [(op.total_ns / one.num_steps, op.split) for op in one.ops if op.role not in ("communication", "input")]
    now_ns = sum(ns for ns, _ in means) / one.workers
    side_by_side = max(one.path_ns, now_ns * one.workers / cores) if one.path_ns else now_ns
    ratio = one.intra_op_threads / max(1, cores // one.workers)
    in_parts = sum(min(ns, ns * (1 - split + split * ratio) + FORK_NS) for ns, split in means) / one.workers
    return max(0.0, now_ns - min(side_by_side, in_parts))


def small(case: Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Operators whose mean is no longer than what it costs to start one, about."""
    one = stepping[0]
    ops = [op for op in one.ops if op.count]
    runs, total = sum(op.count for op in ops), sum(op.total_ns for op in ops)
    if not runs or total / runs > SMALL_OP_NS:
        return
    overhead = runs / one.num_steps * DISPATCH_NS / one.workers
    if one.workers == 1:  # what is no operator's is measured
        overhead = max(overhead, one.step_ns - total / one.num_steps)
    sentence = (
        f"the mean of {runs // one.num_steps} operators a step takes {total / runs / 1e3:.1f} µs: "
        f"batches are too small for them"
    )
    yield Finding(cause="small_operators", sentence=sentence, share=case.share(overhead), ms=overhead / 1e6,
                  place="batch", tab="graph", graph=one.graph)  # fmt: skip
