"""A real server in the test's event loop, and the other sides of its sockets: agent, attached process, browser."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tests.support.databases import lay_database
from tests.support.waiting import LIMIT_S, until_answer
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from penstock.connections import LIMITS
from penstock.protocol.frames import Frame, Kind, encode
from penstock_server.clock import Clock, SystemClock
from penstock_server.run import make_server
from penstock_server.runtime import Runtime, open_runtime
from penstock_server.settings import Settings

T = TypeVar("T")
"""Longer than any answer takes on a busy machine: server and client share the event loop, and one that gets no
processor for httpx's default of 5 s would time out the client before the server has had its turn."""
PLACE = {"address": "127.0.0.1", "ports": [20_000, 20_001, 20_002, 20_003]}
"""What a fake agent says of its node."""


class FakeClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.elapsed_s)

    def monotonic(self) -> float:
        return 1000.0 + self.elapsed_s

    def steady(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.elapsed_s)

    def advance(self, seconds: float) -> None:
        self.elapsed_s += seconds


@dataclass
class Server:
    """A running server and a client that holds the administrator's token."""

    url: str
    runtime: Runtime
    admin: str
    http: httpx.AsyncClient

    async def submit(self, **spec: Any) -> dict[str, Any]:
        given = {"name": "job", "entrypoint": ["true"], **spec}
        answer = await self.http.post("/api/v1/jobs", json={"spec": given})
        assert answer.status_code == 201, answer.text
        job: dict[str, Any] = answer.json()
        return job

    async def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = (await self.http.get(f"/api/v1/jobs/{job_id}")).json()
        return job

    async def job_in(self, job_id: str, *states: str) -> dict[str, Any]:
        return await until_answer(lambda: self.job(job_id), lambda job: job["state"] in states)

    async def token(self, *scopes: str) -> str:
        answer = await self.http.post("/api/v1/tokens", json={"name": "test", "scopes": list(scopes)})
        secret: str = answer.json()["token"]
        return secret

    async def join(self, name: str = "n1", cpus: int = 4, memory_gib: int = 8) -> tuple[str, str]:
        """Join a node; return its id and token."""
        join_token = (await self.http.post("/api/v1/join-tokens")).json()["token"]
        body = {"join_token": join_token, "name": name, "host": f"{name}.test", "cpus": cpus, "gpus": 0}
        answer = await self.http.post(
            "/api/v1/nodes",
            json={**body, "memory_bytes": memory_gib << 30, "version": "1"},
            headers={"Authorization": ""},
        )
        assert answer.status_code == 201, answer.text
        return answer.json()["node_id"], answer.json()["node_token"]

    def connect(self, path: str, token: str, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        address = self.url.replace("http", "ws", 1) + path
        return connect(address, additional_headers=headers, compression=None, max_size=None, **options)

    @asynccontextmanager
    async def agent(
        self, node: tuple[str, str], replicas: list[dict[str, Any]] | None = None, **fields: Any
    ) -> AsyncIterator[FakeAgent]:
        """Connect an agent that does what the test says."""
        async with self.connect("/api/v1/agent", node[1]) as ws:
            hello = {"type": "hello", "version": "1", "boot_id": "b", "replicas": replicas or [], **PLACE, **fields}
            await ws.send(json.dumps(hello))
            agent = FakeAgent(ws)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(agent.read()), group.create_task(self._keep_lease(node[0]))]
                await until_answer(agent.get_welcome, lambda welcome: welcome is not None)
                try:
                    yield agent
                finally:
                    for task in tasks:
                        task.cancel()

    async def _keep_lease(self, node_id: str) -> None:
        """Renew the lease of an agent that sends no heartbeats: on a busy machine a test may take longer than it lasts.

        Not if the test sets the time, or how long leases last.
        """
        settings, clock = self.runtime.settings, self.runtime.clock
        while isinstance(clock, SystemClock) and "lease_ttl_s" not in settings.model_fields_set:
            await asyncio.sleep(settings.lease_ttl_s / 5)
            self.runtime.leases.renew(node_id)

    @asynccontextmanager
    async def browser(self, token: str | None = None) -> AsyncIterator[FakeBrowser]:
        """Connect a browser that reads everything."""
        async with self.connect("/api/v1/stream", token or self.admin) as ws:
            browser = FakeBrowser(ws)
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(browser.read())
                try:
                    yield browser
                finally:
                    reader.cancel()

    @asynccontextmanager
    async def attached(
        self, name: str = "by-hand", role: str = "trainer", index: int = 0, pid: int = 7
    ) -> AsyncIterator[FakeTrainer]:
        """Connect a process that a person started."""
        async with self.connect("/api/v1/attach", await self.token("attach")) as ws:
            register = {"type": "register", "job_name": name, "role": role, "index": index, "host": "h", "pid": pid}
            if role == "pserver":
                register["endpoint"] = "127.0.0.1:6174"
            await ws.send(json.dumps(register))
            yield FakeTrainer(ws, json.loads(await ws.recv()))


