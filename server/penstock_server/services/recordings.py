"""Recordings in full: the agents of a job have its processes send every step whole for some seconds."""

from __future__ import annotations

from penstock.protocol.agent import RecordOrder
from penstock.protocol.states import ReplicaState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.problems import Conflict
from penstock_server.schemas.recordings import FullRecording, RecordedProcess
from penstock_server.services.jobs import Jobs
from penstock_server.streams.agents import AgentLink, Agents
from penstock_server.tables import ReplicaRow


class Recordings:
    """Passes requests on; holds nothing."""

    def __init__(self, database: Database, clock: Clock, jobs: Jobs, agents: Agents) -> None:
        self._db, self._clock, self._jobs, self._agents = database, clock, jobs, agents

    async def ask(self, job_id: str, seconds: int) -> FullRecording:
        """Have the running trainers of the newest attempt record in full. Raises NotFound, Conflict if none can.

        Parameter servers run no steps.
        """
        await self._jobs.get(job_id)
        replicas = await self._jobs.streams(job_id)
        newest = max((one.attempt for one in replicas), default=0)
        running = [
            one
            for one in replicas
            if one.attempt == newest and one.state == ReplicaState.RUNNING and one.role != "pserver"
        ]
        if not running:
            raise Conflict("replica_not_running", "no trainer of this job is running; only a running one records")
        async with self._db.write() as tx:
            tx.subject = job_id
        asked = [self._ask(one, seconds) for one in running]
        if all(one.error for one in asked):
            away = all(one.node_id is not None and self._agents.get(one.node_id) is None for one in running)
            raise Conflict("node_unreachable" if away else "not_recorded", asked[0].error)
        return FullRecording(job_id=job_id, asked_at=self._clock.now(), seconds=seconds, processes=asked)

    def _ask(self, replica: ReplicaRow, seconds: int) -> RecordedProcess:
        link = None if replica.node_id is None else self._agents.get(replica.node_id)
        error = _why_not(replica, link)
        if link is not None and not error:
            order = RecordOrder(replica_id=replica.id, seconds=seconds)
            link.outbox.put(f"record:{replica.id}:{seconds}", order.fields())  # no shorter one replaces it
        return RecordedProcess(replica_id=replica.id, role=replica.role, index=replica.index, error=error)


def _why_not(replica: ReplicaRow, link: AgentLink | None) -> str:
    if replica.node_id is None:
        return "a process that was started by hand has no agent beside it to ask; submit the job to have one"
    if link is None or not link.greeted:
        return "the agent of its node is not connected: 'penstock nodes' shows since when; retry once it is back"
    if not link.records:
        return "the agent of its node is older: update Penstock there and restart it; its jobs go on meanwhile"
    return ""
