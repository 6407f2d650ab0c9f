"""Jobs: submit, find, list, cancel, and their history."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import ACTIVE_JOB, TERMINAL_JOB, TERMINAL_REPLICA, JobState, StopReason
from penstock_server import tags
from penstock_server.auth.principal import Principal
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.problems import Conflict, NotFound, Problem
from penstock_server.schemas import api
from penstock_server.services.changes import Changes
from penstock_server.services.jobsearch import JobOrder, JobQuery, counts_of, page_of, place_of
from penstock_server.services.pages import from_placed_token, from_token, to_placed_token, to_token
from penstock_server.services.retention import KEY_LIFE
from penstock_server.services.settle import LogTail, locked_job, replicas_of, settle
from penstock_server.services.transitions import created, transition
from penstock_server.services.views import event_view, job_views, new_job_view, replica_view
from penstock_server.streams.live import Live
from penstock_server.tables import EventRow, IdempotencyRow, JobRow, ReplicaRow, SnapshotRow
from penstock_server.uuid7 import uuid7

PIECE = 20
"""Jobs of a long list that are read at once: some 5 ms of the event loop."""


def fingerprint(spec: JobSpec) -> str:
    """Return what tells submissions apart. Without fields that the version before lacks and this one does not use.

    So a submission that is repeated after an upgrade is still the same one.
    """
    fields = spec.model_dump()
    if fields["max_wait_s"] is None:
        del fields["max_wait_s"]
    if not fields["node_selector"]:
        del fields["node_selector"]
    if not any(fields["restart"]["budgets"].values()):
        del fields["restart"]["budgets"]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class Waits(Protocol):
    """The scheduler, as submissions see it."""

    def waits(self, project: str, priority: int) -> str | None:
        """Return why a job that is submitted now waits, or None if a pass has to look. Called in the transaction."""

    def submitted(self, project: str, priority: int, why: str) -> None:
        """Note a job that was submitted with what `waits` returned. Called after the commit."""


class Jobs:
    """The jobs of this server."""

    def __init__(
        self, database: Database, clock: Clock, live: Live, tail: LogTail, changes: Changes, scheduling: Waits, *,
        grace_s: float,
    ) -> None:  # fmt: skip
        self._db, self._clock, self._live, self._tail, self._grace_s = database, clock, live, tail, grace_s
        self._changes, self._scheduling = changes, scheduling

    async def submit(self, spec: JobSpec, principal: Principal, key: str | None) -> api.Job:
        """Queue a job. With an idempotency key, the same submission again gives the same job.

        Raises a problem if the key was used for another submission, or the snapshot is not here.
        """
        if key is None:
            return await self._submit(spec, None)
        use = _Use(principal.token_id, key, fingerprint(spec))
        try:
            return await self._submit(spec, use)  # almost every key is new: it is looked up if it is not
        except (IntegrityError, Problem):  # what the first submission named may be gone meanwhile
            return await self._submit(spec, use, is_known=True)

    async def _submit(self, spec: JobSpec, use: _Use | None, *, is_known: bool = False) -> api.Job:
        """Raises IntegrityError if the key was used before, unless `is_known`."""
        async with self._db.write(urgent=True) as tx:
            known = await self._known(tx, use) if use is not None and is_known else None
            row = known or await self._create(tx, spec)
            why = self._scheduling.waits(spec.project, spec.priority) if known is None else None
            if why is not None:
                row.why = why
                tx.effects.schedule = False  # it is the last in the line: there is nothing to place
            if use is not None and known is None:
                tx.last.append(use.row(row.id, self._clock.now()))
        if why is not None:
            self._scheduling.submitted(spec.project, spec.priority, why)
        if known is None:
            return new_job_view(row)
        return await self.get(row.id)

    async def get(self, job_id: str) -> api.Job:
        """Return a job. Raises NotFound."""
        async with self._db.read() as session:
            return (await job_views(session, [await job_row(session, job_id)], self._live, self._clock.now()))[0]

    async def project_of(self, job_id: str) -> str:
        """Return the project of a job. Raises NotFound."""
        async with self._db.glance() as session:
            found = await session.execute(select(JobRow.project).where(JobRow.id == job_id))
            project: str | None = found.scalar_one_or_none()
        if project is None:
            raise NotFound("job", job_id)
        return project

    async def page(
        self, query: JobQuery, *, size: int, token: str | None, order: JobOrder = JobOrder.NEWEST
    ) -> api.Page[api.Job]:
        """List the jobs of a query. Raises a problem for a token that is none, or whose job was removed."""
        after, place = from_placed_token(token)
        async with self._db.read() as session:
            rows = await page_of(
                session, query, order, after=after, place=place, limit=size + 1, is_sqlite=self._db.is_sqlite
            )  # fmt: skip
            items = await job_views(session, rows[:size], self._live, self._clock.now())
        more = to_placed_token(rows[size - 1].id, place_of(rows[size - 1], order)) if len(rows) > size else None
        return api.Page(items=items, next_page_token=more)

    async def counts(self, query: JobQuery) -> dict[str, int]:
        """Return how many jobs of a query are in each state."""
        async with self._db.read() as session:
            return await counts_of(session, query, is_sqlite=self._db.is_sqlite)

    async def newest(self, limit: int, projects: Collection[str] | None = None) -> tuple[list[str], int]:
        """Return the newest jobs' ids and those of jobs that have not ended, newest first, and how many jobs there are.

        By one statement: what it lists is what it counts. `projects`: of these alone.
        """
        of = [] if projects is None else [JobRow.project.in_(projects)]
        newest = select(JobRow.id).where(*of).order_by(JobRow.id.desc()).limit(limit)
        active = JobRow.state.in_(ACTIVE_JOB)
        total = select(func.count()).select_from(JobRow).where(*of).scalar_subquery()
        statement = select(JobRow.id, total).where(active | JobRow.id.in_(newest), *of).order_by(JobRow.id.desc())
        async with self._db.glance() as session:
            rows = (await session.execute(statement)).all()
        return [id for id, _ in rows], rows[0][1] if rows else 0

    async def of(self, ids: Sequence[str]) -> AsyncIterator[api.Job]:
        """Give jobs in the order of `ids`, newest first. The event loop turns in between."""
        for start in range(0, len(ids), PIECE):
            piece = select(JobRow).where(JobRow.id.in_(ids[start : start + PIECE])).order_by(JobRow.id.desc())
            async with self._db.read() as session:  # not held while the caller works
                rows = (await session.execute(piece)).scalars().all()
                views = await job_views(session, rows, self._live, self._clock.now())
            for view in views:
                yield view

    async def changed(self, job_id: str, *, since: int | None, within_s: float) -> api.Job:
        """Return a job once its version is not `since`, or once it has ended, or when the time is up.

        With `since` None only the end counts. Raises NotFound.
        """
        deadline = self._clock.monotonic() + within_s
        with self._changes.of(job_id) as change:  # before the first look, so that nothing is missed
            while True:
                change.clear()
                job = await self.get(job_id)
                left_s = deadline - self._clock.monotonic()
                if job.state in TERMINAL_JOB or (since is not None and job.version != since) or left_s <= 0:
                    return job
                if not await change.wait(left_s):
                    return await self.get(job_id)

    async def cancel(self, job_id: str, principal: Principal, *, version: int | None = None) -> api.Job:
        """Stop a job. A job that has ended or is stopping stays as it is. Raises Conflict if it is attached.

        `version`: the one that the job has to have still (If-Match).
        """
        async with self._db.write(urgent=True) as tx:
            job = await locked_job(tx, job_id)
            if job is None:
                raise NotFound("job", job_id)
            tags.require(f"job {job.name!r}", str(job.version), None if version is None else str(version))
            if JobState(job.state) not in TERMINAL_JOB | {JobState.STOPPING}:
                if job.kind == "attached":
                    raise await _not_ours(tx, job)
                why = f"cancelled by {principal.name!r}"
                now = self._clock.now()
                transition(tx, job, JobState.STOPPING, at=now, reason=StopReason.CANCELLED, detail=why)
                job.why = why
                await settle(tx, job, at=now, tail=self._tail, grace_s=self._grace_s)
                tx.effects.nodes.update(r.node_id for r in await replicas_of(tx, job) if r.node_id is not None)
        return await self.get(job_id)

    async def events(self, job_id: str, *, size: int, token: str | None) -> api.Page[api.Event]:
        """List a job's changes of state and its replicas', oldest first."""
        statement = select(EventRow).where(EventRow.job_id == job_id).order_by(EventRow.id).limit(size + 1)
        after = from_token(token)
        if after is not None:
            statement = statement.where(EventRow.id > after)
        async with self._db.read() as session:
            await job_row(session, job_id)
            rows = (await session.execute(statement)).scalars().all()
        more = to_token(rows[size - 1].id) if len(rows) > size else None
        return api.Page(items=[event_view(row) for row in rows[:size]], next_page_token=more)

    async def replicas(
        self,
        *,
        role: str | None,
        job_id: str | None,
        attempt: int | None,
        size: int,
        token: str | None,
        projects: Collection[str] | None = None,
    ) -> api.Page[api.Replica]:
        """List replicas of all attempts, newest first. `projects`: of their jobs alone."""
        statement = select(ReplicaRow).order_by(ReplicaRow.id.desc()).limit(size + 1)
        if role is not None:
            statement = statement.where(ReplicaRow.role == role)
        if job_id is not None:
            statement = statement.where(ReplicaRow.job_id == job_id)
        if attempt is not None:
            statement = statement.where(ReplicaRow.attempt == attempt)
        if projects is not None:
            statement = statement.join(JobRow, JobRow.id == ReplicaRow.job_id).where(JobRow.project.in_(projects))
        after = from_token(token)
        if after is not None:
            statement = statement.where(ReplicaRow.id < after)
        async with self._db.read() as session:
            rows = (await session.execute(statement)).scalars().all()
        more = to_token(rows[size - 1].id) if len(rows) > size else None
        return api.Page(items=[replica_view(row) for row in rows[:size]], next_page_token=more)

    async def replica_of(self, job_id: str, replica_id: str | None) -> ReplicaRow:
        """Return a replica of a job; without an id, trainer 0 of its newest attempt. Raises NotFound."""
        statement = select(ReplicaRow).where(ReplicaRow.job_id == job_id)
        if replica_id is not None:
            statement = statement.where(ReplicaRow.id == replica_id)
        order = (ReplicaRow.attempt.desc(), ReplicaRow.role.desc(), ReplicaRow.index, ReplicaRow.id.desc())
        async with self._db.read() as session:
            await job_row(session, job_id)
            row = (await session.execute(statement.order_by(*order).limit(1))).scalar_one_or_none()
        if row is None:
            raise NotFound("replica", replica_id or "trainer 0")
        return row

    async def streams(self, job_id: str) -> Sequence[ReplicaRow]:
        """Return every replica of a job, of all attempts, oldest first."""
        statement = select(ReplicaRow).where(ReplicaRow.job_id == job_id).order_by(ReplicaRow.id)
        async with self._db.read() as session:
            return (await session.execute(statement)).scalars().all()

    async def _create(self, tx: Tx, spec: JobSpec) -> JobRow:
        if spec.snapshot is not None and await tx.session.get(SnapshotRow, spec.snapshot) is None:
            raise Problem(
                409,
                "snapshot_not_found",
                f"/spec/snapshot: there is no snapshot {spec.snapshot}",
                hint="upload it with POST /api/v1/snapshots first",
            )
        now = self._clock.now()
        row = JobRow(
            id=uuid7(),
            name=spec.name,
            kind="managed",
            state=JobState.CREATED.value,
            project=spec.project,
            priority=spec.priority,
            spec=spec.model_dump(mode="json"),
            why="waits to be placed",
            created_at=now,
            state_at=now,
            latest={},
            lost={},
            reason="",
            reason_detail="",
            epoch=0,
            attempt=0,
            restarts=0,
            restarted_at=[],
            restarts_by_class={},
            ends_by=None if spec.max_wait_s is None else now + timedelta(seconds=spec.max_wait_s),
        )
        tx.subject = row.id
        created(tx, row, at=now)
        transition(tx, row, JobState.QUEUED, at=now)
        return row

    async def _known(self, tx: Tx, use: _Use) -> JobRow | None:
        found = await tx.session.get(IdempotencyRow, (use.token_id, use.key))
        if found is not None and found.created_at < self._clock.now() - KEY_LIFE:  # the retention deletes the others
            await tx.session.delete(found)
            await tx.session.flush()
            found = None
        if found is None:
            return None
        if found.fingerprint != use.fingerprint:
            raise Problem(
                422,
                "idempotency_key_reused",
                f"Idempotency-Key {use.key!r} came before with another job",
                hint="use a new key for a new job",
            )
        return await tx.session.get(JobRow, found.job_id)


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of an idempotency key. `fingerprint`: of the submission."""

    token_id: str
    key: str
    fingerprint: str

    def row(self, job_id: str, at: datetime) -> IdempotencyRow:
        return IdempotencyRow(
            token_id=self.token_id, key=self.key, fingerprint=self.fingerprint, job_id=job_id, created_at=at
        )


async def _not_ours(tx: Tx, job: JobRow) -> Conflict:
    over = [s.value for s in TERMINAL_REPLICA]
    running = [f"{r.pid} on {r.host!r}" for r in await replicas_of(tx, job) if r.state not in over]
    return Conflict(
        "job_attached",
        f"job {job.name!r} is attached: its processes were started by hand, and this server cannot stop them",
        hint=f"stop the process itself: {', '.join(running[:4]) or 'none is left'}{' …' if len(running) > 4 else ''}",
    )


async def job_row(session: AsyncSession, job_id: str) -> JobRow:
    """Load a job. Raises NotFound."""
    row = await session.get(JobRow, job_id)
    if row is None:
        raise NotFound("job", job_id)
    return row
