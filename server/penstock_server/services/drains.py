"""Preempts what still runs on a draining node once the drain's deadline is over.

A job is preempted as a whole: its attempt ends on all of its nodes, and another is placed once nothing of it is left,
without one of the job's restarts (`lifecycle.preempted`). Until the deadline nothing happens to what runs. A node that
is unreachable has no drain: its lease decides, and the drain goes on when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import LIVE_REPLICA, JobState, NodeState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.services.lifecycle import preempted
from penstock_server.services.settle import LogTail, end_attempt, locked_job
from penstock_server.tables import JobRow, NodeRow, ReplicaRow

_RUNS = (JobState.STARTING, JobState.RUNNING)


class Drains:
    """The deadlines of drains. On one event loop."""

    def __init__(self, database: Database, clock: Clock, tail: LogTail) -> None:
        self._db, self._clock, self._tail = database, clock, tail
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

    def _note(self, drains: Sequence[tuple[str, datetime]]) -> None:
        """Note when deadlines are over. From then on the wall clock may be set: it is read when one is seen first."""
        before, now, seen = self._limits, self._clock.now(), self._clock.monotonic()
        self._limits = {one: before.get(one, seen + (one[1] - now).total_seconds()) for one in drains}

    async def _preempt_on(self, node_id: str, by: datetime, why: str) -> None:
        """Preempt the jobs of a node, each in a transaction of its own, while it drains by this deadline still."""
        async with self._db.glance() as session:
            job_ids = await _jobs_on(session, node_id)
        for job_id in job_ids:
            async with self._db.write() as tx:
                node = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
                if node is None or node.state != NodeState.DRAINING or node.drain_by != by:
                    return
                job = await locked_job(tx, job_id)
                if job is not None and job.state in _RUNS:
                    await end_attempt(tx, job, partial(preempted, why=why), at=self._clock.now(), tail=self._tail)


async def _jobs_on(session: AsyncSession, node_id: str) -> Sequence[str]:
    """Return the jobs whose attempt starts or runs with a process on a node."""
    is_current = (JobRow.id == ReplicaRow.job_id) & (JobRow.attempt == ReplicaRow.attempt)
    statement = select(JobRow.id).join(ReplicaRow, is_current).where(ReplicaRow.node_id == node_id)
    statement = statement.where(ReplicaRow.state.in_(LIVE_REPLICA), JobRow.state.in_(_RUNS), JobRow.kind == "managed")
    return (await session.execute(statement.distinct().order_by(JobRow.id))).scalars().all()
