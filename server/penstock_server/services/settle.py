"""Apply `lifecycle.decide` to a job until nothing is left to decide, inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from penstock.protocol.states import TERMINAL_JOB, TERMINAL_REPLICA, JobState, ReplicaState
from penstock_server.db import Tx, next_numbers
from penstock_server.services import budget
from penstock_server.services.backoff import FIRST, LONGEST_OF_ATTEMPTS, Span, starts_at, waits_until
from penstock_server.services.lifecycle import JobFacts, Replace, ReplicaFacts, Step, decide, watching
from penstock_server.services.preemption import outcome
from penstock_server.services.transitions import created, noted, transition
from penstock_server.tables import AttemptRow, JobRow, NodeRow, ReplicaRow
from penstock_server.uuid7 import uuid7

LogTail = Callable[[str, str], str]
"""(job id, replica id) -> the last lines of the replica's log, or ''."""


async def locked_job(tx: Tx, job_id: str) -> JobRow | None:
    """Load a job, and keep other transactions from changing it until this one ends."""
    statement = select(JobRow).where(JobRow.id == job_id).with_for_update(key_share=True)
    return (await tx.session.execute(statement)).scalar_one_or_none()


async def replicas_of(tx: Tx, job: JobRow) -> Sequence[ReplicaRow]:
    """Load the replicas of the job's current attempt, oldest first."""
    statement = select(ReplicaRow).where(ReplicaRow.job_id == job.id, ReplicaRow.attempt == job.attempt)
    return (await tx.session.execute(statement.order_by(ReplicaRow.stream))).scalars().all()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `settle` reads of a job: the replicas of its attempt, oldest first, and the names of nodes by their ids."""

    replicas: Sequence[ReplicaRow]
    names: dict[str, str]


async def load(tx: Tx, job_ids: Collection[str]) -> dict[str, Loaded]:
    """Load what `settle` reads, of many jobs by one statement. It holds until a job is settled otherwise."""
    statement = (
        select(ReplicaRow, NodeRow.name)
        .join(JobRow, (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt))
        .outerjoin(NodeRow, NodeRow.id == ReplicaRow.node_id)
        .where(ReplicaRow.job_id.in_(sorted(job_ids)))
        .order_by(ReplicaRow.stream)
    )
    found: dict[str, tuple[list[ReplicaRow], dict[str, str]]] = {job_id: ([], {}) for job_id in job_ids}
    for row, name in await tx.session.execute(statement):
        replicas, names = found[row.job_id]
        replicas.append(row)
        if row.node_id is not None:
            names[row.node_id] = name
    return {job_id: Loaded(*both) for job_id, both in found.items()}


async def settle(
    tx: Tx, job: JobRow, *, at: datetime, tail: LogTail, grace_s: float, loaded: Loaded | None = None
) -> bool:
    """Bring the job's state up to date with its replicas, and its `why` with both.

    `loaded`: by `load` in this transaction. Returns whether the job took a step, after which that holds no more.
    """
    if loaded is None:
        loaded = (await load(tx, [job.id]))[job.id]
    replicas, names, has_changed = loaded.replicas, loaded.names, False
    while True:
        facts = facts_of(job, replicas, names, at)
        step = decide(facts)
        if step is None:
            break
        has_changed = True
        if isinstance(step, Replace):
            await _replace(tx, job, step, replicas, at=at)
            replicas = await replicas_of(tx, job)
        else:
            await _apply(tx, job, step, at=at, tail=tail)
        tx.effects.nodes.update(r.node_id for r in replicas if r.node_id is not None)  # what is wanted there changes
    if job.state == JobState.RUNNING:
        job.why = watching(facts.replicas, grace_s)
    elif job.state == JobState.RECOVERING:
        _note_outcome(tx, job, outcome(facts), at)
        _begin_wait(job, replicas, at)
        tx.effects.nodes.update(r.node_id for r in replicas if r.node_id is not None)  # a notice may be withdrawn
    tx.effects.jobs.add(job.id)
    return has_changed


def _note_outcome(tx: Tx, job: JobRow, said: str, at: datetime) -> None:
    """Write what a preempted attempt has saved, once."""
    if said and said not in job.reason_detail:
        job.why = job.reason_detail = f"{job.reason_detail}; {said}"
        noted(tx, job, at=at, reason=job.reason, detail=said)


def _begin_wait(job: JobRow, replicas: Sequence[ReplicaRow], at: datetime) -> None:
    """Have a job wait for its next attempt, and not before nothing of the former one runs, which may save still."""
    if job.ends_by is None and all(ReplicaState(row.state) in TERMINAL_REPLICA for row in replicas):
        job.ends_by = waits_until(job.spec, max(at, job.next_attempt_at or at))


async def end_attempt(tx: Tx, job: JobRow, follow: Callable[[JobFacts], Step], *, at: datetime, tail: LogTail) -> None:
    """End the attempt of a job that starts or runs, as `follow` decides."""
    replicas = await replicas_of(tx, job)
    await _apply(tx, job, follow(facts_of(job, replicas, {}, at)), at=at, tail=tail)
    if job.state == JobState.RECOVERING:
        _begin_wait(job, replicas, at)
    tx.effects.nodes.update(r.node_id for r in replicas if r.node_id is not None)


async def _apply(tx: Tx, job: JobRow, step: Step, *, at: datetime, tail: LogTail) -> None:
    why = step.why
    if step.to is JobState.RECOVERING:
        if step.is_restart:
            _charge(job, at, step.retry_class)
        why += await _pause(tx, job, at, step.retry_class)
    transition(tx, job, step.to, at=at, reason=step.reason, detail=why)
    job.why = why
    if step.culprit is not None:
        lines = tail(job.id, step.culprit)
        job.why = f"{why}\n{lines}" if lines else why
    if step.to in TERMINAL_JOB or step.to is JobState.RECOVERING:
        await _close_attempt(tx, job, at)
    if step.to in TERMINAL_JOB and job.attempt > 1:
        tx.effects.nodes.update(await _nodes_of_all_attempts(tx, job))  # they may keep state of its pservers


async def _replace(tx: Tx, job: JobRow, step: Replace, replicas: Sequence[ReplicaRow], *, at: datetime) -> None:
    """Put a new process in the place of one that ended: same node, same port, the same attempt.

    A trainer's epoch grows, so that what its former self still has on the way is refused. A pserver's stays: it decides
    nothing, and requests to it name the epoch of the trainer.
    """
    former = next(row for row in replicas if row.id == step.replica.id)
    _charge(job, at, step.retry_class)
    if former.role == "trainer":
        job.epoch += 1
    row = ReplicaRow(
        id=uuid7(), job_id=job.id, attempt_id=former.attempt_id, attempt=former.attempt, role=former.role,
        epoch=job.epoch if former.role == "trainer" else former.epoch, index=former.index,
        state=ReplicaState.ASSIGNED.value, node_id=former.node_id, host=former.host, port=former.port,
        endpoint=former.endpoint, stream=await next_numbers(tx, "stream", 1), cpus=former.cpus, gpus=former.gpus,
        memory_bytes=former.memory_bytes, created_at=at, state_at=at, reason="",
    )  # fmt: skip
    created(tx, row, at=at, reason="replaces", detail=step.why)


def _charge(job: JobRow, at: datetime, retry_class: str) -> None:
    """Take one of the job's restarts."""
    restart = job.spec.get("restart", {})
    job.restarts += 1
    if budget.has_own(restart, retry_class):
        job.restarts_by_class = budget.charged_to(restart, job.restarts_by_class, retry_class, at)
    else:
        job.restarted_at = budget.charged(job.restarted_at, restart.get("window_s"), at)


