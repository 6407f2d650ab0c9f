"""Watches the steps of all jobs for hangs: a thin shell around `arrivals`. In memory, on one event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from sqlalchemy import select

from penstock.protocol.states import TERMINAL_JOB, JobState, ReplicaState
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.services.arrivals import LEAST_S, Arrivals, Hang
from penstock_server.services.budget import has_own
from penstock_server.services.lifecycle import hung
from penstock_server.services.settle import LogTail, end_attempt, locked_job, replicas_of, settle
from penstock_server.services.transitions import noted
from penstock_server.tables import JobRow

MAX_JOBS = 2000
Operators = Callable[[str], Awaitable[Mapping[int, str]]]
"""Returns the operator that each trainer of a job was last reported in, where that is known."""


class Hangs:
    """The steps of the jobs that report some. Cost of a pass: one comparison for each of them."""

    def __init__(self, database: Database, clock: Clock, tail: LogTail, *, grace_s: float) -> None:
        self._db, self._clock, self._tail, self._grace_s = database, clock, tail, grace_s
        self._jobs: dict[str, Arrivals] = {}
        self._hung: dict[str, int] = {}  # by job, the attempt whose hang is an event

    def note(self, job_id: str, attempt: int, trainer: int, step: int, time_ns: int) -> None:
        """Note that a trainer has ended a step."""
        now = self._clock.monotonic()
        found = self._jobs.get(job_id)
        if found is None or found.attempt < attempt:
            self._jobs[job_id] = found = Arrivals(attempt, now)
            while len(self._jobs) > MAX_JOBS:
                del self._jobs[next(iter(self._jobs))]
        if found.attempt == attempt:
            found.note(trainer, step, time_ns, now)

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended."""
        self._jobs.pop(job_id, None)
        self._hung.pop(job_id, None)

    async def step(self, operators: Operators) -> None:
        """Write an event for each job that hangs now, and for each that goes on again."""
        now = self._clock.monotonic()
        for job_id, attempt in list(self._hung.items()):
            found = self._jobs.get(job_id)
            if found is None or found.attempt != attempt or now - found.last_at <= LEAST_S:
                del self._hung[job_id]
                await self._over(job_id, attempt)
        silent = [(job_id, one) for job_id, one in self._jobs.items() if now - one.last_at > LEAST_S]
        for job_id, one in silent:
            hang = one.hang(now) if job_id not in self._hung else None
            if hang is None:
                continue
            if await self._report(job_id, one.attempt, hang, operators):
                self._hung[job_id] = one.attempt
            else:
                one.last_at = now  # silence says nothing while it is not reachable, nor right after

    async def _report(self, job_id: str, attempt: int, hang: Hang, operators: Operators) -> bool:
        """Write the event, and end the attempt if the job says so. False if the server cannot say that it hangs."""
        async with self._db.glance() as session:
            state = (await session.execute(select(JobRow.state).where(JobRow.id == job_id))).scalar_one_or_none()
        if state is None or state in TERMINAL_JOB:
            self.forget(job_id)  # what came after its end
        if state != JobState.RUNNING:
            return False
        last_in = await operators(job_id)
        async with self._db.write() as tx:
            job = await self._running(tx, job_id, attempt)
            if job is None:
                return False
            now = self._clock.now()
            job.why = hang.sentence()
            noted(tx, job, at=now, reason="hang", detail=f"{job.why}\n{hang.table(last_in)}")
            restart = job.spec.get("restart", {})
            if "hang" in restart.get("on", ()) or has_own(restart, "hang"):
                await end_attempt(tx, job, partial(hung, why=job.why), at=now, tail=self._tail)
        return True

    async def _over(self, job_id: str, attempt: int) -> None:
        async with self._db.write() as tx:
            job = await self._running(tx, job_id, attempt)
            if job is not None:
                noted(tx, job, at=self._clock.now(), reason="hang_over", detail="steps are reported again")
                await settle(tx, job, at=self._clock.now(), tail=self._tail, grace_s=self._grace_s)

    async def _running(self, tx: Tx, job_id: str, attempt: int) -> JobRow | None:
        """Return a job if it runs this attempt and all its processes are reachable: silence says nothing otherwise."""
        job = await locked_job(tx, job_id)
        if job is None or job.state != JobState.RUNNING or job.attempt != attempt:
            return None
        is_unknown = any(row.state == ReplicaState.UNKNOWN for row in await replicas_of(tx, job))
        return None if is_unknown else job
