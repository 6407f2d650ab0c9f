"""Python stacks of a running replica, which the agent of its node takes. In memory, on one event loop.

Who asks while they are taken gets the same; a replica is asked once a second at most. Each request is one row of the
audit log, written before the agent is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.protocol.agent import StackAnswer, StackFrame, StackOrder, StackProcess, StackThread
from penstock.protocol.states import ReplicaState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.problems import Conflict, Problem
from penstock_server.schemas.stacks import PythonFrame, PythonProcess, PythonStacks, PythonThread
from penstock_server.services.jobs import Jobs
from penstock_server.streams.agents import AgentLink, Agents
from penstock_server.tables import ReplicaRow
from penstock_server.uuid7 import uuid7

ANSWER_S = 12.0
REST_S = 1.0
MOST_AT_ONCE = 16
MOST_WAITING = 8
"""Who may wait for what is being taken of one replica: each is a row of the audit log."""
_LIBRARY = re.compile(r"(site|dist)-packages/|/core/penstock/|/lib/python[\d.]+/|^<frozen ")
_WORK = re.compile(r"/replicas/[^/]+/work/(?!.*(site|dist)-packages/)")  # a job's own files, wherever agents keep them


@dataclass(frozen=True, slots=True)
class _Taking:
    """What is being taken of a replica, for all who ask for the same."""

    skip: int
    task: asyncio.Task[PythonStacks | Problem]


class Stacks:
    """What agents were asked for, by request, and what is being taken, by replica."""

    def __init__(self, database: Database, clock: Clock, jobs: Jobs, agents: Agents) -> None:
        self._db, self._clock, self._jobs, self._agents = database, clock, jobs, agents
        self._asked: dict[str, tuple[AgentLink, asyncio.Future[StackAnswer | None]]] = {}
        self._taking: dict[str, _Taking] = {}
        self._rests_until: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()  # requests, by replica

    async def of(self, job_id: str, replica_id: str | None, skip: int = 0) -> PythonStacks:
        """Take the stacks of a replica's processes; without `replica_id`, of trainer 0 of the newest attempt.

        `skip`: processes to pass over, of which the agent takes some only at once.
        Raises NotFound; Conflict where they cannot be taken; Problem if too many are asked for, or the agent is silent.
        """
        replica = await self._jobs.replica_of(job_id, replica_id)
        self._link(replica)
        self._check_pace(replica, skip)
        with self._waits_for(replica):
            return await self._of(job_id, replica, skip)

    async def _of(self, job_id: str, replica: ReplicaRow, skip: int) -> PythonStacks:
        async with self._db.write() as tx:
            tx.subject = job_id
        self._check_pace(replica, skip)  # others have asked during the write
        taking = self._taking.get(replica.id)
        if taking is None:
            link = self._link(replica)  # as it is now
            taking = _Taking(skip, asyncio.create_task(self._take(replica, link, skip), name="stacks"))
            self._taking[replica.id] = taking
        result = await asyncio.shield(taking.task)  # a caller that leaves must not end it for the others
        if isinstance(result, Problem):
            raise result.with_traceback(None)
        return result

    def answered(self, link: AgentLink, answer: StackAnswer) -> None:
        """Take an agent's answer; one that is late, or of another node, is dropped."""
        asked_of, future = self._asked.get(answer.request_id, (None, None))
        if future is not None and asked_of is not None and asked_of.node_id == link.node_id and not future.done():
            future.set_result(answer)

    def lost(self, link: AgentLink) -> None:
        """Take note that a connection has ended: what was asked on it is answered on no other."""
        for asked_of, future in self._asked.values():
            if asked_of is link and not future.done():
                future.set_result(None)

    def _link(self, replica: ReplicaRow) -> AgentLink:
        """Return the connection of the replica's agent. Raises Conflict, which says what to do."""
        who = f"{replica.role} {replica.index}"
        if replica.state != ReplicaState.RUNNING:
            raise Conflict("replica_not_running", f"{who} is {replica.state}; only a running process has stacks")
        if replica.node_id is None:
            raise Conflict(
                "replica_attached", f"{who} was started by hand, so no agent of Penstock is beside it",
                hint=f"run 'py-spy dump --pid {replica.pid}' on {replica.host}",
            )  # fmt: skip
        link = self._agents.get(replica.node_id)
        if link is None or not link.greeted:
            raise Conflict(
                "node_unreachable", f"the agent of the node on which {who} runs is not connected",
                hint="'penstock nodes' shows since when; retry once it is back",
            )  # fmt: skip
        if not link.takes_stacks:
            raise Conflict(
                "agent_too_old", f"the agent of the node on which {who} runs is of a version that takes no stacks",
                hint="update Penstock on that node and restart its agent; its jobs go on meanwhile",
            )  # fmt: skip
        return link

    @contextlib.contextmanager
    def _waits_for(self, replica: ReplicaRow) -> Iterator[None]:
        """Count who waits. Raises Problem if there are too many."""
        if self._waiting[replica.id] >= MOST_WAITING:
            raise Problem(
                429, "too_many_stacks", f"{MOST_WAITING} requests wait for the stacks of this replica already",
                hint=f"retry in {ANSWER_S:.0f} seconds",
            )  # fmt: skip
        self._waiting[replica.id] += 1
        try:
            yield
        finally:
            self._waiting[replica.id] -= 1
            if not self._waiting[replica.id]:
                del self._waiting[replica.id]

    def _check_pace(self, replica: ReplicaRow, skip: int) -> None:
        """Raise Problem unless the same is being taken, or the replica may be asked."""
        taking = self._taking.get(replica.id)
        if taking is not None and taking.skip == skip:
            return
        now = self._clock.monotonic()
        self._rests_until = {key: until for key, until in self._rests_until.items() if until > now}
        if taking is not None or replica.id in self._rests_until or len(self._taking) >= MOST_AT_ONCE:
            raise Problem(
                429, "too_many_stacks", f"a replica's stacks are taken once a second, of {MOST_AT_ONCE} at once",
                hint="retry in some seconds",
            )  # fmt: skip

    async def _take(self, replica: ReplicaRow, link: AgentLink, skip: int) -> PythonStacks | Problem:
        request_id = uuid7()
        future: asyncio.Future[StackAnswer | None] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = link, future
        try:
            order = StackOrder(request_id=request_id, replica_id=replica.id, skip=skip)
            link.outbox.put(f"stack:{request_id}", order.fields())
            async with asyncio.timeout(ANSWER_S):
                answer = await future
        except TimeoutError:
            return Conflict(
                "agent_silent", f"the agent did not answer within {ANSWER_S:.0f} s",
                hint="its machine is busy, or out of reach: 'penstock nodes' shows when it sent its last heartbeat",
            )  # fmt: skip
        finally:
            del self._asked[request_id], self._taking[replica.id]
            self._rests_until[replica.id] = self._clock.monotonic() + REST_S
        if answer is None:
            return Conflict(
                "connection_lost", "the agent's connection ended before it answered",
                hint="'penstock nodes' shows when it is back; retry then",
            )  # fmt: skip
        if answer.skip != skip:
            return Conflict(
                "agent_too_old", "the agent is of a version that takes the stacks of the first processes only",
                hint="update Penstock on that node and restart its agent; its jobs go on meanwhile",
            )  # fmt: skip
        if answer.error:
            return Conflict("no_stacks", answer.error)
        return PythonStacks(
            job_id=replica.job_id, replica_id=replica.id, role=replica.role, index=replica.index,
            taken_at=self._clock.now(), processes=[_process(one) for one in answer.processes],
            skip=skip, num_left=answer.num_left,
        )  # fmt: skip


def is_own(file: str) -> bool:
    """Whether a frame is of the person's own code: not of a package, of Penstock, torch or the standard library."""
    return _WORK.search(file) is not None or _LIBRARY.search(file) is None


def _process(one: StackProcess) -> PythonProcess:
    return PythonProcess(
        pid=one.pid, command=one.command, error=one.error, threads=[_thread(each) for each in one.threads]
    )


def _thread(one: StackThread) -> PythonThread:
    return PythonThread(
        name=one.name, os_thread_id=one.os_thread_id, active=one.active, owns_gil=one.owns_gil,
        frames=[_frame(each) for each in one.frames],
    )  # fmt: skip


def _frame(one: StackFrame) -> PythonFrame:
    return PythonFrame(name=one.name, file=one.file, line=one.line, own=is_own(one.file))
