"""Background pipelines: the loop that runs one, the watch over leases and time limits, the publisher.

A step that raises is logged and tried again after a pause; one bad row never ends a pipeline. Leases live in memory and
start with a fresh grace when the server does; their consequences are rows. After a commit the publisher sends agents
their desired set, and browsers what has changed: newest state only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import structlog
from sqlalchemy import select, update

from penstock.protocol.states import NodeState
from penstock_server.clock import Clock
from penstock_server.db import Database, DatabaseAway, Effects, TakenOver
from penstock_server.services.backoff import is_due
from penstock_server.services.jobs import PIECE
from penstock_server.services.leases import Leases, Standing
from penstock_server.services.nodes import Nodes
from penstock_server.services.orders import desired
from penstock_server.services.reports import Reports
from penstock_server.services.views import NODES, event_view, job_views, node_views
from penstock_server.streams.agents import Agents
from penstock_server.streams.hub import Hub
from penstock_server.streams.live import Live
from penstock_server.tables import EventRow, JobRow, NodeRow

log = structlog.get_logger(__name__)

FAILURE_PAUSE_S = 1.0
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
        self._seen: set[str] = set()  # since `last_seen_at` was written
        self._heard: set[str] = set()  # since the lease was last missed; a lease that has only a grace is not heard

    def arrives(self, node_id: str) -> None:
        """An agent's hello has come, and may wait for the database: its node is neither missed nor gone meanwhile."""
        self._leases.renew(node_id, self._clock.monotonic())

    def connected(self, node_id: str) -> None:
        """An agent's hello is stored: the TTL counts from now."""
        self._leases.cut(node_id, self._clock.monotonic())
        self._hear(node_id)

    def renew(self, node_id: str) -> None:
        """Note a message of an agent: any shows that it is there, however long its heartbeats wait behind others."""
        self._leases.renew(node_id, self._clock.monotonic())
        self._hear(node_id)

    def _hear(self, node_id: str) -> None:
        self._seen.add(node_id)
        self._heard.add(node_id)

    async def step(self) -> None:
        """Act on every lease and limit that has run out."""
        async with self._db.glance() as session:
            rows = (await session.execute(select(NodeRow.id, NodeRow.state).where(NodeRow.state.in_(_HELD)))).all()
        now = self._clock.monotonic()
        self._leases.look(now, uptime=asyncio.get_running_loop().time())
        for node_id, state in rows:
            self._leases.ensure(node_id, now)
            standing = self._leases.standing(node_id, now)
            if standing is not Standing.ALIVE:
                self._heard.discard(node_id)  # before the transaction: a message that comes meanwhile counts
            is_still = partial(self._stands, node_id, standing)
            if standing is Standing.GONE:
                if await self._reports.node_gone(node_id, is_still=is_still):
                    self._leases.drop(node_id)
                    self._agents.close(node_id, "the lease of this node and its grace were over; connect again")
            elif standing is Standing.MISSED and state != NodeState.UNREACHABLE:
                await self._reports.node_missed(node_id, is_still=is_still)
            elif standing is Standing.ALIVE and state == NodeState.UNREACHABLE and node_id in self._heard:
                await self._reports.node_back(node_id)
        await self._give_up_missing(now)
        await self._reports.overdue()
        await self._reports.stop_long_ones()
        await self._note_seen(any(state == NodeState.DRAINING for _, state in rows))

    def _stands(self, node_id: str, standing: Standing) -> bool:
        return self._leases.standing(node_id, self._clock.monotonic()) is standing

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


class Pipeline(Protocol):
    """What runs as long as the server does. `run` raises nothing, and ends some time after `stop`."""

    @property
    def name(self) -> str:
        """Of its task."""

    async def run(self) -> None:
        """Run until stopped."""

    def stop(self) -> None:
        """Have it end."""


class Loop:
    """One pipeline. `wake()` may be called from anywhere in the event loop, any number of times.

    `rest_s`: least time between two steps, so that a burst of wakes costs few of them.
    """

    def __init__(
        self, name: str, step: Callable[[], Awaitable[object]], *, every_s: float, rest_s: float = 0.0
    ) -> None:
        self.name, self._step, self._every_s, self._rest_s = name, step, every_s, rest_s
        self._event = asyncio.Event()
        self.failures = 0
        self._stopping = self._waits = False
        self._ends = asyncio.Event()

    def wake(self) -> None:
        """Have the step run soon."""
        self._event.set()

    def stop(self) -> None:
        """Have the loop end after the step that runs."""
        self._stopping = True
        self._event.set()
        self._ends.set()

    async def run(self) -> None:
        """Run until stopped; a step that runs is never cancelled, because it may be in a transaction."""
        while not self._stopping:
            self._event.clear()
            try:
                await self._step()
            except TakenOver:
                await self._pause(FAILURE_PAUSE_S)  # the server ends
            except DatabaseAway as error:
                self.failures += 1
                if not self._waits:  # once, however long it is unreachable
                    log.warning("pipeline waits for the database", pipeline=self.name, error=str(error))
                self._waits = True
                await self._pause(FAILURE_PAUSE_S)
            except Exception:  # a boundary: recorded and tried again
                self.failures += 1
                log.exception("pipeline step failed", pipeline=self.name)
                await self._pause(FAILURE_PAUSE_S)
            else:
                self._waits = False
                await self._pause(self._every_s)
                await self._wait(self._ends, self._rest_s)

    async def _pause(self, seconds: float) -> None:
        await self._wait(self._event, seconds)

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(0 if self._stopping else seconds):
                await event.wait()
        except TimeoutError:
            return


