"""Why a job is as fast as it is: ranked findings with measurements, from sums that its processes have sent. Pure.

A *turn* is a step and the time until the next one begins; every share is of the turn, or of operator time where the
sentence says so. Each rule looks for one cause and names the place; what explains the most comes first:

1. no step has finished for long: which trainer has not arrived, or which server all wait for
2. waits for parameter servers: one straggler among them, one table, one trainer's way to one, or all
3. one trainer is later than the others, and in which operator, or because it waits for data
4. time between steps and in input operators: the reader
5. gradient exchange between replicas or ranks
6. threads without work; one thread on a machine of several cores
7. operators so short that the batch is too small for them

In a synchronous step all trainers wait for the straggler, so a wait counts as the servers' only as far as the trainer
that waits least has it too. Below `NOTICED` of a turn nothing counts as slow: the first finding then says what the step
does, and the others follow as they are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

NOTICED = 0.12
SILENT_S = 10.0
SILENT_TURNS = 20
STUCK = 0.9
"""Share of a turn that trainers without a step wait for one server, if they are stuck on it."""
SMALL_OP_NS = 15_000
DISPATCH_NS = 4_000
"""What an operator costs beside its kernel, about: a queue, two clock reads, a few tensors' headers."""


@dataclass(frozen=True, slots=True)
class OpSum:
    """What one operator did. `index`: in the graph document; `role`: forward, backward, …, communication or input."""

    index: int
    name: str
    role: str
    module: str
    count: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer of late. `step_ns`, `between_ns`: medians; `idle`: share of thread time, None if no step was sampled.

    `silent_s`: since its last step ended; `last_step`: its number. `num_threads`: that run at once; `num_cores`: of its
    machine, 0 if unknown.
    """

    index: int
    step_ns: float
    between_ns: float = 0.0
    silent_s: float = 0.0
    last_step: int = 0
    num_threads: int = 1
    num_cores: int = 0
    idle: float | None = None
    graph: str | None = None
    ops: tuple[OpSum, ...] = ()

    @property
    def turn_ns(self) -> float:
        """From the beginning of a step to that of the next."""
        return self.step_ns + self.between_ns


@dataclass(frozen=True, slots=True)
class Wait:
    """Nanoseconds of each step in which a trainer waited for a pserver, of one block. Block '': of none."""

    trainer: int
    pserver: int
    block: str
    wait_ns: float


@dataclass(frozen=True, slots=True)
class Sums:
    """All that is known. `running`: steps are expected."""

    trainers: tuple[Trainer, ...]
    waits: tuple[Wait, ...] = ()
    running: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause. `share`: of a turn; `tab` and `op`: where the dashboard shows the evidence."""

    cause: str
    sentence: str
    share: float
    ms: float
    place: str
    tab: str
    op: int | None = None
    graph: str | None = None


@dataclass(slots=True)
class _Case:
    """The sums, and what several rules need of them."""

    sums: Sums
    turn_ns: float = 0.0
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    by_server: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    late: Trainer | None = None
    late_ns: float = 0.0

    def share(self, ns: float) -> float:
        return min(1.0, ns / self.turn_ns) if self.turn_ns > 0 else 0.0


def diagnose(sums: Sums) -> list[Finding]:
    """Return what makes the job as slow as it is, the largest part first. Empty before any step was reported."""
    stepping = [one for one in sums.trainers if one.turn_ns > 0]
    if not stepping:
        return []
    case = _case(sums, stepping)
    stalled = _stalled(case, stepping)
    found = [finding for rule in _RULES for finding in rule(case, stepping)]
    found.sort(key=lambda finding: -finding.share)
    if stalled:
        return [*stalled, *found]
    if any(finding.share >= NOTICED for finding in found):
        return found
    return [_healthy(case, stepping), *found]


def _case(sums: Sums, stepping: Sequence[Trainer]) -> _Case:
    case = _Case(sums, statistics.median(one.turn_ns for one in stepping))
    for wait in sums.waits:
        case.waited[wait.trainer] += wait.wait_ns
        case.by_server[wait.trainer, wait.pserver] += wait.wait_ns
    if len(stepping) > 1:
        own = {one.index: one.turn_ns - case.waited[one.index] - _exchanged_ns(one) for one in stepping}
        last = max(stepping, key=lambda one: own[one.index])
        others = [own[one.index] for one in stepping if one is not last]
        case.late, case.late_ns = last, max(0.0, own[last.index] - statistics.median(others))
    return case


def _exchanged_ns(one: Trainer) -> float:
    """Nanoseconds of a step in operators that exchange gradients, on the threads that run them in turn."""
    steps = max((op.count for op in one.ops), default=0)
    return sum(op.total_ns for op in one.ops if op.role == "communication") / max(1, steps * one.num_threads)


