"""Processes that a person started by hand and that register themselves: attached jobs, without a scheduler."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select

from penstock.protocol.attach import Register, Registered
from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import ACTIVE_JOB, LIVE_REPLICA, TERMINAL_REPLICA, JobState, ReplicaState
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx, next_numbers
from penstock_server.problems import Conflict
from penstock_server.services.leases import Leases, Standing
from penstock_server.services.lifecycle import CLOSED, FAILED
from penstock_server.services.settle import LogTail, locked_job, settle
from penstock_server.services.transitions import created, transition
from penstock_server.tables import AttemptRow, JobRow, ReplicaRow
from penstock_server.uuid7 import uuid7

MAX_ERROR = 2000
_ENDED = [s.value for s in TERMINAL_REPLICA]


class Attach:
    """Registration, leases and the end of attached processes."""

    def __init__(self, database: Database, clock: Clock, leases: Leases, tail: LogTail, *, grace_s: float) -> None:
        self._db, self._clock, self._leases, self._tail, self._grace_s = database, clock, leases, tail, grace_s
        self._connected: set[str] = set()

    async def register(self, message: Register) -> Registered:
        """Register a process with its job, which is made if no job of this name goes on.

        The same process (host and pid) that comes again gets its replica back. Raises Conflict if another
        process that is alive holds the role and index.
        """
        async with self._db.write() as tx:
            job = await self._job(tx, job_name(message.job_name))
            row = await self._holder(tx, job, message)
            if row is None:
                row = await self._add(tx, job, message)
            elif row.state == ReplicaState.UNKNOWN:
                transition(tx, row, ReplicaState.RUNNING, at=self._clock.now(), reason="reconnected")
            row.endpoint = message.endpoint
            await tx.session.flush()
            await settle(tx, job, at=self._clock.now(), tail=self._tail, grace_s=self._grace_s)
            answer = Registered(
                job_id=job.id, replica_id=row.id, stream=row.stream, epoch=row.epoch, lease_ttl_s=self._leases.ttl_s
            )
        self._connected.add(answer.replica_id)
        self._leases.cut(answer.replica_id, self._clock.monotonic())
        return answer

    def renew(self, replica_id: str) -> None:
        """Extend a process's lease."""
        self._leases.renew(replica_id, self._clock.monotonic())

    def disconnected(self, replica_id: str) -> None:
        """Note that the connection is gone; the lease decides what that means."""
        self._connected.discard(replica_id)

    async def goodbye(self, replica_id: str, *, failed: bool = False, error: str = "") -> None:
        """A process closed its telemetry, done or (`failed`) because of `error`. Its exit code is unknown."""
        detail = FAILED + (error or "it gave no error") if failed else CLOSED
        await self._end([replica_id], ReplicaState.EXITED, detail)

    async def step(self) -> None:
        """Act on leases that ran out."""
        statement = (
            select(ReplicaRow.id, ReplicaRow.state)
            .join(JobRow, JobRow.id == ReplicaRow.job_id)
            .where(JobRow.kind == "attached", ReplicaRow.state.in_(LIVE_REPLICA))
        )
        async with self._db.glance() as session:
            rows = (await session.execute(statement)).all()
        now = self._clock.monotonic()
        self._leases.look(now, uptime=asyncio.get_running_loop().time())
        missed, gone = [], []
        for replica_id, state in rows:
            self._leases.ensure(replica_id, now)
            standing = self._leases.standing(replica_id, now)
            if standing is Standing.GONE:
                gone.append(replica_id)
            elif standing is Standing.MISSED and state == ReplicaState.RUNNING:
                missed.append(replica_id)
        if missed:
            await self._end(missed, ReplicaState.UNKNOWN, "")
        if gone:
            await self._end(gone, ReplicaState.LOST, "it stopped reporting without saying goodbye")

    async def _end(self, replica_ids: Iterable[str], state: ReplicaState, detail: str) -> None:
        now = self._clock.now()
        async with self._db.write() as tx:
            for replica_id in replica_ids:
                row = await tx.session.get(ReplicaRow, replica_id)
                if row is None or row.state in _ENDED:
                    continue
                job = await locked_job(tx, row.job_id)
                assert job is not None  # foreign key
                transition(tx, row, state, at=now, reason="attached", detail=detail)
                if state in TERMINAL_REPLICA:
                    self._leases.drop(replica_id)
                await tx.session.flush()
                await settle(tx, job, at=now, tail=self._tail, grace_s=self._grace_s)

    async def _job(self, tx: Tx, name: str) -> JobRow:
        statement = (
            select(JobRow)
            .where(JobRow.name == name, JobRow.kind == "attached", JobRow.state.in_(ACTIVE_JOB))
            .order_by(JobRow.id.desc())
            .limit(1)
            .with_for_update(key_share=True)
        )
        found = (await tx.session.execute(statement)).scalar_one_or_none()
        if found is not None:
            return found
        now = self._clock.now()
        spec = JobSpec(name=name, entrypoint=["(attached)"], mode="command")
        row = JobRow(
            id=uuid7(), name=name, kind="attached", state=JobState.CREATED.value, spec=spec.model_dump(mode="json"),
            epoch=1, attempt=1, restarts=0, reason="", reason_detail="", why="", latest={}, lost={}, created_at=now,
            state_at=now,
        )  # fmt: skip
        created(tx, row, at=now)
        transition(tx, row, JobState.RUNNING, at=now, reason="")
        await tx.session.flush()
        tx.session.add(AttemptRow(id=uuid7(), job_id=row.id, number=1, epoch=1, created_at=now))
        await tx.session.flush()
        return row

    async def _holder(self, tx: Tx, job: JobRow, message: Register) -> ReplicaRow | None:
        statement = select(ReplicaRow).where(
            ReplicaRow.job_id == job.id,
            ReplicaRow.role == message.role,
            ReplicaRow.index == message.index,
            ReplicaRow.state.in_(LIVE_REPLICA),
        )
        row = (await tx.session.execute(statement)).scalar_one_or_none()
        if row is None or (row.host, row.pid) == (message.host, message.pid):
            return row
        if row.id in self._connected:
            raise Conflict(
                "role_taken",
                f"{message.role} {message.index} of job {job.name!r} is process {row.pid} on {row.host!r}, which is "
                f"connected; process {message.pid} on {message.host!r} cannot be it too",
                hint="give each process its own PENSTOCK_INDEX, or another PENSTOCK_JOB_NAME",
            )
        detail = f"process {message.pid} on {message.host!r} took its place"
        transition(tx, row, ReplicaState.LOST, at=self._clock.now(), reason="attached", detail=detail)
        return None

    async def _add(self, tx: Tx, job: JobRow, message: Register) -> ReplicaRow:
        now = self._clock.now()
        attempts = select(AttemptRow.id).where(AttemptRow.job_id == job.id, AttemptRow.number == job.attempt)
        row = ReplicaRow(
            id=uuid7(), job_id=job.id, attempt_id=(await tx.session.execute(attempts)).scalar_one(), epoch=job.epoch,
            attempt=job.attempt, role=message.role, index=message.index, state=ReplicaState.ASSIGNED.value,
            host=message.host, pid=message.pid, stream=await next_numbers(tx, "stream", 1), created_at=now,
            state_at=now, reason="",
        )  # fmt: skip
        created(tx, row, at=now)
        transition(tx, row, ReplicaState.RUNNING, at=now, reason="registered")
        await tx.session.flush()
        return row


def outcome(body: Mapping[str, Any]) -> tuple[bool, str]:
    """Read the body of a GOODBYE: whether the process failed, and its error as text that can be stored."""
    error = str(body.get("error") or "").replace("\0", "").encode(errors="backslashreplace").decode()
    return bool(body.get("failed", False)), error.strip()[:MAX_ERROR]


def job_name(text: str) -> str:
    """Return a job name that the specification allows, from whatever a person called the job."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")[:63].rstrip("._-")
    return name or "attached"
