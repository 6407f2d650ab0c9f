"""Start jobs where a pass of the scheduler placed them: a short transaction for a few of them.

The pass decided on what it had read without the lock of writes. So each placement is written only if all of it still
stands: the job waits for the same attempt, its nodes are READY and as they were, their agents have the same connection
and do not leave, and the projects' terms are the same. Room needs no second look: it is taken by passes alone, of which
there is one at a time, and others only make more of it. A job starts as a whole, or not at all. None starts whose turn
is after one whose nodes are not as they were: that one comes first in the next pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile

from sqlalchemy import select

from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import JobState, NodeState, ReplicaState
from penstock_server.db import Tx, next_numbers
from penstock_server.services.addresses import Site, addresses, endpoint
from penstock_server.services.fairness import Terms
from penstock_server.services.lines import Queued, waiting
from penstock_server.services.placement import Chosen, Need, Room
from penstock_server.services.survey import terms
from penstock_server.services.transitions import created, transition
from penstock_server.streams.agents import AgentLink, Agents
from penstock_server.tables import AttemptRow, JobRow, NodeRow, ReplicaRow
from penstock_server.uuid7 import uuid7


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a job goes, as a pass decided."""

    job: Queued
    spec: JobSpec
    needs: Sequence[Need]
    chosen: Chosen


@dataclass(frozen=True, slots=True)
class Basis:
    """What placements were decided on: nodes and the connections of their agents, by node, and the projects' terms."""

    rooms: Mapping[str, Room]
    links: Mapping[str, AgentLink]
    terms: Mapping[str, Terms]


@dataclass(frozen=True, slots=True)
class Started:
    """What became of placements. `num_gone`: of jobs that do not wait any more. `is_stale`: nodes or terms changed."""

    num_jobs: int
    num_gone: int
    is_stale: bool


async def start(
    tx: Tx, placements: Sequence[Placement], basis: Basis, agents: Agents, *, seen_at: datetime, now: datetime
) -> Started:
    """Start the jobs of the placements before the first whose nodes are not as they were.

    `seen_at`: when the pass looked at which jobs wait.
    """
    if await terms(tx.session) != basis.terms:
        return Started(0, 0, is_stale=True)
    jobs = await _jobs(tx, placements, seen_at)
    nodes = await _nodes(tx, placements, basis, agents)
    first = list(takewhile(lambda one: nodes.keys() >= set(one.chosen.node_ids), placements))
    standing = [(one, jobs[one.job.head.job_id]) for one in first if one.job.head.job_id in jobs]
    await _start(tx, standing, nodes, now)
    return Started(len(standing), len(first) - len(standing), is_stale=len(first) < len(placements))


async def _start(
    tx: Tx, standing: Sequence[tuple[Placement, JobRow]], nodes: Mapping[str, NodeRow], now: datetime
) -> None:
    attempts = [_attempt(job, now) for _, job in standing]
    tx.session.add_all(attempts)
    await tx.session.flush()
    stream = await next_numbers(tx, "stream", sum(len(one.needs) for one, _ in standing)) if standing else 0
    for (one, job), attempt in zip(standing, attempts, strict=True):
        _begin(tx, job, one, attempt, {id: nodes[id] for id in one.chosen.node_ids}, stream, now)
        stream += len(one.needs)


async def _jobs(tx: Tx, placements: Sequence[Placement], now: datetime) -> dict[str, JobRow]:
    """Return the jobs that still wait for the same attempt."""
    attempts = {one.job.head.job_id: one.job.attempt for one in placements}
    statement = select(JobRow).where(JobRow.id.in_(attempts), waiting(now)).with_for_update(key_share=True)
    rows = (await tx.session.execute(statement.order_by(JobRow.id))).scalars()
    return {row.id: row for row in rows if row.attempt == attempts[row.id]}


async def _nodes(tx: Tx, placements: Sequence[Placement], basis: Basis, agents: Agents) -> dict[str, NodeRow]:
    """Return the nodes that are as they were."""
    ids = {node_id for one in placements for node_id in one.chosen.node_ids}
    rows = (await tx.session.execute(select(NodeRow).where(NodeRow.id.in_(ids)))).scalars()
    return {row.id: row for row in rows if _stands(row, basis.rooms[row.id], basis.links.get(row.id), agents)}


def _stands(row: NodeRow, room: Room, link: AgentLink | None, agents: Agents) -> bool:
    if link is None or link.leaving or agents.get(row.id) is not link:
        return False
    is_same = (row.cpus, row.gpus, row.memory_bytes) == room.total and tuple(row.ports) == room.offered
    is_same = is_same and row.labels == room.labels
    return is_same and row.host == room.host and row.state == NodeState.READY


def _attempt(job: JobRow, now: datetime) -> AttemptRow:
    return AttemptRow(
        id=uuid7(), job_id=job.id, number=job.attempt + 1, epoch=job.epoch + 1, created_at=now,
        secret=secrets.token_urlsafe(32),
    )  # fmt: skip


def _begin(
    tx: Tx,
    job: JobRow,
    placed: Placement,
    attempt: AttemptRow,
    nodes: Mapping[str, NodeRow],
    stream: int,
    now: datetime,
) -> None:
    """Make a job's replicas and have it start. `stream`: number of the first one's."""
    job.epoch, job.attempt = attempt.epoch, attempt.number
    job.next_attempt_at = None
    job.ends_by = _ends_by(placed.spec, now)
    job.reason = job.reason_detail = ""  # those of the attempt before stand in its row
    where = addresses([Site(node.id, node.host, node.address) for node in nodes.values()])
    for offset, (need, node_id) in enumerate(zip(placed.needs, placed.chosen.node_ids, strict=True)):
        port, meeting_port = (*placed.chosen.ports.get(offset, ()), None, None)[:2]
        row = ReplicaRow(
            id=uuid7(),
            job_id=job.id,
            attempt_id=attempt.id,
            epoch=job.epoch,
            attempt=job.attempt,
            role=need.role,
            index=need.index,
            state=ReplicaState.ASSIGNED.value,
            node_id=node_id,
            host=nodes[node_id].host,
            port=port,
            meeting_port=meeting_port,
            endpoint=None if port is None else endpoint(where[node_id], port),
            stream=stream + offset,
            cpus=need.amounts[0],
            gpus=need.amounts[1],
            memory_bytes=need.amounts[2],
            created_at=now,
            state_at=now,
            reason="",
        )
        created(tx, row, at=now)
    transition(tx, job, JobState.STARTING, at=now)
    names = sorted({node.name for node in nodes.values()})
    places = f"node {names[0]!r}" if len(names) == 1 else f"{len(names)} nodes"
    count = len(placed.needs)
    job.why = f"starts {count} replica{'s' if count > 1 else ''} on {places}"


def _ends_by(spec: JobSpec, now: datetime) -> datetime | None:
    """Return when an attempt that starts now has taken too long."""
    return None if spec.max_duration_s is None else now + timedelta(seconds=spec.max_duration_s)
