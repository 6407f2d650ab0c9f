"""What agents report of replicas, and what silence means. Every write is fenced by node and epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta

from sqlalchemy import select

from penstock.errors import PeerError
from penstock.protocol.agent import Hello, ReplicaReport, RunningReplica
from penstock.protocol.states import LIVE_REPLICA, TERMINAL_REPLICA, JobState, NodeState, ReplicaState, StopReason
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.services import preemption
from penstock_server.services.groupcommit import GroupCommit, Outcome
from penstock_server.services.lifecycle import NEVER_STARTED, may_linger
from penstock_server.services.nodes import Nodes
from penstock_server.services.settle import LogTail, load, locked_job, replicas_of, settle
from penstock_server.services.transitions import allowed, transition
from penstock_server.tables import JobRow, NodeRow, ReplicaRow

_WAITING = (JobState.QUEUED, JobState.RECOVERING)
_STOPPABLE = (*_WAITING, JobState.STARTING, JobState.RUNNING)
_FORWARD = {ReplicaState.ASSIGNED: 0, ReplicaState.PREPARING: 1, ReplicaState.UNKNOWN: 1, ReplicaState.RUNNING: 2}
REPORTS_AT_ONCE = 16
"""What one transaction takes at most, for which a submission waits."""
GATHER_S = 0.004
FIRST_WAIT_S = 60.0
"""How long jobs that waited when the server started go on waiting at least: nodes have to come back first."""
NEVER_STARTED_S = 2.0
"""How long an agent has to report that it had started a replica which its job no longer wants."""


class StaleEpoch(PeerError):
    """A message of an attempt that is over."""

    code = "stale_epoch"


class Reports:
    """Reports of agents, and the time limits on them."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        nodes: Nodes,
        tail: LogTail,
        *,
        grace_s: float,
        stop_patience_s: float,
        pserver_grace_s: float,
    ) -> None:
        self._db, self._clock, self._nodes, self._tail = database, clock, nodes, tail
        self._grace_s, self._stop_patience_s = grace_s, stop_patience_s
        self._pserver_grace = timedelta(seconds=pserver_grace_s)
        self._group = GroupCommit(database, self._apply, most=REPORTS_AT_ONCE, gather_s=GATHER_S)
        self._stopping_since: dict[str, float] = {}  # on the monotonic clock: when a stop began
        self._began, self._began_at = clock.monotonic(), clock.now()
        self._limits: dict[tuple[str, datetime], float] = {}  # on the monotonic clock: when it has taken too long
        self.released: frozenset[str] = frozenset()
        """Pservers that had their time to end by themselves after their trainers: they are not wanted any more."""

    async def settled(self) -> None:
        """Return once no report is being written."""
        await self._group.settled()

    async def hello(self, node_id: str, hello: Hello) -> set[str]:
        """Note that an agent connected; return the replicas that it should have and does not."""
        async with self._db.write() as tx:
            await self._nodes.connected(tx, node_id, hello)
            rows = await self._busy_on(tx, node_id)
            present = {(r.replica_id, r.epoch): r for r in hello.replicas}
            missing: set[str] = set()
            jobs: set[str] = set()
            for row in rows:
                found = present.get((row.id, row.epoch))
                if found is not None:
                    self._readopt(tx, row, found)
                    jobs.add(row.job_id)
                elif row.state != ReplicaState.ASSIGNED:
                    missing.add(row.id)
            await self._settle_all(tx, jobs)
        return missing

    async def report(self, node_id: str, message: ReplicaReport) -> None:
        """Apply a report; return once it is committed, together with those that other agents send meanwhile.

        A repeated one changes nothing. Raises StaleEpoch, or PeerError if it is not its to make.
        """
        await self._group.put((node_id, message))

    async def _apply(self, tx: Tx, reports: Sequence[tuple[str, ReplicaReport]]) -> list[Outcome]:
        found = await _of_reports(tx, [message.replica_id for _, message in reports])
        loaded = await load(tx, {job.id for _, job in found.values()})
        outcomes: list[Outcome] = []
        for node_id, message in reports:
            row, job = found.get(message.replica_id, (None, None))
            refusal = _refusal(row, node_id, message)
            outcomes.append(refusal)
            if row is None or job is None or refusal is not None or ReplicaState(row.state) in TERMINAL_REPLICA:
                continue
            self._take_over(tx, row, message)
            now = self._clock.now()
            if await settle(tx, job, at=now, tail=self._tail, grace_s=self._grace_s, loaded=loaded.get(job.id)):
                loaded.pop(job.id, None)
        return outcomes

    async def recent_on(self, node_id: str) -> list[tuple[str, str]]:
        """Return (replica, job) for what runs on a node or ended there within the last day."""
        since = self._clock.now() - timedelta(days=1)
        statement = select(ReplicaRow.id, ReplicaRow.job_id).where(ReplicaRow.node_id == node_id)
        statement = statement.where(ReplicaRow.state.in_(LIVE_REPLICA) | (ReplicaRow.finished_at >= since))
        async with self._db.glance() as session:
            return [(replica_id, job_id) for replica_id, job_id in await session.execute(statement)]

    async def job_of(self, node_id: str, replica_id: str, epoch: int) -> str | None:
        """Return the job of a replica, if it is of this node and epoch."""
        statement = select(ReplicaRow.job_id).where(
            ReplicaRow.id == replica_id, ReplicaRow.node_id == node_id, ReplicaRow.epoch == epoch
        )
        async with self._db.glance() as session:
            return (await session.execute(statement)).scalar_one_or_none()

    async def lost(self, replica_ids: Iterable[str], detail: str) -> None:
        """Declare replicas lost, for instance because their agent came back without them."""
        async with self._db.write() as tx:
            jobs = set()
            for replica_id in replica_ids:
                row = await tx.session.get(ReplicaRow, replica_id)
                if row is not None and ReplicaState(row.state) not in TERMINAL_REPLICA:
                    transition(tx, row, ReplicaState.LOST, at=self._clock.now(), reason="lost", detail=detail)
                    jobs.add(row.job_id)
            await self._settle_all(tx, jobs)

    async def node_missed(self, node_id: str, *, is_still: Callable[[], bool]) -> None:
        """An agent missed its lease: its node is unreachable, and what ran there is unknown.

        What it had not reported to have taken is lost at once, so that another node can take it. `is_still`: whether
        the lease is missed once the transaction has begun; a message of the agent may have come while it waited.
        """
        async with self._db.write() as tx:
            node = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
            if node is None or not allowed(NodeState(node.state), NodeState.UNREACHABLE) or not is_still():
                return
            now = self._clock.now()
            silent = "its agent has sent nothing for longer than its lease"
            transition(tx, node, NodeState.UNREACHABLE, at=now, reason="lease_missed", detail=silent)
            jobs = set()
            for row in await self._busy_on(tx, node_id):
                if row.state == ReplicaState.ASSIGNED:  # should it run after all, its epoch is stale and it is stopped
                    detail = f"node {node.name!r} was gone before it had taken it"
                    transition(tx, row, ReplicaState.LOST, at=now, reason="node_lost", detail=detail)
                    jobs.add(row.job_id)
                elif allowed(ReplicaState(row.state), ReplicaState.UNKNOWN):
                    transition(tx, row, ReplicaState.UNKNOWN, at=now, reason="lease_missed")
                    jobs.add(row.job_id)
            await self._settle_all(tx, jobs)

    async def node_back(self, node_id: str) -> None:
        """An agent that had missed its lease sends messages again over the same connection: nothing was lost."""
        async with self._db.write() as tx:
            node = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
            if node is None or node.state != NodeState.UNREACHABLE:
                return
            self._nodes.back(tx, node, reason="lease_renewed")
            jobs = set()
            for row in await self._busy_on(tx, node_id):
                if row.state == ReplicaState.UNKNOWN:
                    transition(tx, row, _known_again(row), at=self._clock.now(), reason="lease_renewed")
                    jobs.add(row.job_id)
            await self._settle_all(tx, jobs)

    async def node_gone(self, node_id: str, *, is_still: Callable[[], bool]) -> bool:
        """A node was silent for the whole grace: it is down, and its replicas are lost.

        `is_still`: as of `node_missed`. Returns False, and changes nothing, if its agent is there after all.
        """
        async with self._db.write() as tx:
            node = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
            if not is_still():
                return False
            if node is None or not allowed(NodeState(node.state), NodeState.DOWN):
                return True
            now = self._clock.now()
            silent = f"its agent has sent nothing for {self._grace_s:g} s beyond its lease"
            transition(tx, node, NodeState.DOWN, at=now, reason="lease_missed", detail=silent)
            detail = f"node {node.name!r} has sent no heartbeat for {self._grace_s:g} s beyond its lease"
            jobs = set()
            for row in await self._busy_on(tx, node_id):
                transition(tx, row, ReplicaState.LOST, at=now, reason="node_lost", detail=detail)
                jobs.add(row.job_id)
            await self._settle_all(tx, jobs)
        return True

    async def overdue(self) -> None:
        """Give up on replicas of stopping jobs whose agent sends no report, so that no job stops for ever."""
        now = self._clock.now()
        statement = (
            select(ReplicaRow, JobRow)
            .join(JobRow, JobRow.id == ReplicaRow.job_id)
            .where(ReplicaRow.state.in_(LIVE_REPLICA), JobRow.kind == "managed")
            .where(JobRow.state.in_([JobState.STOPPING, JobState.RECOVERING]))
        )
        async with self._db.glance() as session:
            pairs = [(replica, job) for replica, job in await session.execute(statement)]
        self._note_stops(pairs, now)
        await self._release(pairs)
        late = [replica.id for replica, job in pairs if self._is_overdue(replica, job)]
        if not late:
            return
        async with self._db.write() as tx:
            jobs = set()
            for replica_id in late:
                row = await tx.session.get(ReplicaRow, replica_id)
                if row is None or ReplicaState(row.state) in TERMINAL_REPLICA:
                    continue
                if row.state == ReplicaState.ASSIGNED:
                    transition(tx, row, ReplicaState.KILLED, at=now, reason="stopped", detail=NEVER_STARTED)
                else:
                    detail = "its agent did not report its end in time"
                    transition(tx, row, ReplicaState.LOST, at=now, reason="stopped", detail=detail)
                jobs.add(row.job_id)
            await self._settle_all(tx, jobs)

    async def stop_long_ones(self) -> None:
        """Stop jobs whose attempt, or whose wait for one, has taken longer than their description allows."""
        statement = select(JobRow.id, JobRow.ends_by, JobRow.state, JobRow.state_at)
        statement = statement.where(JobRow.state.in_(_STOPPABLE), JobRow.ends_by.is_not(None))
        async with self._db.glance() as session:
            found = (await session.execute(statement)).all()
        self._note_limits(
            [
                (job_id, by, self._began + FIRST_WAIT_S if state in _WAITING and at < self._began_at else 0.0)
                for job_id, by, state, at in found
                if by is not None
            ]
        )
        for (job_id, ends_by), limit in self._limits.items():
            if limit <= self._clock.monotonic():
                await self._stop_long(job_id, ends_by)

    async def _stop_long(self, job_id: str, ends_by: datetime) -> None:
        async with self._db.write() as tx:
            job = await locked_job(tx, job_id)
            if job is None or job.ends_by != ends_by or job.state not in _STOPPABLE:
                return
            if job.state in _WAITING and job.spec.get("max_wait_s") is None:
                job.ends_by = None  # its last attempt would have ended then
                return
            if job.state in _WAITING:
                reason = StopReason.NO_CAPACITY
                job.why = f"was not placed within {job.spec['max_wait_s']:g} s, which is max_wait_s: {job.why}"
            else:
                reason = StopReason.MAX_DURATION
                job.why = f"its attempt has taken {job.spec['max_duration_s']:g} s, which is max_duration_s"
            now = self._clock.now()
            transition(tx, job, JobState.STOPPING, at=now, reason=reason, detail=job.why)
            tx.effects.nodes.update(r.node_id for r in await replicas_of(tx, job) if r.node_id is not None)
            await settle(tx, job, at=now, tail=self._tail, grace_s=self._grace_s)

    def _note_limits(self, ends: Sequence[tuple[str, datetime, float]]) -> None:
        """Note when attempts and waits have taken too long: (job, when by the wall clock, not before).

        As for stops, the wall clock is read when one is seen first.
        """
        before, now, seen = self._limits, self._clock.now(), self._clock.monotonic()
        self._limits = {
            (job_id, by): before.get((job_id, by), max(first, seen + (by - now).total_seconds()))
            for job_id, by, first in ends
        }

    def _note_stops(self, pairs: Sequence[tuple[ReplicaRow, JobRow]], now: datetime) -> None:
        """Note when stops began. From then on the wall clock may be set: it is read when a stop is seen first."""
        since, seen = self._stopping_since, self._clock.monotonic()
        self._stopping_since = {
            replica.id: since.get(replica.id, seen - max(0.0, (now - job.state_at).total_seconds()))
            for replica, job in pairs
        }

    async def _release(self, pairs: Sequence[tuple[ReplicaRow, JobRow]]) -> None:
        """Have pservers stopped that did not end by themselves after their trainers."""
        late = {r.id: r.node_id for r, job in pairs if _lingers(r, job) and self._waited(r) >= self._pserver_grace}
        fresh = {replica_id: node_id for replica_id, node_id in late.items() if replica_id not in self.released}
        if fresh:
            async with self._db.write() as tx:
                tx.effects.nodes.update(node_id for node_id in fresh.values() if node_id is not None)
        self.released = frozenset(late)  # not before: if the write fails, they are as fresh the next time

    def _is_overdue(self, replica: ReplicaRow, job: JobRow) -> bool:
        waited = self._waited(replica)
        waited -= self._pserver_grace if _lingers(replica, job) else timedelta()
        if replica.state == ReplicaState.ASSIGNED:
            return waited >= timedelta(seconds=NEVER_STARTED_S)
        if replica.state == ReplicaState.UNKNOWN:
            return False  # its node's lease decides
        limit_s = float(job.spec.get("stop_grace_s", 5.0)) + self._stop_patience_s
        limit_s += preemption.grace_s(job.spec) if job.reason == StopReason.PREEMPTED else 0.0
        return waited >= timedelta(seconds=limit_s)

    def _waited(self, replica: ReplicaRow) -> timedelta:
        """Return how long a stop has taken, also if the wall clock was set meanwhile."""
        return timedelta(seconds=self._clock.monotonic() - self._stopping_since[replica.id])

    def _readopt(self, tx: Tx, row: ReplicaRow, found: RunningReplica) -> None:
        row.pid = found.pid or row.pid
        state = ReplicaState(row.state)
        if found.state is ReplicaState.RUNNING:
            back = ReplicaState.RUNNING
        else:
            back = _known_again(row) if state is ReplicaState.UNKNOWN else state
        if state is not back:
            transition(tx, row, back, at=self._clock.now(), reason="readopted")

    def _take_over(self, tx: Tx, row: ReplicaRow, message: ReplicaReport) -> None:
        row.pid = message.pid or row.pid
        row.exit_code, row.signal = message.exit_code, message.signal
        before, after = ReplicaState(row.state), ReplicaState(message.state)
        if before is after or (after in _FORWARD and _FORWARD[after] <= _FORWARD[before]):
            return  # reported again, or overtaken
        transition(tx, row, after, at=self._clock.now(), reason="reported", detail=message.detail or "")

    async def _busy_on(self, tx: Tx, node_id: str) -> list[ReplicaRow]:
        statement = select(ReplicaRow).where(ReplicaRow.node_id == node_id, ReplicaRow.state.in_(LIVE_REPLICA))
        return list((await tx.session.execute(statement)).scalars())

    async def _settle_all(self, tx: Tx, job_ids: Iterable[str]) -> None:
        for job_id in sorted(job_ids):  # in one order, so that two transactions never wait for each other
            job = await locked_job(tx, job_id)
            assert job is not None  # foreign key
            await settle(tx, job, at=self._clock.now(), tail=self._tail, grace_s=self._grace_s)


