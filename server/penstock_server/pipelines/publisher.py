"""After a commit: send agents their desired set, and browsers what has changed. Newest state only."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import select

from penstock_server.clock import Clock
from penstock_server.db import Database, Effects
from penstock_server.services.orders import desired
from penstock_server.services.views import event_view, job_views, node_views
from penstock_server.streams.agents import Agents
from penstock_server.streams.hub import Hub
from penstock_server.streams.live import Live
from penstock_server.tables import EventRow, JobRow, NodeRow


class Publisher:
    """Gathers what changed, and sends each changed thing once, as it is when its turn comes."""

    def __init__(
        self, database: Database, clock: Clock, hub: Hub, live: Live, agents: Agents, *, pserver_grace_s: float
    ) -> None:
        self._pserver_grace = timedelta(seconds=pserver_grace_s)
        self._db, self._clock, self._hub, self._live, self._agents = database, clock, hub, live, agents
        self._jobs: set[str] = set()
        self._nodes: set[str] = set()
        self._again_at: dict[str, datetime] = {}
        self._events: list[EventRow] = []

    def mark(self, effects: Effects) -> None:
        """Note what a transaction changed."""
        self._jobs |= effects.jobs
        self._nodes |= effects.nodes
        self._events += effects.events

    def mark_jobs(self, job_ids: set[str]) -> None:
        """Note jobs whose figures changed."""
        self._jobs |= job_ids

    async def step(self) -> None:
        """Send everything that was noted."""
        jobs, self._jobs = self._jobs, set()
        nodes, self._nodes = self._nodes, set()
        events, self._events = self._events, []
        for node_id in nodes:
            await self.push_desired(node_id)
        for event in events:
            self._hub.publish_event(event.job_id, event_view(event).model_dump(mode="json", by_alias=True))
        await self._publish_jobs({job_id for job_id in jobs if self._hub.follows(job_id)})
        if nodes and self._hub.lists_followed:
            await self._publish_nodes()

    async def push_desired(self, node_id: str) -> None:
        """Send a node's whole wanted set to its agent, if it is connected."""
        link = self._agents.get(node_id)
        if link is not None:
            now, grace = self._clock.now(), self._pserver_grace
            orders = await desired(self._db, node_id, without=link.missing, now=now, pserver_grace=grace)
            self._again_at.pop(node_id, None)
            if orders.again_at is not None:
                self._again_at[node_id] = orders.again_at
            link.outbox.put("desired", orders.message.fields())

    def look_at_clock(self) -> bool:
        """Note nodes of which something else is wanted now, though nothing happened; return whether there are any."""
        now = self._clock.now()
        due = {node_id for node_id, at in self._again_at.items() if at <= now}
        self._nodes |= due
        for node_id in due:
            del self._again_at[node_id]
        return bool(due)

    async def _publish_jobs(self, job_ids: set[str]) -> None:
        if not job_ids:
            return
        async with self._db.read() as session:
            rows = (await session.execute(select(JobRow).where(JobRow.id.in_(job_ids)))).scalars().all()
            for view in await job_views(session, rows, self._live):
                self._hub.publish_job(view.id, view.model_dump(mode="json"))

    async def _publish_nodes(self) -> None:
        async with self._db.read() as session:
            rows = (await session.execute(select(NodeRow).order_by(NodeRow.id))).scalars().all()
            nodes = await node_views(session, rows)
        self._hub.publish_nodes([node.model_dump(mode="json") for node in nodes])
