"""What the scheduler would do with a job now, with a reason for each node. Reads only; nothing is reserved."""

from __future__ import annotations

from sqlalchemy import select

from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import NodeState
from penstock_server.db import Database
from penstock_server.diskspace import is_full
from penstock_server.schemas import api
from penstock_server.services.backfill import RESERVED, decide
from penstock_server.services.fairness import Terms, Use, over_quota
from penstock_server.services.pilots import STAYS, takes
from penstock_server.services.placement import Chosen, Waits, lacks, verdicts
from penstock_server.services.scheduling import Scheduling, needs_of
from penstock_server.services.survey import nowhere, rooms_of, terms, uses
from penstock_server.streams.agents import Agents
from penstock_server.tables import NodeRow


class Plans:
    """Plans of jobs that are not submitted."""

    def __init__(self, database: Database, scheduling: Scheduling, agents: Agents) -> None:
        self._db, self._scheduling, self._agents = database, scheduling, agents

    async def of(self, spec: JobSpec) -> api.Plan:
        """Return where the replicas of a job would go now, or why it would wait."""
        needs = needs_of(spec)
        async with self._db.read() as session:
            rooms, absent = await rooms_of(session, self._agents)
            stays = await self._scheduling.stays(session)
            used, given = await uses(session), await terms(session)
            nodes = (await session.execute(select(NodeRow).order_by(NodeRow.id))).scalars().all()
        quota = over_quota(spec.project, needs, used.get(spec.project, Use()), given.get(spec.project, Terms()))
        line = self._scheduling.line
        reserved = line.reserved_before(spec.project, spec.priority)
        answer = decide(needs, rooms, reserved, stays, "", spec) if rooms else Waits(nowhere(absent), forever=True)
        offered = [room for room in rooms if takes(stays.get(room.node_id, STAYS), "", spec.max_duration_s)]
        lacking = {room.node_id: lacks(spec.node_selector, room.labels) for room in rooms}
        found = verdicts(needs, offered, answer) | dict.fromkeys(reserved, RESERVED)
        found |= {node_id: why for node_id, why in lacking.items() if why}
        behind = line.why(spec.project, spec.priority)
        if quota is not None:
            why, would_start = quota.why, False
        elif isinstance(answer, Waits):
            why, would_start = answer.why, False
        else:
            why, would_start = (behind, False) if behind is not None else ("it would start now", True)
        return api.Plan(would_start=would_start, why=why, nodes=[self._node(row, found, answer) for row in nodes])

    def _node(self, row: NodeRow, found: dict[str, str], answer: Chosen | Waits) -> api.PlannedNode:
        replicas = answer.node_ids.count(row.id) if isinstance(answer, Chosen) else 0
        if row.state != NodeState.READY:
            reason = f"is {row.state}"
        elif self._agents.get(row.id) is None:
            reason = "its agent is not connected"
        elif is_full(self._agents.disk_of(row.id)):
            reason = "its disk is full"
        else:
            reason = found.get(row.id, "is a pilot that drains, has another job, or leaves before max_duration_s")
        return api.PlannedNode(id=row.id, name=row.name, state=NodeState(row.state), replicas=replicas, reason=reason)
