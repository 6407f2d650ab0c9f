"""Watch over leases and time limits: nodes that fall silent, replicas that never report their end.

Leases live in memory and start with a fresh grace when the server does; their consequences are rows.
"""

from __future__ import annotations

from sqlalchemy import select, update

from penstock.protocol.states import NodeState
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.services.leases import Leases, Standing
from penstock_server.services.nodes import Nodes
from penstock_server.services.reports import Reports
from penstock_server.streams.agents import Agents
from penstock_server.tables import NodeRow

MISSING_S = 5.0
"""How long an agent that came back without a replica has to report its end before it counts as lost."""

_HELD = [s.value for s in NodeState if s not in (NodeState.JOINING, NodeState.DOWN)]


class LeaseWatch:
    """One pass over all leases. `renew` is called by connections; nothing is written until `step`."""

    def __init__(
        self, database: Database, clock: Clock, leases: Leases, reports: Reports, nodes: Nodes, agents: Agents
    ) -> None:
        self._db, self._clock, self._leases = database, clock, leases
        self._reports, self._nodes, self._agents = reports, nodes, agents
        self._seen: set[str] = set()

    def connected(self, node_id: str) -> None:
        """An agent said hello: the TTL counts from now."""
        self._leases.cut(node_id, self._clock.monotonic())
        self._seen.add(node_id)

    def renew(self, node_id: str) -> None:
        """Note a heartbeat of an agent."""
        self._leases.renew(node_id, self._clock.monotonic())
        self._seen.add(node_id)

    async def step(self) -> None:
        """Act on every lease and limit that has run out."""
        now = self._clock.monotonic()
        async with self._db.glance() as session:
            rows = (await session.execute(select(NodeRow.id, NodeRow.state).where(NodeRow.state.in_(_HELD)))).all()
        for node_id, state in rows:
            self._leases.ensure(node_id, now)
            standing = self._leases.standing(node_id, now)
            if standing is Standing.GONE:
                await self._reports.node_gone(node_id)
                self._leases.drop(node_id)
            elif standing is Standing.MISSED and state != NodeState.UNREACHABLE:
                await self._reports.node_missed(node_id)
        await self._give_up_missing(now)
        await self._reports.overdue()
        await self._note_seen(any(state == NodeState.DRAINING for _, state in rows))

    async def _give_up_missing(self, now: float) -> None:
        for link in self._agents.all():
            if link.missing and now - link.connected_at >= MISSING_S:
                gone, link.missing = link.missing, set()
                await self._reports.lost(gone, "its agent came back without it")

    async def _note_seen(self, draining: bool) -> None:
        if not self._seen and not draining:
            return
        seen, self._seen = self._seen, set()
        async with self._db.write() as tx:
            if seen:
                statement = update(NodeRow).where(NodeRow.id.in_(seen)).values(last_seen_at=self._clock.now())
                await tx.session.execute(statement)
            if draining:
                await self._nodes.drained(tx, self._clock.now())
