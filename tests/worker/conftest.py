"""A fake control plane (websocket only) and a real agent process against it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import pytest_asyncio
from tests.support.waiting import until_async
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request

from penstock.distributed.ports import free_ports
from penstock_worker import lease


@dataclass
class FakeServer:
    """Speaks the server's half of docs/protocol.md and keeps what it hears.

    `agent_ahead_ns`: by how much its clock is behind the agent's.
    """

    agent_ahead_ns: int = 0
    heartbeats: list[dict[str, Any]] = field(default_factory=list)

    grace_s: float = 30.0
    ttl_s: float = 15.0
    desired: list[dict[str, Any]] = field(default_factory=list)
    preempted: dict[str, dict[str, Any]] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    hellos: list[dict[str, Any]] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    num_frames_at_end: int = -1
    logs: dict[str, bytes] = field(default_factory=dict)
    downloads: list[str] = field(default_factory=list)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = field(default_factory=lambda: free_ports("127.0.0.1", 1)[0])  # it is opened there again
    _server: Server | None = None
    _connection: ServerConnection | None = None

    async def open(self) -> None:
        self._server = await serve(self._talk, "127.0.0.1", self.port, process_request=self._hang)

    async def _hang(self, connection: ServerConnection, request: Request) -> None:
        """Let the agent in; a download of a snapshot never gets an answer."""
        if request.path != "/api/v1/agent":
            self.downloads.append(request.path)
            await self.closing.wait()

    async def close(self) -> None:
        self.closing.set()
        if self._server is not None:
            self._server.close(close_connections=True)
            await self._server.wait_closed()

    async def want(self, *replicas: dict[str, Any], preempted: dict[str, dict[str, Any]] | None = None) -> None:
        """Ask for these replicas: at once, or of an agent that has just closed its connection after its next hello.

        `preempted`: of others, by id, why they are, and the seconds that they have.
        """
        self.desired, self.preempted = list(replicas), preempted or {}
        if self._connection is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._want()

    async def _want(self) -> None:
        await self._say({"type": "desired", "replicas": self.desired, "preempted": self.preempted})

    async def _say(self, message: dict[str, Any]) -> None:
        assert self._connection is not None
        await self._connection.send(json.dumps(message))

    async def _talk(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        assert connection.request.headers["Authorization"] == "Bearer node-secret"
        self._connection = connection
        try:
            async for message in connection:
                await self._hear(message)
        finally:
            if self._connection is connection:
                self._connection = None

    async def _hear(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self.frames.append(message)
            return
        fields = json.loads(message)
        match fields["type"]:
            case "hello":
                self.hellos.append(fields)
                offsets = {key: len(value) for key, value in self.logs.items()}
                welcome = {"type": "welcome", "node_id": "n1", "lease_ttl_s": self.ttl_s, "grace_s": self.grace_s}
                await self._say({**welcome, "log_offsets": offsets})
                await self._want()
            case "beat":
                self.heartbeats.append(fields)
                now_ns = time.time_ns() - self.agent_ahead_ns
                await self._say({"type": "lease", "ttl_s": self.ttl_s, "received_ns": now_ns, "answered_ns": now_ns})
            case "replica":
                self.reports.append(fields)
                if fields["state"] == "EXITED":
                    self.num_frames_at_end = len(self.frames)
            case "log":
                key = fields["replica_id"]
                held = self.logs.setdefault(key, b"")
                assert fields["offset"] <= len(held), "a piece of the log is missing"
                self.logs[key] = held[: fields["offset"]] + base64.b64decode(fields["text_b64"])
                await self._say({"type": "ack", "replica_id": key, "log_offset": len(self.logs[key])})

    def states(self, replica_id: str) -> list[str]:
        return [report["state"] for report in self.reports if report["replica_id"] == replica_id]

    def last(self, replica_id: str) -> dict[str, Any]:
        return next(report for report in reversed(self.reports) if report["replica_id"] == replica_id)


Until = Callable[..., Awaitable[None]]


class AgentProcess:
    """Starts, kills and restarts one agent on one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.processes: list[Popen[bytes]] = []

    def start(self, port: int, *arguments: str, **environ: str) -> Popen[bytes]:
        self.state_dir.mkdir(exist_ok=True)
        identity = {"url": f"http://127.0.0.1:{port}", "node_id": "n1", "token": "node-secret"}
        lease.write_json(self.state_dir / "node.json", identity)
        with (self.state_dir / "agent.log").open("ab") as log:
            argv = [sys.executable, "-m", "penstock_worker", "--state-dir", str(self.state_dir), *arguments]
            process = Popen(argv, stderr=log, env={**os.environ, "PENSTOCK_TOKEN": "a-person's", **environ})
        self.processes.append(process)
        return process

    def kill(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait()

    def guards(self) -> list[int]:
        return [json.loads(path.read_text())["pid"] for path in self.state_dir.glob("replicas/*/guard.json")]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    await fake.open()
    yield fake
    await fake.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path / "agent")
    yield process
    for started in process.processes:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
            started.wait(timeout=150)
    for pid in process.guards():
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue


@pytest.fixture(name="until")
def until_fixture() -> Until:
    return until_async


@pytest.fixture
def order() -> Callable[..., dict[str, Any]]:
    """Return a function that makes what the server wants of one replica."""

    def make(replica_id: str, *entrypoint: str, **fields: Any) -> dict[str, Any]:
        return {
            "replica_id": replica_id,
            "job_id": "j1",
            "job_name": "job",
            "role": "trainer",
            "index": 0,
            "epoch": 1,
            "stream": 7,
            "entrypoint": list(entrypoint),
            "env": {},
            "snapshot": None,
            "cpus": 1,
            "stop_grace_s": 5.0,
            **fields,
        }

    return make
