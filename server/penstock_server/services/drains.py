"""Preempts what still runs on a draining node once the drain's deadline is over, and on a pilot before it leaves.

A job is preempted as a whole: its attempt ends on all of its nodes, and another is placed once nothing of it is left,
without one of the job's restarts (`lifecycle.preempted`). Until the deadline nothing happens to what runs. A node that
is unreachable has no drain: its lease decides, and the drain goes on when it is back.

A pilot ends what runs when its time is over. Jobs that save first are preempted before, by the time that they have for
that: while the pilot drains, so that they are not placed there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import LIVE_REPLICA, JobState, NodeState
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.services.lifecycle import preempted
from penstock_server.services.preemption import grace_s
from penstock_server.services.settle import LogTail, end_attempt, locked_job
from penstock_server.streams.agents import AgentLink, Agents
from penstock_server.tables import JobRow, NodeRow, ReplicaRow

_RUNS = (JobState.STARTING, JobState.RUNNING)


class Drains:
    """The deadlines of drains, and the ends of pilots. On one event loop."""

    def __init__(self, database: Database, clock: Clock, agents: Agents, tail: LogTail) -> None:
        self._db, self._clock, self._agents, self._tail = database, clock, agents, tail
        self._limits: dict[tuple[str, datetime], float] = {}  # on the monotonic clock: when a deadline is over

    async def step(self) -> None:
        """Preempt what runs on nodes whose deadline is over. Repeated, it finds nothing more to do."""
        statement = select(NodeRow.id, NodeRow.name, NodeRow.drain_by)
        statement = statement.where(NodeRow.state == NodeState.DRAINING, NodeRow.drain_by.is_not(None))
        async with self._db.glance() as session:
            found = [(id, name, by) for id, name, by in await session.execute(statement) if by is not None]
        self._note([(node_id, by) for node_id, _, by in found])
        for node_id, name, by in found:
            if self._limits[node_id, by] <= self._clock.monotonic():
                await self._preempt_on(node_id, by, f"node {name!r} is drained, and the deadline of that is over")

        for link in self._agents.all():
            if link.leaving and link.ends_at is not None:
                await self._preempt_before(link, link.ends_at)

    def _note(self, drains: Sequence[tuple[str, datetime]]) -> None:
        """Note when deadlines are over. From then on the wall clock may be set: it is read when one is seen first."""
        before, now, seen = self._limits, self._clock.now(), self._clock.monotonic()
        self._limits = {one: before.get(one, seen + (one[1] - now).total_seconds()) for one in drains}

    async def _preempt_on(self, node_id: str, by: datetime, why: str) -> None:
        """Preempt the jobs of a node, each in a transaction of its own, while it drains by this deadline still."""
        async with self._db.glance() as session:
            jobs = await _jobs_on(session, node_id)
        for job_id, _ in jobs:
            async with self._db.write() as tx:
                node = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
                if node is None or node.state != NodeState.DRAINING or node.drain_by != by:
                    return
                await self._preempt(tx, job_id, why)

    async def _preempt_before(self, link: AgentLink, ends_at: float) -> None:
        """Preempt the jobs on a pilot that need what is left of its time to save."""
        left_s = ends_at - self._clock.monotonic()
        async with self._db.glance() as session:
            jobs = await _jobs_on(session, link.node_id)
        for job_id in [job_id for job_id, spec in jobs if 0 < left_s <= grace_s(spec)]:
            async with self._db.write() as tx:
                node = await tx.session.get(NodeRow, link.node_id, with_for_update={"key_share": True})
                if node is not None and self._agents.get(link.node_id) is link:
                    await self._preempt(tx, job_id, f"{link.leaving}: node {node.name!r} leaves in {left_s:.0f} s")

    async def _preempt(self, tx: Tx, job_id: str, why: str) -> None:
        job = await locked_job(tx, job_id)
        if job is not None and job.state in _RUNS:
            await end_attempt(tx, job, partial(preempted, why=why), at=self._clock.now(), tail=self._tail)


async def _jobs_on(session: AsyncSession, node_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the jobs whose attempt starts or runs with a process on a node, and their specs, oldest first."""
    is_current = (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt)
    statement = select(JobRow.id, JobRow.spec).join(ReplicaRow, is_current).where(ReplicaRow.node_id == node_id)
    statement = statement.where(ReplicaRow.state.in_(LIVE_REPLICA), JobRow.state.in_(_RUNS), JobRow.kind == "managed")
    found = await session.execute(statement.order_by(JobRow.id))
    specs: dict[str, dict[str, Any]] = {row.id: row.spec for row in found}  # not DISTINCT: of JSON, PostgreSQL has none
    return list(specs.items())
