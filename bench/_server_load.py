"""What a control plane is loaded with: simulated agents, watching browsers, and a client that submits.

The agents speak the protocol of real ones (hello, heartbeats, reports), and start nothing. Everything but the client is
in one event loop; the client has a process of its own, so that its latencies are the server's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from penstock.protocol.frames import COLUMNS, Column, Frame, Kind, encode

HEARTBEAT_S = 5.0  # a third of the server's default lease


def socket_url(url: str, path: str) -> str:
    """Return the address of a websocket of the server."""
    return url.replace("http", "ws", 1) + "/api/v1" + path


async def _open(url: str, path: str, token: str) -> ClientConnection:
    headers = {"Authorization": f"Bearer {token}"}
    return await connect(socket_url(url, path), additional_headers=headers, compression=None, max_size=None)


@dataclass(slots=True)
class Load:
    """What all agents share: `placed_at`: when the order of a job arrived; `running`: replicas by age."""

    placed_at: dict[str, float] = field(default_factory=dict)
    running: deque[tuple[Agent, dict[str, Any]]] = field(default_factory=deque)
    on_placed: Callable[[str], None] = lambda job_id: None
    received_bytes: int = 0


@dataclass(eq=False)
class Agent:
    """One simulated agent. What is desired of it, it reports as running; nothing is started."""

    load: Load
    node_id: str
    token: str
    socket: ClientConnection | None = None
    known: set[str] = field(default_factory=set)
    silent: bool = False

    async def run(self, url: str) -> None:
        """Serve until the connection ends."""
        self.socket = await _open(url, "/agent", self.token)
        hello = {"type": "hello", "version": "1", "boot_id": "b", "address": "127.0.0.1", "ports": [], "replicas": []}
        await self._send(**hello)
        with suppress(ConnectionClosed):
            async with asyncio.TaskGroup() as group:
                alive = group.create_task(self._keep_alive())
                async for text in self.socket:
                    message = json.loads(text)
                    if message["type"] == "desired" and not self.silent:
                        await self._take(message["replicas"])
                alive.cancel()

    async def end(self, replica: dict[str, Any]) -> None:
        """Report that a replica has ended well."""
        await self._report(replica, "EXITED", exit_code=0)

    async def metrics(self, replica: dict[str, Any], step: int) -> None:
        """Send one point of a replica's metrics."""
        one = {column: np.array([1]) for column in COLUMNS[Kind.METRICS]}
        columns = one | {
            Column.STEP: np.array([step]),
            Column.TIME_NS: np.array([time.time_ns()]),
            Column.LOSS: np.array([1.0 / (1 + step)], dtype=np.float32),
        }
        frame = Frame(Kind.METRICS, replica["stream"], replica["epoch"], step, columns=columns)
        assert self.socket is not None
        with suppress(ConnectionClosed):
            await self.socket.send(encode(frame))

    async def _take(self, replicas: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        for replica in replicas:
            if replica["replica_id"] in self.known:
                continue
            self.known.add(replica["replica_id"])
            if replica["job_id"] not in self.load.placed_at:
                self.load.placed_at[replica["job_id"]] = now
                self.load.on_placed(replica["job_id"])
            await self._report(replica, "PREPARING")
            await self._report(replica, "RUNNING")
            self.load.running.append((self, replica))

    async def _keep_alive(self) -> None:
        await asyncio.sleep(HEARTBEAT_S * (hash(self.node_id) % 100) / 100)
        while True:
            if not self.silent:
                await self._send(type="beat", cpu_percent=50.0, memory_used_bytes=1 << 30)
            await asyncio.sleep(HEARTBEAT_S)

    async def _report(self, replica: dict[str, Any], state: str, **fields: Any) -> None:
        who = {"replica_id": replica["replica_id"], "epoch": replica["epoch"]}
        await self._send(type="replica", **who, state=state, pid=99, **fields)

    async def _send(self, **message: Any) -> None:
        assert self.socket is not None
        with suppress(ConnectionClosed):
            await self.socket.send(json.dumps(message))


async def browse(url: str, token: str, load: Load, job_id: str | None) -> None:
    """Watch the list of jobs, or one job, as the dashboard does; everything that comes is read and dropped."""
    async with await _open(url, "/stream", token) as socket:
        topic = {"topic": "jobs"} if job_id is None else {"topic": "job", "job_id": job_id}
        await socket.send(json.dumps({"type": "subscribe", "id": 1, **topic}))
        with suppress(ConnectionClosed):
            async for message in socket:
                load.received_bytes += len(message)


async def join(http: httpx.AsyncClient, load: Load, count: int, cpus: int) -> list[Agent]:
    """Join so many nodes."""
    agents = []
    for number in range(count):
        join_token = (await http.post("/api/v1/join-tokens")).json()["token"]
        size = {"cpus": cpus, "gpus": 0, "memory_bytes": 64 << 30}
        body = {"join_token": join_token, "name": f"node-{number}", "host": f"node-{number}.test", **size}
        made = (await http.post("/api/v1/nodes", json=body)).json()
        agents.append(Agent(load, made["node_id"], made["node_token"]))
    return agents