async def _pause(tx: Tx, job: JobRow, at: datetime, retry_class: str) -> str:
    """Note when the next attempt may start; return the text that describes it. `_begin_wait` follows."""
    statement = select(AttemptRow).where(AttemptRow.job_id == job.id).order_by(AttemptRow.number)
    attempts = (await tx.session.execute(statement)).scalars()
    former = [Span(one.created_at, one.finished_at or at) for one in attempts]
    first, longest = budget.pauses(job.spec.get("restart", {}), retry_class) or (FIRST, LONGEST_OF_ATTEMPTS)
    next_at = starts_at(former, at, first=first, longest=longest)
    job.next_attempt_at = next_at if next_at > at else None
    job.ends_by = None
    seconds = (next_at - at).total_seconds()
    return f" after a pause of {seconds:g} s, since attempts failed soon after each other" if seconds else ""


async def _close_attempt(tx: Tx, job: JobRow, at: datetime) -> None:
    statement = select(AttemptRow).where(AttemptRow.job_id == job.id, AttemptRow.number == job.attempt)
    attempt = (await tx.session.execute(statement)).scalar_one_or_none()
    if attempt is not None and attempt.finished_at is None:
        attempt.finished_at, attempt.reason = at, job.reason
        attempt.secret = ""  # of no use any more


async def _nodes_of_all_attempts(tx: Tx, job: JobRow) -> set[str]:
    statement = select(ReplicaRow.node_id).where(ReplicaRow.job_id == job.id).distinct()
    return {node_id for node_id in (await tx.session.execute(statement)).scalars() if node_id is not None}


def facts_of(job: JobRow, replicas: Sequence[ReplicaRow], names: dict[str, str], at: datetime) -> JobFacts:
    """Return what is known of a job. `replicas`: of its attempt, oldest first; `names`: of nodes, by id."""
    restart = job.spec.get("restart", {})
    shared = budget.shared(restart, job.restarts, job.restarted_at, job.restarts_by_class, at)
    return JobFacts(
        state=JobState(job.state),
        attached=job.kind == "attached",
        reason=job.reason,
        detail=job.reason_detail,
        restarts=shared.taken,
        max_restarts=shared.most,
        window_s=shared.window_s,
        own=budget.own(restart, job.restarts_by_class, at),
        restart_on=frozenset(restart.get("on", ())),
        replicas=tuple(_replica_facts(r, names) for r in _counted(job, replicas)),
        has_pservers=job.spec.get("mode") == "pserver",
        has_started=any(r.started_at is not None for r in replicas),
    )


def _counted(job: JobRow, replicas: Sequence[ReplicaRow]) -> Sequence[ReplicaRow]:
    """Return the newest of each role and index. Of an attached job all are looked at: its processes come and go."""
    if job.kind == "attached":
        return replicas
    return list({(r.role, r.index): r for r in replicas}.values())


def _replica_facts(row: ReplicaRow, names: dict[str, str]) -> ReplicaFacts:
    place = f"node {names[row.node_id]!r}" if row.node_id in names else f"host {row.host!r}"
    ended = ReplicaState(row.state) in TERMINAL_REPLICA
    return ReplicaFacts(
        id=row.id,
        role=row.role,
        index=row.index,
        state=ReplicaState(row.state),
        place=place,
        exit_code=row.exit_code,
        signal=row.signal,
        detail=row.reason,
        started=row.started_at is not None,
        ended_at=row.finished_at if ended else None,
    )
