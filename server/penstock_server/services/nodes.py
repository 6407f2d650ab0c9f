"""Nodes: joining, what an administrator wants of them, and what their agents report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import literal, or_, select

from penstock.protocol.agent import Hello
from penstock.protocol.states import LIVE_REPLICA, NodeState
from penstock_server import tags
from penstock_server.auth.tokens import Tokens
from penstock_server.clock import Clock
from penstock_server.db import Database, Tx
from penstock_server.problems import Conflict, NotFound, Problem
from penstock_server.schemas import api
from penstock_server.schemas.nodes import NodeLoad
from penstock_server.services.transitions import allowed, created, noted, transition
from penstock_server.services.views import NODES, node_views
from penstock_server.streams.agents import Agents
from penstock_server.streams.nodeload import Bin
from penstock_server.tables import NodeRow, ReplicaRow
from penstock_server.uuid7 import uuid7

_AWAY = frozenset({NodeState.JOINING, NodeState.UNREACHABLE, NodeState.DOWN})
_WANTED = {"run": NodeState.READY, "cordon": NodeState.CORDONED, "drain": NodeState.DRAINING}


class Nodes:
    """The nodes of this server."""

    def __init__(self, database: Database, clock: Clock, tokens: Tokens, agents: Agents) -> None:
        self._db, self._clock, self._tokens, self._agents = database, clock, tokens, agents

    async def join(self, request: api.NodeJoin) -> api.NodeJoined:
        """Take a join token and give a node its identity. Raises a problem if the token is no good.

        A node of the same name and host that is not connected gets its old row back, with a new token; a pilot also if
        its predecessor ran on another host.
        """
        async with self._db.write() as tx:
            if not await self._tokens.admits(tx, request.join_token):
                raise Problem(
                    401,
                    "join_token_refused",
                    "the join token is unknown, expired or used",
                    hint="make a new one with `penstock agent token` (or POST /api/v1/join-tokens)",
                )
            now = self._clock.now()
            row = await self._away(tx, request)
            if row is None:
                row = NodeRow(id=uuid7(), state=NodeState.JOINING.value, wanted="run", joined_at=now, state_at=now)
                _describe(row, request)
                created(tx, row, at=now)
            else:
                _describe(row, request)
                if request.pilot:
                    row.wanted, row.drain_by, row.joined_at = (
                        "run",
                        None,
                        now,
                    )  # its predecessor was drained, or had a job of its own
                await self._tokens.revoke_node(tx, row.id)
            await tx.session.flush()
            minted = self._tokens.mint(tx, "node", f"node {row.name}", ["agent"], node_id=row.id)
            tx.subject = row.id
        self._tokens.forget()
        return api.NodeJoined(node_id=row.id, node_token=minted.secret)

    async def name_of(self, node_id: str) -> str:
        """Return the name of a node. Raises NotFound."""
        async with self._db.glance() as session:
            found = await session.execute(select(NodeRow.name).where(NodeRow.id == node_id))
            name: str | None = found.scalar_one_or_none()
        if name is None:
            raise NotFound("node", node_id)
        return name

    async def page(self) -> list[api.Node]:
        """List all nodes, oldest first."""
        async with self._db.read() as session:
            rows = (await session.execute(select(NodeRow).order_by(NodeRow.id))).scalars().all()
            return await node_views(session, rows, self._agents, self._clock.now())

    async def loads(self) -> list[NodeLoad]:
        """Return processor and memory of each node that has reported within the hour. The event loop turns between."""
        async with self._db.read() as session:
            node_ids = (await session.execute(select(NodeRow.id).order_by(NodeRow.id))).scalars().all()
        now_s, found = self._clock.now().timestamp(), []
        for number, node_id in enumerate(node_ids, 1):
            found.append(_load_view(node_id, self._agents.loads.of(node_id, now_s)))
            if number % NODES == 0:
                await asyncio.sleep(0)
        return [one for one in found if one.at]

    async def get(self, node_id: str) -> api.Node:
        """Return a node. Raises NotFound."""
        async with self._db.read() as session:
            row = await session.get(NodeRow, node_id)
            if row is None:
                raise NotFound("node", node_id)
            return (await node_views(session, [row], self._agents, self._clock.now()))[0]

    async def want(
        self, node_id: str, wanted: str, *, tag: str | None = None, deadline_s: float | None = None
    ) -> api.Node:
        """Cordon, uncordon ('run') or drain a node. An away node takes it up when it comes back.

        `tag`: the one that it has to have still (If-Match). `deadline_s`: of a drain, after which what still runs there
        is preempted (`drains`); None: it is waited for. A drain that goes on gets the new one.
        """
        async with self._db.write(urgent=True) as tx:
            row = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
            if row is None:
                raise NotFound("node", node_id)
            tags.require(f"node {row.name!r}", str(row.version), tag)
            row.wanted = wanted
            row.drain_by = None if deadline_s is None else self._clock.now() + timedelta(seconds=deadline_s)
            if NodeState(row.state) not in _AWAY:
                self._follow(tx, row, wanted)
        return await self.get(node_id)

    async def drained(self, tx: Tx, now: datetime) -> None:
        """Move draining nodes without replicas on to DRAINED."""
        busy = select(ReplicaRow.node_id).where(ReplicaRow.state.in_(LIVE_REPLICA), ReplicaRow.node_id.is_not(None))
        statement = select(NodeRow).where(NodeRow.state == NodeState.DRAINING, NodeRow.id.not_in(busy))
        for row in (await tx.session.execute(statement)).scalars():
            transition(tx, row, NodeState.DRAINED, at=now, reason="drained", detail="nothing runs there any more")

    async def connected(self, tx: Tx, node_id: str, hello: Hello) -> NodeRow:
        """Note that an agent is there. Raises NotFound if its node was removed."""
        row = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
        if row is None:
            raise NotFound("node", node_id)
        now = self._clock.now()
        row.agent_version, row.boot_id, row.last_seen_at = hello.version, hello.boot_id, now
        row.address, row.ports = hello.address, list(hello.ports)
        row.findings = [found.model_dump() for found in hello.findings]
        row.labels = hello.labels or {}
        if NodeState(row.state) in _AWAY:
            self.back(tx, row, reason="connected")
        tx.effects.schedule = True  # only a node with a connection takes jobs
        return row

    async def leave(self, node_id: str, why: str) -> None:
        """Drain a node whose agent is about to leave; what an administrator wants of it stays as it is."""
        async with self._db.write() as tx:
            row = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
            if row is not None and allowed(NodeState(row.state), NodeState.DRAINING):
                transition(tx, row, NodeState.DRAINING, at=self._clock.now(), reason="leaves", detail=why)

    async def left(self, node_id: str, why: str) -> None:
        """Note that an agent that had said so is gone: its node is down at once, unless something still runs there."""
        async with self._db.write() as tx:
            row = await tx.session.get(NodeRow, node_id, with_for_update={"key_share": True})
            busy = select(ReplicaRow.id).where(ReplicaRow.state.in_(LIVE_REPLICA), ReplicaRow.node_id == node_id)
            if row is None or not allowed(NodeState(row.state), NodeState.DOWN):
                return
            if (await tx.session.execute(busy.limit(1))).first() is None:
                transition(tx, row, NodeState.DOWN, at=self._clock.now(), reason="left", detail=why)

    def back(self, tx: Tx, row: NodeRow, *, reason: str) -> None:
        """Move a node that was unreachable to the state that is wanted of it."""
        transition(tx, row, NodeState.READY, at=self._clock.now(), reason=reason)
        self._follow(tx, row, row.wanted)

    def _follow(self, tx: Tx, row: NodeRow, wanted: str) -> None:
        target, state, now = _WANTED[wanted], NodeState(row.state), self._clock.now()
        detail = _asked(wanted, row.drain_by)
        if state is NodeState.DRAINING is target and row.reason_detail != detail:
            noted(tx, row, at=now, reason=wanted, detail=detail)
        if state is target or (state is NodeState.DRAINED and target is NodeState.DRAINING):
            return
        if target is NodeState.CORDONED and state is not NodeState.READY:
            raise Conflict("node_drains", f"node {row.name!r} is {state}; uncordon it first")
        transition(tx, row, target, at=now, reason=wanted, detail=detail)

    async def _away(self, tx: Tx, request: api.NodeJoin) -> NodeRow | None:
        statement = (
            select(NodeRow)
            .where(NodeRow.name == request.name, or_(NodeRow.host == request.host, literal(request.pilot)))
            .where(NodeRow.state.in_([s.value for s in _AWAY]))
            .order_by(NodeRow.id.desc())
            .limit(1)
        )
        return (await tx.session.execute(statement)).scalar_one_or_none()


def _asked(wanted: str, drain_by: datetime | None) -> str:
    """Describe what an administrator wants of a node."""
    if wanted == "run":
        return ""
    if wanted == "cordon":
        return "an administrator has cordoned it: nothing more is placed there"
    if drain_by is None:
        return "an administrator drains it: what runs there is waited for"
    return f"an administrator drains it: what still runs there at {drain_by:%Y-%m-%d %H:%M:%S} UTC is preempted"


def _load_view(node_id: str, bins: Sequence[Bin]) -> NodeLoad:
    return NodeLoad(
        node_id=node_id,
        at=[datetime.fromtimestamp(one.at_s, UTC) for one in bins],
        cpu_percent=[round(one.cpu_percent, 1) for one in bins],
        memory_used_bytes=[round(one.memory_used_bytes) for one in bins],
    )


def _describe(row: NodeRow, request: api.NodeJoin) -> None:
    row.name, row.host = request.name, request.host
    row.cpus, row.gpus, row.memory_bytes = request.cpus, request.gpus, request.memory_bytes
    row.agent_version = request.version
    row.boot_id = row.boot_id or ""
