"""Invariants over the event log alone: I1 to I5, I9, I10 and I11. Pure.

I1 of a job one attempt at most is live, and epochs grow with attempts; I2 no node holds more than it has, no port of a
host two replicas; I3 an attempt has all of its replicas, from one transaction; I4 a change of state is one that the
tables allow, and none follows a terminal state; I5 a job that has not ended says why; I9 a row's state is the fold of
its events; I10 restarts are charged for failures alone, within the budget; I11 what a request made or cancelled is in
the audit log.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

from tools.chaos.history import Event, History, JobRecord, NodeRecord, ReplicaRecord, Violation

from penstock.protocol.states import (
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    REPLICA_TRANSITIONS,
    TERMINAL_JOB,
    TERMINAL_REPLICA,
    JobState,
    NodeState,
    ReplicaState,
    StopReason,
)

_TABLES: Mapping[str, tuple[type[StrEnum], Mapping[str, frozenset[str]]]] = {
    "job": (JobState, {str(k): frozenset(map(str, v)) for k, v in JOB_TRANSITIONS.items()}),
    "replica": (ReplicaState, {str(k): frozenset(map(str, v)) for k, v in REPLICA_TRANSITIONS.items()}),
    "node": (NodeState, {str(k): frozenset(map(str, v)) for k, v in NODE_TRANSITIONS.items()}),
}

_RESTART = re.compile(r"restart \d+ of \d+(?: within \S+ s)?(?: for (\w+))?")


def one_attempt_at_a_time(history: History) -> Iterator[Violation]:
    """I1."""
    replicas = {one.id: one for one in history.replicas}
    live: dict[str, dict[str, int]] = defaultdict(dict)
    for event in history.events:
        replica = replicas.get(event.subject) if event.kind == "replica" else None
        if replica is None:
            continue
        others = {attempt for attempt in live[replica.job_id].values() if attempt != replica.attempt}
        if event.before is None and others:
            what = f"attempt {replica.attempt} began while attempts {sorted(others)} were live"
            yield Violation("I1", replica.job_id, what)
        if event.after in TERMINAL_REPLICA:
            live[replica.job_id].pop(replica.id, None)
        else:
            live[replica.job_id][replica.id] = replica.attempt
    yield from _epochs_grow(history)


def _epochs_grow(history: History) -> Iterator[Violation]:
    attempts = sorted(history.attempts, key=lambda one: (one.job_id, one.number))
    for before, after in pairwise(attempts):
        if before.job_id == after.job_id and before.epoch >= after.epoch:
            what = f"attempt {after.number} has epoch {after.epoch}, attempt {before.number} has {before.epoch}"
            yield Violation("I1", after.job_id, what)
    newest = {one.job_id: one for one in attempts}
    for job in history.jobs:
        last = newest.get(job.id)
        if last is not None and (job.attempt != last.number or job.epoch < last.epoch):
            what = f"it is at attempt {job.attempt}, epoch {job.epoch}; its newest is {last.number}, {last.epoch}"
            yield Violation("I1", job.id, what)


def nothing_is_booked_twice(history: History) -> Iterator[Violation]:
    """I2."""
    replicas = {one.id: one for one in history.replicas}
    nodes = {one.id: one for one in history.nodes}
    live: dict[str, ReplicaRecord] = {}
    for event in history.events:
        replica = replicas.get(event.subject) if event.kind == "replica" else None
        if replica is None or replica.node_id not in nodes:
            continue
        if event.after in TERMINAL_REPLICA:
            live.pop(replica.id, None)
            continue
        live[replica.id] = replica
        if event.before is not None:
            continue
        node = nodes[replica.node_id]
        held = [sum(c) for c in zip(*(one.amounts for one in live.values() if one.node_id == node.id), strict=True)]
        if any(amount > total for amount, total in zip(held, node.amounts, strict=True)):
            yield Violation("I2", node.id, f"holds {held} of {list(node.amounts)} with replica {replica.id}")
        beside = [one for one in live.values() if one.id != replica.id and nodes[one.node_id].host == node.host]
        for port in set(replica.ports) & {port for one in beside for port in one.ports}:
            yield Violation("I2", node.id, f"port {port} of {node.host} was given to replica {replica.id} as well")


def gangs_are_whole(history: History) -> Iterator[Violation]:
    """I3."""
    jobs = {one.id: one for one in history.jobs if one.is_managed}
    replicas = {one.id: one for one in history.replicas}
    gangs: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in history.events:
        if event.kind == "replica" and event.before is None and event.reason != "replaces":
            replica = replicas[event.subject]
            gangs[replica.job_id, replica.attempt].append(event)
    for (job_id, attempt), created in gangs.items():
        job = jobs.get(job_id)
        if job is None:
            continue
        places = {(replicas[event.subject].role, replicas[event.subject].index) for event in created}
        if len(created) != job.size or len(places) != job.size:
            yield Violation("I3", job_id, f"attempt {attempt} has {len(created)} replicas; its job has {job.size}")
        if len({event.at for event in created}) > 1:
            yield Violation("I3", job_id, f"the replicas of attempt {attempt} are of several transactions")


def changes_are_allowed(history: History) -> Iterator[Violation]:
    """I4."""
    for event in history.events:
        table = _TABLES.get(event.kind)
        if table is None or event.before is None:
            continue
        is_note = event.kind == "job" and event.before == event.after and not _is_terminal(event)
        if event.after not in table[1][event.before] and not is_note:
            yield Violation("I4", event.subject, f"went from {event.before} to {event.after} ({event.reason})")


def _is_terminal(event: Event) -> bool:
    return event.after in TERMINAL_JOB


def waiting_jobs_say_why(history: History) -> Iterator[Violation]:
    """I5."""
    for job in history.jobs:
        if job.state not in TERMINAL_JOB and not job.why:
            yield Violation("I5", job.id, f"is {job.state} and does not say why")
        if history.is_final and job.state in (JobState.STARTING, JobState.RECOVERING, JobState.STOPPING):
            yield Violation("I5", job.id, f"is {job.state} still, though everything had time to end: {job.why}")


def states_are_folds(history: History) -> Iterator[Violation]:
    """I9."""
    state: dict[str, str] = {}
    for event in history.events:
        if state.get(event.subject) != event.before:
            what = f"an event goes from {event.before}, but the one before it to {state.get(event.subject)}"
            yield Violation("I9", event.subject, what)
        state[event.subject] = event.after
    rows: tuple[JobRecord | ReplicaRecord | NodeRecord, ...] = (*history.jobs, *history.replicas, *history.nodes)
    for row in rows:
        if state.get(row.id) != row.state:
            yield Violation("I9", row.id, f"is {row.state}; its events come to {state.get(row.id)}")


def restarts_are_charged_rightly(history: History) -> Iterator[Violation]:
    """I10."""
    charged: dict[str, list[Event]] = defaultdict(list)
    attempt: Counter[str] = Counter()
    started: set[tuple[str, int]] = set()
    replicas = {one.id: one for one in history.replicas}
    pays_for_preemption = {job.id for job in history.jobs if "preempted" in job.budgets}
    for event in history.events:
        if event.kind == "replica":
            replica = replicas[event.subject]
            attempt[replica.job_id] = max(attempt[replica.job_id], replica.attempt)
            if event.before is None and event.reason == "replaces":
                charged[replica.job_id].append(event)
            if event.after == ReplicaState.RUNNING:
                started.add((replica.job_id, replica.attempt))
        elif event.kind == "job" and event.after == JobState.RECOVERING != event.before:
            free = (event.subject, attempt[event.subject]) not in started and event.reason == StopReason.NODE_LOST
            free |= event.reason == StopReason.PREEMPTED and event.subject not in pays_for_preemption
            if not free:
                charged[event.subject].append(event)
    for job in history.jobs:
        yield from _charges_of(job, charged[job.id])


def _charges_of(job: JobRecord, charged: Sequence[Event]) -> Iterator[Violation]:
    """`charged`: the events that have a restart, oldest first."""
    if job.restarts != len(charged):
        yield Violation("I10", job.id, f"was charged {job.restarts} restarts; its events have {len(charged)}")
    times: dict[str, list[float]] = defaultdict(list)
    for event in charged:
        times[_class_of(event)].append(event.at)
    budgets = {"": (job.max_restarts, job.window_s), **job.budgets}
    for name in times.keys() - budgets.keys():
        yield Violation("I10", job.id, f"was charged for {name}, of which it has no budget")
    for name, (limit, window_s) in budgets.items():
        most = _most_in_window(times[name], window_s)
        if most > limit:
            within = "" if window_s is None else f" within {window_s:g} s"
            alone = f" for {name}" if name else ""
            yield Violation("I10", job.id, f"was charged {most} restarts of {limit}{within}{alone}")


def _class_of(event: Event) -> str:
    """Return the class from whose own budget a restart was taken, as the event says; "" for the shared one."""
    found: list[str] = _RESTART.findall(event.detail)
    return found[-1] if found else ""


def _most_in_window(charged: Sequence[float], window_s: float | None) -> int:
    """What has left the window at one restart stays out of it, whatever the clock is set to later."""
    counted: list[float] = []
    most = 0
    for at in charged:
        counted = [*(one for one in counted if window_s is None or one > at - window_s), at]
        most = max(most, len(counted))
    return most


def requests_are_audited(history: History) -> Iterator[Violation]:
    """I11."""
    managed = {one.id for one in history.jobs if one.is_managed}
    for event in history.events:
        is_made = event.before is None and (event.kind == "node" or event.subject in managed)
        is_cancelled = event.kind == "job" and event.reason == StopReason.CANCELLED
        if (is_made or is_cancelled) and event.subject not in history.audited:
            yield Violation("I11", event.subject, f"no row of the audit log has it, though it is {event.after}")