def _stalled(case: _Case, stepping: Sequence[Trainer]) -> list[Finding]:
    if not case.sums.running:
        return []
    limit_s = max(SILENT_S, SILENT_TURNS * case.turn_ns / 1e9)
    silent = [one for one in stepping if one.silent_s > limit_s]
    if not silent:
        return []
    first = min(one.last_step for one in silent)
    behind = [one for one in silent if one.last_step == first]
    longest = max(one.silent_s for one in behind)
    some = len(behind) < len(stepping)
    who = _named([one.index for one in behind]) if some else "no trainer"
    verb = "has not finished" if len(behind) == 1 and some else "have not finished" if some else "has finished"
    server = None if some else next((one for one in _servers(case, stepping) if one.cause == "server"), None)
    if server is not None and server.share < STUCK:
        server = None
    on = "" if server is None else f": they wait for {server.place}"
    sentence = (
        f"{who} {verb} step {first + 1} for {longest:.0f} s; a step takes {_ms(case.turn_ns)}"
        if some
        else f"no trainer has finished a step for {longest:.0f} s, since step {first}{on};"
        f" a step takes {_ms(case.turn_ns)}"
    )
    return [
        Finding(cause="stalled", sentence=sentence, share=1.0, ms=longest * 1e3,
                place=who if server is None else server.place, tab="events" if server is None else "sync")
    ]  # fmt: skip