class Publisher:
    """Gathers what changed, and sends each changed thing once, as it is when its turn comes."""

    def __init__(
        self, database: Database, clock: Clock, hub: Hub, live: Live, agents: Agents, *,
        released: Callable[[], Collection[str]],
    ) -> None:  # fmt: skip
        self._released = released  # replicas that had their time to end by themselves
        self._db, self._clock, self._hub, self._live, self._agents = database, clock, hub, live, agents
        self._jobs: set[str] = set()
        self._figures: set[str] = set()
        self._listed: set[str] = set()
        self._nodes: set[str] = set()
        self._nodes_changed = self._clocks_changed = False
        self._showing = asyncio.Lock()  # else the older of two states that were read could be published last
        self._again_at: dict[str, datetime] = {}
        self._events: list[EventRow] = []
        self.on_nodes: Callable[[], None] = lambda: None

    def mark(self, effects: Effects) -> None:
        """Note what a transaction changed."""
        self._jobs |= effects.jobs
        self._listed |= effects.jobs
        self._nodes |= effects.nodes
        self._nodes_changed |= bool(effects.nodes)
        self._events += effects.events

    def mark_jobs(self, job_ids: set[str]) -> None:
        """Note jobs whose figures changed."""
        self._figures |= job_ids

    def mark_nodes(self) -> None:
        """Note that nodes are shown otherwise now, without a change of their rows."""
        self._nodes_changed = True
        self.on_nodes()

    def mark_clocks(self) -> None:
        """Note that more is known of the nodes' clocks."""
        self._clocks_changed = True

    async def step_figures(self) -> None:
        """Send the figures of jobs, and all nodes if one has changed: what is as good a moment later."""
        jobs, self._figures = self._figures, set()
        found = {job_id: live for job_id in jobs if (live := self._live.get(job_id)) is not None}
        self._hub.publish_figures({job_id: live.figures() for job_id, live in found.items()})
        await self._step_nodes()

    async def _step_nodes(self) -> None:
        """Send the nodes if one has changed, or if more is known of their clocks; read once for both."""
        nodes, self._nodes_changed = self._nodes_changed, False
        clocks, self._clocks_changed = self._clocks_changed, False
        if not clocks and not (nodes and self._hub.lists_followed):
            return
        try:
            views = await self._node_views()
        except BaseException:
            self._nodes_changed |= nodes
            self._clocks_changed |= clocks
            raise
        self._hub.publish_nodes(views)
        if clocks:
            self._hub.publish_clocks(views)

    async def step(self) -> None:
        """Send orders, events, and jobs whose state changed. What could not be sent is sent by the next step."""
        jobs, self._jobs = self._jobs, set()
        nodes, self._nodes = self._nodes, set()
        events, self._events = self._events, []
        jobs = {job_id for job_id in jobs if self._hub.follows(job_id)}
        try:
            failure = await self._push_orders(nodes)
            while events:
                event = events.pop(0)
                self._hub.publish_event(event.job_id, event_view(event).model_dump(mode="json", by_alias=True))
            await self._publish_jobs(jobs, self._hub.publish_job)
            if failure is not None:
                raise failure
        except BaseException:
            self._nodes |= nodes
            self._events[:0] = events
            self._jobs |= jobs
            raise

    async def _push_orders(self, nodes: set[str]) -> Exception | None:
        """Push to nodes, and take each out of `nodes` then. Return the first error that is of a node alone."""
        failure: Exception | None = None
        for node_id in sorted(nodes):
            try:
                await self.push_desired(node_id)
            except DatabaseAway:
                raise
            except Exception as error:  # noqa: BLE001  # the others have their orders; the loop records it
                failure = failure or error
            else:
                nodes.discard(node_id)
        return failure

    async def step_list(self) -> None:
        """Send jobs whose state changed to those that follow the list of all."""
        jobs, self._listed = self._listed, set()
        if not self._hub.lists_followed:
            return
        try:
            await self._publish_jobs(jobs, self._hub.publish_listed)
        except BaseException:
            self._listed |= jobs
            raise

    async def push_desired(self, node_id: str) -> None:
        """Send a node's whole wanted set to its agent, if it is connected."""
        link = self._agents.get(node_id)
        if link is not None and link.greeted:
            now, released = self._clock.now(), self._released()
            orders = await desired(self._db, node_id, without=link.missing, released=released, now=now)
            self._again_at.pop(node_id, None)
            if orders.again_at is not None:
                self._again_at[node_id] = orders.again_at
            link.outbox.put("desired", orders.message.fields())

    def look_at_clock(self) -> bool:
        """Note nodes of which something else is wanted now, though nothing happened; return whether there are any."""
        now = self._clock.now()
        due = {node_id for node_id, at in self._again_at.items() if is_due(at, now)}
        self._nodes |= due
        for node_id in due:
            del self._again_at[node_id]
        return bool(due)

    async def _publish_jobs(self, job_ids: set[str], publish: Callable[[dict[str, Any]], None]) -> None:
        """Publish jobs, and take each out of `job_ids` then. The event loop turns between pieces."""
        while piece := list(itertools.islice(job_ids, PIECE)):
            async with self._showing, self._db.read() as session:
                rows = (await session.execute(select(JobRow).where(JobRow.id.in_(piece)))).scalars().all()
                for view in await job_views(session, rows, self._live, self._clock.now()):
                    publish(view.model_dump(mode="json"))
            job_ids.difference_update(piece)

    async def _node_views(self) -> list[dict[str, Any]]:
        async with self._db.read() as session:
            rows = (await session.execute(select(NodeRow).order_by(NodeRow.id))).scalars().all()
            nodes = await node_views(session, rows, self._agents, self._clock.now())
        found = []
        for number, node in enumerate(nodes, 1):
            found.append(node.model_dump(mode="json"))
            if number % NODES == 0:
                await asyncio.sleep(0)  # others have their turn of the event loop
        return found
