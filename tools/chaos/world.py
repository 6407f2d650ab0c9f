"""A control plane under test: a server, the agents of several nodes, jobs that count, and a record of what was wrong.

Everything is a real process of the product. With `network` each node is a host of its own (a network namespace), the
server another; without, all are on the loopback. What the world did to its parts is in `outages`; `history` puts that
together with the event log and with what the processes of jobs wrote themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from tools.chaos import witness
from tools.chaos.export import read_history, with_logs
from tools.chaos.history import History, Limits, Outage
from tools.chaos.parts import Part, Running, running_on, wait_until
from tools.chaos.series import with_points
from tools.hosts.faults import LinkFaults, inside
from tools.hosts.namespaces import Namespaces

from penstock.client import Client
from penstock.command.passing import without_settings
from penstock.distributed.ports import free_ports
from penstock.errors import Unavailable
from penstock.process import proc
from penstock.protocol.rest import Job
from penstock.protocol.states import TERMINAL_JOB
from penstock_server.db import Database

LONG_S = 120.0
T = TypeVar("T")
_LEFT_OUT = ("PENSTOCK_", "FLAGS_", "DISPLAY")


class World:
    """Use as a context: at the end every process is gone. `cpus`: of each node.

    `sources`: of parts ("server", "node0", …) that run another version of Penstock, its folder; read at each start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_nodes: int,
        limits: Limits,
        network: Namespaces | None = None,
        cpus: int = 4,
        database_url: str | None = None,
        sources: Mapping[str, Path] | None = None,
    ) -> None:
        self.sources = dict(sources or {})
        self.folder, self.limits, self.network = folder, limits, network
        self.outages: list[Outage] = []
        self.node_ids: dict[int, str] = {}
        self._cpus, self._database_url = cpus, database_url
        self.witness = folder / "witness"
        self.witness.mkdir(parents=True, exist_ok=True)
        self._mark = f"CHAOS_WORLD={folder}"
        self.port = 7080 if network is not None else free_ports("127.0.0.1", 1)[0]
        self.url = f"http://{self.address(0)}:{self.port}"
        self.server = Part(self._server_argv(), self.environ("server"), folder / "server.err")
        self.agents = [Part([], self.environ(f"node{i}"), folder / f"node{i}.err") for i in range(num_nodes)]
        self.links = [LinkFaults(network.layout.hosts[i + 1], self.address(i + 1)) for i in range(num_nodes)] if (
            network is not None
        ) else []  # fmt: skip

    def __enter__(self) -> Self:
        try:
            self.start_server()
            for number in range(len(self.agents)):
                self.join(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        for agent in self.agents:
            agent.close()
        self.server.close()
        for pid in proc.with_environment(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    # Processes

    def address(self, host: int) -> str:
        """Return the address of the server's host (0) or of a node's (1 …)."""
        return "127.0.0.1" if self.network is None else self.network.address(host)

    def _on(self, host: int) -> list[str]:
        return [] if self.network is None else list(self.network.enter(host))

    def environ(self, home: str) -> dict[str, str]:
        """Return the variables of a part, whose HOME is a folder of that name."""
        (self.folder / home).mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in without_settings(os.environ).items() if not k.startswith(_LEFT_OUT)}
        return {
            **kept,
            **(import_from(self.sources[home]) if home in self.sources else {}),
            "HOME": str(self.folder / home),
            "CHAOS_WORLD": str(self.folder),
            "PENSTOCK_SERVER_LEASE_TTL_S": f"{self.limits.ttl_s:g}",
            "PENSTOCK_SERVER_GRACE_S": f"{self.limits.grace_s:g}",
            "PENSTOCK_SERVER_STOP_PATIENCE_S": f"{self.limits.stop_s:g}",
        }

    def _server_argv(self) -> list[str]:
        argv = [*self._on(0), sys.executable, "-m", "penstock_server", "--host", self.address(0)]
        argv += ["--port", str(self.port), "--state-dir", str(self.server_dir)]
        argv += ["--insecure"] if self.network is not None else []
        return argv + (["--database-url", self._database_url] if self._database_url else [])

    @property
    def server_dir(self) -> Path:
        """The server's state folder."""
        return self.folder / "server" / "state"

    def node_dir(self, number: int) -> Path:
        """The state folder of a node's agent."""
        return self.folder / f"node{number}" / "state"

    def start_server(self) -> None:
        """Start the server and wait until it serves."""
        self.server.start(environ=self.environ("server"))

        def serves() -> bool:
            if self.server.has_ended:
                raise RuntimeError(f"the server ended as it started:\n{self.server.errors()[-2000:]}")
            return self.is_ready()

        wait_until(serves, "the server serves", LONG_S)

    def join(self, number: int) -> None:
        """Start the agent of a node with a join token, and wait until it is READY."""
        with self.client() as client:
            token = client.join_token()["token"]
        name = f"node{number}"
        self.start_agent(number, "--url", self.url, "--join-token", token, "--name", name, "--cpus", str(self._cpus))
        wait_until(lambda: self.nodes().get(name, {}).get("state") == "READY", f"{name} joins", LONG_S)
        self.node_ids[number] = self.nodes()[name]["id"]

    def start_agent(self, number: int, *options: str) -> None:
        """Start the agent of a node."""
        argv = [*self._on(number + 1), sys.executable, "-m", "penstock_worker", "--state-dir"]
        whole = [*argv, str(self.node_dir(number)), *options]
        self.agents[number].start(whole, self.environ(f"node{number}"))

    def running(self, number: int) -> list[Running]:
        """Return what runs on a node."""
        return running_on(self.node_dir(number))

    # The API

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """Hold a client of the administrator, from the server's host."""
        token = (self.server_dir / "admin.token").read_text(encoding="utf-8").strip()
        here = contextlib.nullcontext() if self.network is None else inside(self.network.layout.hosts[0])
        with here, Client(self.url, token=token) as client:
            yield client

    def is_ready(self) -> bool:
        """Whether the server answers, and its database too."""
        if not (self.server_dir / "admin.token").exists():
            return False
        with self.client() as client:
            return client.is_ready()

    def nodes(self) -> dict[str, Any]:
        """Return the nodes by name."""
        with self.client() as client:
            return {node["name"]: node for node in client.nodes()}

    def job(self, job_id: str) -> Job:
        """Return a job."""
        with self.client() as client:
            return client.job(job_id)

    def submit(self, name: str, *, lines: int, **spec: Any) -> str:
        """Submit a job that counts, however often that takes; return its id."""
        return self.persist(lambda client: self.submit_with(client, name, lines=lines, **spec))

    def submit_with(
        self, client: Client, name: str, *, lines: int, pause_s: float = 0.1, code: int = 0, more: str = "", **spec: Any
    ) -> str:
        """Submit a job that counts; return its id. An answer that is lost costs no second job. Raises Unavailable."""
        script = [str(self.witness), str(lines), str(pause_s), str(code), *more.split()]
        entrypoint = ["python", str(witness.SCRIPT), *script]
        small = {"count": 1, "cpus": 1, "memory": "16MiB"}
        given = {"name": name, "entrypoint": entrypoint, "mode": "command", "trainers": small, **spec}
        return client.submit(given, key=f"chaos-{name}")["id"]

    def submit_checkpointing(self, client: Client, name: str, *, steps: int, pause_s: float = 0.1, **spec: Any) -> str:
        """Submit a job that saves a checkpoint each second step, and restores the newest; return its id."""
        argv = [sys.executable, "-m", "tools.chaos.checkpointing", str(self.witness), str(steps), str(pause_s)]
        env = {"PYTHONPATH": str(witness.SCRIPT.parents[2])}
        given = {
            "name": name, "entrypoint": argv, "mode": "local", "trainers": {"count": 1, "cpus": 1, "memory": "512MiB"},
            "checkpoint": {"every_steps": 2, "keep": 2}, "env": env, **spec,
        }  # fmt: skip
        return client.submit(given, key=f"chaos-{name}")["id"]

    def persist(self, call: Callable[[Client], T]) -> T:
        """Call the API until it answers: the server may be down, or its answer lost. Raises TimeoutError."""
        found: list[T] = []

        def once() -> bool:
            with contextlib.suppress(Unavailable), self.client() as client:
                found.append(call(client))
            return bool(found)

        wait_until(once, "the server answers", LONG_S)
        return found[-1]

    def is_over(self, job_id: str) -> bool:
        """Whether a job has ended. False while the server is down."""
        with contextlib.suppress(Unavailable):
            return self.job(job_id)["state"] in TERMINAL_JOB
        return False

    # The record

    def note_outage(self, number: int | None, began: float) -> None:
        """Record that the agent or network of a node (None: the server) was disturbed until now."""
        self.outages.append(Outage(None if number is None else self.node_ids[number], began, time.time()))

    def history(self, *, is_final: bool) -> History:
        """Return all that happened until now."""
        url = self._database_url or f"sqlite+aiosqlite:///{self.server_dir / 'penstock.db'}"
        stored = asyncio.run(_read(url))
        found = replace(
            stored,
            checkpoints=tuple(witness.checkpoints(self.witness, stored.replicas)),
            processes=tuple(witness.processes(self.witness)),
            outages=tuple(self.outages),
            limits=self.limits,
            ended_at=time.time(),
            is_final=is_final,
        )
        found = with_logs(found, self.server_dir / "jobs", is_over=is_final)
        return with_points(found, witness.points(self.witness) if is_final else ())


def import_from(source: Path) -> dict[str, str]:
    """Return the variables of a process that imports Penstock from a checkout of another version."""
    return {"PYTHONPATH": os.pathsep.join(str(source / name) for name in ("core", "worker", "server"))}


async def _read(url: str) -> History:
    database = Database(url)
    try:
        return await read_history(database)
    finally:
        await database.close()