async def _of_reports(tx: Tx, replica_ids: Iterable[str]) -> dict[str, tuple[ReplicaRow, JobRow]]:
    """Load replicas and their jobs, which stay as they are for other transactions until this one ends."""
    statement = select(ReplicaRow, JobRow).join(JobRow, JobRow.id == ReplicaRow.job_id)
    statement = statement.where(ReplicaRow.id.in_(sorted(set(replica_ids)))).order_by(JobRow.id)
    found = await tx.session.execute(statement.with_for_update(of=JobRow, key_share=True))
    return {row.id: (row, job) for row, job in found}


def _refusal(row: ReplicaRow | None, node_id: str, message: ReplicaReport) -> PeerError | None:
    if row is None or row.node_id != node_id:
        return PeerError(f"replica {message.replica_id!r} is not of this node")
    if message.epoch != row.epoch:
        return StaleEpoch(f"replica {row.id} has epoch {row.epoch}; the report has {message.epoch}")
    return None


def _known_again(row: ReplicaRow) -> ReplicaState:
    """Return the state of a replica that was UNKNOWN: what it was before. One that had not started may fail to."""
    return ReplicaState.PREPARING if row.started_at is None else ReplicaState.RUNNING


def _lingers(replica: ReplicaRow, job: JobRow) -> bool:
    return may_linger(JobState(job.state), job.reason, replica.role)
