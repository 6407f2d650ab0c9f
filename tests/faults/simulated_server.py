"""The server's services in the test's own process, without sockets and without loops: each step is a call.

The database is a real SQLite, the runtime that of a server. A crash drops everything but the state folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import select
from tests.faults.simulated_node import Wire
from tests.server.harness import FakeClock
from tools.chaos.export import read_history, with_logs
from tools.chaos.history import History

from penstock.errors import Unavailable
from penstock.protocol.agent import FROM_AGENT, Hello
from penstock.protocol.jobspec import JobSpec
from penstock.protocol.wire import parse
from penstock_server import acting
from penstock_server.auth.principal import Principal
from penstock_server.db import Database, Effects
from penstock_server.problems import Conflict
from penstock_server.routers.agent_ws import greet, take
from penstock_server.runtime import Runtime, build
from penstock_server.schemas import api
from penstock_server.settings import Settings
from penstock_server.streams.agents import AgentLink
from penstock_server.tables import MetricRow

TTL_S, GRACE_S = 5.0, 12.0
PRINCIPAL = Principal("token", "user", "test", frozenset({"admin"}))


class SimulatedServer:
    """One server at a time on a state folder. `is_changed`: something was committed, or a log came."""

    def __init__(self, folder: Path, template: Path, clock: FakeClock) -> None:
        self.clock = clock
        self._settings = Settings(
            state_dir=folder, lease_ttl_s=TTL_S, grace_s=GRACE_S, stop_patience_s=5.0, pserver_grace_s=2.0
        )
        folder.mkdir(mode=0o700, parents=True)
        shutil.copy(template, folder / "penstock.db")
        self.runtime: Runtime | None = None
        self.is_changed = True
        self._links: dict[Wire, AgentLink] = {}

    async def start(self) -> None:
        """Start a server on what the former one left."""
        self.runtime = build(self._settings, self.clock, Database(self._settings.url))
        await self.runtime.tokens.ensure_admin()
        publish = self.runtime.database.on_commit

        def on_commit(effects: Effects) -> None:
            self.is_changed = True
            publish(effects)

        self.runtime.database.on_commit = on_commit

    async def crash(self) -> None:
        """Drop all that is in memory. Connections are broken; agents find out later."""
        assert self.runtime is not None
        self.runtime.recorder.close()
        await self.runtime.database.close()
        self.runtime = None
        self._links.clear()

    async def request(self, subject: str, call: Callable[[Runtime], Any]) -> Any:
        """Make a call as a request of the administrator, for the audit log."""
        assert self.runtime is not None
        request = acting.Request(self.clock.now(), "127.0.0.1", "POST", "/test", 200, "r", subject)
        acting.begin(request)
        try:
            return await call(self.runtime)
        finally:
            acting.begin(None)

    async def join(self, name: str) -> str:
        """Join a node; return its id."""
        assert self.runtime is not None
        async with self.runtime.database.write() as tx:
            made = self.runtime.tokens.mint(tx, "join", "join token", [], expires_in_s=300)
        body = api.NodeJoin(
            join_token=made.secret, name=name, host=f"{name}.test", cpus=4, gpus=0, memory_bytes=8 << 30, version="1"
        )
        joined = await self.request("", lambda runtime: runtime.nodes.join(body))
        return str(joined.node_id)

    async def submit(self, spec: JobSpec) -> str:
        """Submit a job; return its id."""
        job = await self.request("", lambda runtime: runtime.jobs.submit(spec, PRINCIPAL, None))
        return str(job.id)

    async def cancel(self, job_id: str) -> None:
        """Cancel a job."""
        await self.request(job_id, lambda runtime: runtime.jobs.cancel(job_id, PRINCIPAL))

    async def receive(self, wire: Wire, message: str | bytes) -> bool:
        """Take a message of a connection, the first as its hello; return whether the connection is still open."""
        assert self.runtime is not None
        self.is_changed = self.is_changed or '"log"' in str(message[:20])
        link = self._links.get(wire)
        try:
            if link is None:
                assert isinstance(message, str)
                hello = parse(FROM_AGENT, message)
                assert isinstance(hello, Hello)
                link = self._links[wire] = AgentLink(wire.node.node_id, self.clock.monotonic())
                await greet(self.runtime, link, hello)
            else:
                await take(self.runtime, link, message)
        except (Conflict, Unavailable):
            self.close(wire)
            return False
        return True

    def send(self, wire: Wire) -> bool:
        """Put what is due to a connection on its way; return whether the connection is still open."""
        link = self._links.get(wire)
        if link is None:
            return True
        while link.outbox.closed_with is None and (text := link.outbox.pop()) is not None:
            wire.to_agent.append(text)
        if link.outbox.closed_with is not None:
            self.close(wire)
            return False
        return True

    def close(self, wire: Wire) -> None:
        """Find a connection broken."""
        link = self._links.pop(wire, None)
        if link is not None and self.runtime is not None:
            self.runtime.agents.disconnect(link)

    async def step(self, what: str) -> None:
        """Run a loop's step once."""
        assert self.runtime is not None
        match what:
            case "schedule":
                await self.runtime.scheduling.run()
            case "publish":
                self.runtime.publisher.look_at_clock()
                await self.runtime.publisher.step()
            case "watch":
                await self.runtime.leases.step()
            case _:
                await self.runtime.metrics.flush()

    async def history(self) -> History:
        """Return the event log, rows, and stored logs."""
        assert self.runtime is not None
        found = await read_history(self.runtime.database)
        return with_logs(found, self._settings.state_dir / "jobs", is_over=False)

    async def points(self, job_id: str, attempt: int) -> set[int]:
        """Return the steps of a series that are stored."""
        assert self.runtime is not None
        mine = (MetricRow.job_id == job_id) & (MetricRow.attempt == attempt) & (MetricRow.series == "loss")
        async with self.runtime.database.glance() as session:
            return set((await session.execute(select(MetricRow.step).where(mine))).scalars())