@dataclass
class FakeAgent:
    """The agent's side of its socket."""

    ws: ClientConnection
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def read(self) -> None:
        with suppress(ConnectionClosed):
            async for text in self.ws:
                self.messages.append(json.loads(text))

    async def get_welcome(self) -> dict[str, Any] | None:
        return next((m for m in self.messages if m["type"] == "welcome"), None)

    async def count_leases(self) -> int:
        return sum(m["type"] == "lease" for m in self.messages)

    async def get_desired(self) -> list[dict[str, Any]]:
        found = [m["replicas"] for m in self.messages if m["type"] == "desired"]
        return found[-1] if found else []

    async def desired(self, count: int) -> list[dict[str, Any]]:
        return await until_answer(self.get_desired, lambda replicas: len(replicas) == count)

    async def send(self, **message: Any) -> None:
        await self.ws.send(json.dumps(message))

    async def report(self, replica: dict[str, Any], state: str, **fields: Any) -> None:
        who = {"replica_id": replica["replica_id"], "epoch": replica["epoch"]}
        await self.send(type="replica", **{**who, "state": state, "pid": 99, **fields})

    async def start(self, replica: dict[str, Any]) -> None:
        await self.report(replica, "PREPARING")
        await self.report(replica, "RUNNING")

    async def log(self, replica: dict[str, Any], offset: int, content: bytes) -> int:
        """Send bytes of a log; return the offset that was acknowledged after it."""
        before = len(self.messages)
        text = base64.b64encode(content).decode()
        who = {"replica_id": replica["replica_id"], "epoch": replica["epoch"]}
        await self.send(type="log", **who, offset=offset, text_b64=text)

        async def acks() -> list[int]:
            return [m["log_offset"] for m in self.messages[before:] if m["type"] == "ack"]

        return (await until_answer(acks, bool))[-1]

    async def frame(self, replica: dict[str, Any], kind: Kind, **fields: Any) -> bytes:
        data = encode(
            Frame(kind, replica["stream"], fields.pop("epoch", replica["epoch"]), fields.pop("seq", 0), **fields)
        )
        await self.ws.send(data)
        return data


@dataclass
class FakeTrainer:
    """An attached process's side of its socket."""

    ws: ClientConnection
    registered: dict[str, Any]
    seq: int = 0

    async def frame(self, kind: Kind, **fields: Any) -> bytes:
        data = encode(Frame(kind, self.registered["stream"], self.registered["epoch"], self.seq, **fields))
        self.seq += 1
        await self.ws.send(data)
        return data


@dataclass
class FakeBrowser:
    """A browser's side of its socket."""

    ws: ClientConnection
    messages: list[dict[str, Any]] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)

    async def read(self) -> None:
        with suppress(ConnectionClosed):
            async for data in self.ws:
                if isinstance(data, bytes):
                    self.frames.append(data)
                else:
                    self.messages.append(json.loads(data))

    async def subscribe(self, number: int, **fields: Any) -> dict[str, Any]:
        """Subscribe and return the snapshot."""
        await self.ws.send(json.dumps({"type": "subscribe", "id": number, **fields}))
        return (await self.of("snapshot", lambda m: m["id"] == number))[-1]

    async def of(self, kind: str, wanted: Callable[[dict[str, Any]], bool] = lambda m: True) -> list[dict[str, Any]]:
        """Wait for messages of a kind; return them all."""

        async def found() -> list[dict[str, Any]]:
            return [m for m in self.messages if m["type"] == kind and wanted(m)]

        return await until_answer(found, bool)

    async def received(self, count: int) -> list[bytes]:
        async def get() -> list[bytes]:
            return self.frames

        return await until_answer(get, lambda frames: len(frames) >= count)

    async def log_text(self, wanted: str) -> str:
        async def text() -> str:
            return "".join(m["text"] for m in self.messages if m["type"] == "log")

        return await until_answer(text, lambda found: wanted in found)


NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""In place of httpx's own, which takes 20 ms to load its certificates."""


@asynccontextmanager
async def running(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Server]:
    """Run a server on a free port of the loopback."""
    if settings.database_url is None:
        lay_database(settings.state_dir)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with open_runtime(settings, clock) as runtime:
            server = make_server(runtime)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            admin = (settings.state_dir / "admin.token").read_text().strip()
            headers = {"Authorization": f"Bearer {admin}"}
            try:
                async with httpx.AsyncClient(
                    base_url=url, headers=headers, timeout=LIMIT_S, limits=LIMITS, verify=NO_TLS
                ) as client:

                    async def started() -> bool:
                        return server.started

                    await until_answer(started, bool)
                    yield Server(url, runtime, admin, client)
            finally:
                server.should_exit = True
                await serving


def settings_for(folder: Path, database_url: str | None = None, **changes: Any) -> Settings:
    """Return settings of a server that is quick to notice things, and answers however often a test looks."""
    given: dict[str, Any] = {"state_dir": folder / "state", "database_url": database_url, "port": 0, "tick_s": 0.1}
    given["requests_per_s"] = 1e6
    return Settings(**{**given, "metrics_flush_s": 0.02, "pserver_grace_s": 0.2, **changes})