def _servers(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Waits that every trainer has: for one server, for one table of it, or for all servers alike."""
    per_server = {server: min(case.by_server[one.index, server] for one in stepping)
                  for server in {server for _, server in case.by_server}}  # fmt: skip
    total = sum(per_server.values())
    if not per_server or total <= 0:
        return
    slowest = max(per_server, key=lambda server: per_server[server])
    rest = [ns for server, ns in per_server.items() if server != slowest]
    alone = not rest or per_server[slowest] > 1.7 * statistics.mean(rest)
    block, block_ns = _largest_block(case, [slowest] if alone else list(per_server), len(stepping))
    waited = per_server[slowest] if alone else total
    whom = f"pserver-{slowest}" if alone else f"the {len(per_server)} parameter servers"
    sentence = f"{_percent(case.share(waited))} of each step waits for {whom}"
    if block and block_ns > 0.3 * waited:
        sentence += f"; `{block}` is {_ms(min(block_ns, waited))} of it"
    if alone and rest:
        sentence += f"; the other servers take {_ms(statistics.mean(rest))}"
    hot = bool(block) and block_ns > 0.6 * waited
    cause = "server" if alone and rest else "table" if hot else "servers"
    yield Finding(cause=cause, sentence=sentence, share=case.share(waited), ms=waited / 1e6,
                  place=block if cause == "table" else whom, tab="sync")  # fmt: skip


def _largest_block(case: _Case, servers: Sequence[int], num_trainers: int) -> tuple[str, float]:
    of: dict[str, float] = defaultdict(float)
    for wait in case.sums.waits:
        if wait.block and wait.pserver in servers:
            of[_parameter(wait.block)] += wait.wait_ns / num_trainers
    block = max(of, key=lambda name: of[name], default="")
    return block, of.get(block, 0.0)


def _parameter(block: str) -> str:
    """The parameter of a block: `fc_0.w_0.block3` is a part of `fc_0.w_0`."""
    head, _, tail = block.rpartition(".block")
    return head if head and tail.isdecimal() else block


def _ways(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """One trainer waits longer for one server than the others do, and is not early."""
    if len(stepping) < 2:
        return
    for (trainer, server), ns in case.by_server.items():
        others = [case.by_server[one.index, server] for one in stepping if one.index != trainer]
        more = ns - statistics.median(others)
        if case.late is not None and case.late.index != trainer and case.share(case.late_ns) >= NOTICED:
            continue  # it waits for the trainer that is late
        if case.share(more) < NOTICED / 2 or ns < 2 * statistics.median(others):
            continue
        name = f"trainer {trainer}"
        sentence = (
            f"{name} waits {_ms(ns)} of each step for pserver-{server}, the others {_ms(statistics.median(others))}"
        )
        yield Finding(cause="way", sentence=sentence, share=case.share(more), ms=more / 1e6,
                      place=f"{name} to pserver-{server}", tab="sync")  # fmt: skip


def _straggler(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    late, ns = case.late, case.late_ns
    if late is None or case.share(ns) < NOTICED / 2:
        return
    others = [one for one in stepping if one is not late]
    between = late.between_ns - statistics.median(one.between_ns for one in others)
    name = f"trainer {late.index}"
    if between > 0.6 * ns:
        return  # the reader's, which `_input` names
    sentence = f"{name} is {_ms(ns)} later than the others"
    op, more = _slower_op(late, others)
    if op is not None and more > 0.8 * ns:
        sentence += f" in `{op.name}`{_where(op)}"
    elif op is not None and more > 0.25 * ns:
        sentence += f", {_ms(more)} of it in `{op.name}`{_where(op)}"
    yield Finding(cause="trainer", sentence=sentence, share=case.share(ns), ms=ns / 1e6, place=name, tab="timeline",
                  op=None if op is None else op.index, graph=late.graph)  # fmt: skip


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


def _input(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    worst = max(stepping, key=lambda one: one.between_ns + _role_ns(one, "input"))
    ns = worst.between_ns + _role_ns(worst, "input")
    rest = [one.between_ns for one in stepping if one is not worst]
    only = bool(rest) and worst.between_ns > 2 * statistics.median(rest) + 0.05 * case.turn_ns
    who = f" of trainer {worst.index}" if only else ""
    share = min(1.0, ns / worst.turn_ns)
    where = f": {_ms(worst.between_ns)} between steps" if worst.between_ns > 0.5 * ns else ""
    sentence = f"input: {_percent(share)} of the step{who} waits for data{where}"
    yield Finding(cause="input", sentence=sentence, share=share, ms=ns / 1e6,
                  place=f"trainer {worst.index}" if only else "input", tab="metrics")  # fmt: skip


def _role_ns(one: Trainer, role: str) -> float:
    steps = max((op.count for op in one.ops), default=0)
    return sum(op.total_ns for op in one.ops if op.role == role) / max(1, steps * one.num_threads)


def _exchange(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    """Gradient exchange without servers. The trainer with the least of it is the straggler."""
    if case.by_server:
        return
    one = min(stepping, key=_exchanged_ns)
    ns = _exchanged_ns(one)
    if ns <= 0:
        return
    op = max((op for op in one.ops if op.role == "communication"), key=lambda op: op.total_ns)
    sentence = f"{_percent(case.share(ns))} of the step is gradient exchange, `{op.name}`{_where(op)} most of all"
    yield Finding(cause="exchange", sentence=sentence, share=case.share(ns), ms=ns / 1e6, place=op.name, tab="sync",
                  op=op.index, graph=one.graph)  # fmt: skip


def _threads(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    one = max(stepping, key=lambda one: one.idle or 0.0)
    if one.num_threads == 1 and one.num_cores > 1 and len(stepping) * 1 < one.num_cores:
        share = 0.5 * (1 - len(stepping) / one.num_cores)
        sentence = f"one thread computes on a machine of {one.num_cores} cores; set num_threads or CPU_NUM"
        yield Finding(cause="one_thread", sentence=sentence, share=share, ms=share * case.turn_ns / 1e6,
                      place="threads", tab="timeline")  # fmt: skip
        return
    waited = case.waited[one.index] / max(1.0, one.step_ns)
    idle = max(0.0, (one.idle or 0.0) - waited)
    share = idle * one.step_ns / max(1.0, one.turn_ns)
    if one.num_threads < 2 or idle < 0.25:
        return
    sentence = f"{_percent(idle)} of the time of {one.num_threads} threads is idle: operators wait for one another"
    yield Finding(cause="idle", sentence=sentence, share=share / 2, ms=share * case.turn_ns / 1e6, place="threads",
                  tab="timeline", graph=one.graph)  # fmt: skip


def _small(case: _Case, stepping: Sequence[Trainer]) -> Iterable[Finding]:
    for one in stepping[:1]:
        ops = [op for op in one.ops if op.count]
        runs, total = sum(op.count for op in ops), sum(op.total_ns for op in ops)
        steps = max((op.count for op in ops), default=0)
        if not runs or total / runs > SMALL_OP_NS:
            continue
        overhead = runs / steps * DISPATCH_NS / one.num_threads
        sentence = (
            f"the mean of {runs // steps} operators a step takes {total / runs / 1e3:.1f} µs: "
            f"batches are too small for them"
        )
        share = max(case.share(overhead), 0.2)
        yield Finding(cause="small_operators", sentence=sentence, share=share, ms=overhead / 1e6, place="batch",
                      tab="graph", graph=one.graph)  # fmt: skip


_RULES: tuple[Callable[[_Case, Sequence[Trainer]], Iterable[Finding]], ...] = (
    _servers, _ways, _straggler, _input, _exchange, _threads, _small,
)  # fmt: skip


def _healthy(case: _Case, stepping: Sequence[Trainer]) -> Finding:
    one = max(stepping, key=lambda one: one.turn_ns)
    lost = one.between_ns + case.waited[one.index] + _role_ns(one, "input")
    lost += 0.0 if case.by_server else _exchanged_ns(one)
    share = max(0.0, 1 - lost / one.turn_ns)
    ops = [op for op in one.ops if op.role not in ("communication", "input")]
    total = sum(op.total_ns for op in one.ops)
    sentence = f"nothing is slow: {_percent(share)} of the step computes"
    op: OpSum | None = None
    if ops and total:
        op = max(ops, key=lambda op: op.total_ns)
        sentence += f", `{op.name}`{_where(op)} {_percent(op.total_ns / total)} of operator time"
    return Finding(cause="healthy", sentence=sentence, share=share, ms=one.turn_ns / 1e6, place="", tab="graph",
                   op=None if op is None else op.index, graph=one.graph)  # fmt: skip


def _where(op: OpSum) -> str:
    """Its module, where the name does not say it."""
    last = op.module.rpartition(".")[2]
    grad = " grad" if op.role == "backward" else ""
    return f" of {last}{grad}" if last and last not in op.name else ""


def _named(indices: Sequence[int]) -> str:
    head = "trainer" if len(indices) == 1 else "trainers"
    return f"{head} {', '.join(str(index) for index in sorted(indices))}"


def _ms(ns: float) -> str:
    ms = ns / 1e6
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
