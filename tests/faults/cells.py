"""Cells of the fault matrix: a job is brought to a phase, a fault happens, and everything is given time to end.

Faults of `tools.chaos` are taken from there; the others are here. Each is a context: what it does on entry holds until
its end. `Bed` is the world of a cell, and what its faults need besides.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.postgres_cluster import Cluster
from tests.support.disks import filled
from tests.support.waiting import until
from tools.chaos.faults import Faults
from tools.chaos.invariants import check
from tools.chaos.parts import Part
from tools.chaos.plan import Fault
from tools.chaos.world import World
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.client import Client
from penstock.errors import Unavailable

PHASES = ("queued", "starting", "running", "stopping", "ending")
END_S = 240.0


class Bed:
    """A world with one node, and how to bring a job to a phase in it."""

    def __init__(self, world: World, cluster: Cluster | None = None) -> None:
        self.world, self.cluster = world, cluster
        self.others: list[str] = []  # jobs of faults, which may have to wait for the phase's end
        self._numbers = iter(range(1000))

    def bring_checkpointing(self) -> str:
        """Submit a job that saves checkpoints, and return its id once it has saved some."""
        name = f"checkpoints-{next(self._numbers)}"
        restart = {"max_restarts": 5, "on": ["infra", "user"]}
        job = self.world.persist(
            lambda client: self.world.submit_checkpointing(client, name, steps=40, pause_s=0.25, restart=restart)
        )
        until(lambda: self._lines(job) >= 6, f"{name} runs", END_S)
        return job

    def bring(self, phase: str) -> str:
        """Submit a job and return its id once it is in a phase; in `queued` its node takes nothing until `release`."""
        name = f"{phase}-{next(self._numbers)}"
        if phase == "queued":
            self._want("cordon")
        lines = 20 if phase == "ending" else 60
        more = "deaf" if phase == "stopping" else ""
        restart = {"max_restarts": 5, "on": ["infra", "user"]}
        job = self.world.submit(name, lines=lines, more=more, stop_grace_s=3.0, restart=restart)
        if phase not in ("queued", "starting"):
            until(lambda: self._lines(job) >= 3, f"{name} runs", END_S)
        if phase == "stopping":
            self.world.persist(lambda client: client.cancel(job))
        return job

    def release(self, phase: str) -> None:
        """Have a job that was kept waiting start."""
        if phase == "queued":
            self._want("uncordon")

    def ends_well(self, job: str, phase: str) -> None:
        """Wait until a job and its logs have ended as they should, and no invariant is broken."""
        until(lambda: all(map(self.world.is_over, [job, *self.others])), "the jobs end", END_S)
        until(lambda: not self.violations("I8"), "its log is whole", END_S)
        assert self.violations() == []
        assert self.world.job(job)["state"] == ("CANCELLED" if phase == "stopping" else "SUCCEEDED")

    def violations(self, *only: str) -> list[str]:
        """Return what breaks an invariant."""
        return [str(one) for one in check(self.world.history(is_final=True)) if not only or one.invariant in only]

    def node_is_back(self) -> None:
        """Wait until the node is READY."""
        until(lambda: self.world.is_ready() and self.world.nodes()["node0"]["state"] == "READY", "the node", END_S)

    def _want(self, what: Any) -> None:
        self.world.persist(lambda client: client.want_node(self.world.node_ids[0], what))

    def _lines(self, job: str) -> int:
        found = self.world.job(job)["replicas"]
        log = self.world.server_dir / "jobs" / job / "logs" / f"{found[0]['id']}.log" if found else Path("/none")
        return log.read_bytes().count(b"\n") if log.exists() else 0


@contextlib.contextmanager
def of_chaos(bed: Bed, what: str, for_s: float) -> Iterator[None]:
    """A fault of `tools.chaos.faults`."""
    faults = Faults(bed.world, random.Random(0))
    found: list[Callable[[], None]] = []

    def hits() -> bool:  # a guard or a process is there a moment after its job is said to run
        found.extend(end for end in [faults.begin(Fault(0.0, what, 0, for_s))] if end is not None)
        return bool(found)

    until(hits, f"{what}: there is something to hit", END_S)
    try:
        yield
        time.sleep(for_s)
    finally:
        found[0]()


class LossyLink:
    """A way to the server that loses the next request, or the answer to it."""

    def __init__(self, world: World, lose: str) -> None:
        self._target, self._lose = ("127.0.0.1", world.port), lose
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def lose_one(self) -> None:
        """Take one request, and have it or its answer lost."""
        connection, _ = self._listener.accept()
        with connection:
            request = _whole_request(connection)
            if self._lose == "request":
                return
            with socket.create_connection(self._target) as server:
                server.sendall(request)
                assert server.recv(1 << 16), "the server answers"

    def close(self) -> None:
        self._listener.close()


def _whole_request(connection: socket.socket) -> bytes:
    """Read a request of HTTP/1.1: its head and its body come apart."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += connection.recv(1 << 16)
    head, _, body = found.partition(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


@contextlib.contextmanager
def lost(bed: Bed, lose: str) -> Iterator[None]:
    """A submission whose request or answer is lost, and that is sent once more with the same key: one job."""
    link = LossyLink(bed.world, lose)
    token = (bed.world.server_dir / "admin.token").read_text().strip()
    script = [sys.executable, "-c", "print(0)"]
    name = f"lost-{lose}-{time.time_ns()}"
    spec = {"name": name, "entrypoint": script, "mode": "command", "trainers": {"count": 1, "memory": "8MiB"}}
    losing = threading.Thread(target=link.lose_one)
    losing.start()
    with Client(link.url, token=token) as client, pytest.raises(Unavailable):
        client.submit(spec, key=name)
    losing.join()
    link.close()
    with bed.world.client() as client:
        job = client.submit(spec, key=name)
        assert [one["id"] for one in client.jobs(name=name)] == [job["id"]]
    bed.others.append(job["id"])
    yield


@contextlib.contextmanager
def database_down(bed: Bed, for_s: float) -> Iterator[None]:
    """PostgreSQL ends at once, and comes back."""
    assert bed.cluster is not None
    began = time.time()
    bed.cluster.stop("immediate")
    try:
        yield
        time.sleep(for_s)
    finally:
        bed.cluster.start()
        bed.world.note_outage(None, began)


@contextlib.contextmanager
def disk_full(bed: Bed, folder: Path, for_s: float) -> Iterator[None]:
    """The small file system of a node, or of the server, is full."""
    began = time.time()
    try:
        with filled(folder):
            yield
            time.sleep(for_s)
    finally:
        bed.world.note_outage(None, began)


@contextlib.contextmanager
def duplicate_join(bed: Bed) -> Iterator[None]:
    """A second agent of the node's folder; and a join token that is used twice."""
    second = Part([], _environ(), bed.world.folder / "second.err")
    second.start([sys.executable, "-m", "penstock_worker", "--state-dir", str(bed.world.node_dir(0))])
    assert second.wait(60.0) == 5, second.errors()
    with bed.world.client() as client:
        token = client.join_token()["token"]
    options = ["--url", bed.world.url, "--join-token", token, "--name", "twice"]
    for number, status in ((1, None), (2, 4)):
        folder = bed.world.folder / f"twice{number}-{time.time_ns()}"
        part = Part([], _environ(), bed.world.folder / "twice.err")
        part.start([sys.executable, "-m", "penstock_worker", "--state-dir", str(folder), *options])
        if status is None:
            until(lambda folder=folder: (folder / "node.json").exists(), "it joins", END_S)  # type: ignore[misc]
            part.close()
        else:
            assert part.wait(60.0) == status, part.errors()
    yield


@contextlib.contextmanager
def cloned_identity(bed: Bed, for_s: float) -> Iterator[None]:
    """Another agent with a copy of the node's identity: it is refused while the node's own is connected."""
    folder = bed.world.folder / f"clone-{time.time_ns()}"
    folder.mkdir(mode=0o700)
    shutil.copy(bed.world.node_dir(0) / "node.json", folder / "node.json")
    clone = Part([], _environ(), bed.world.folder / "clone.err")
    clone.start([sys.executable, "-m", "penstock_worker", "--state-dir", str(folder)])
    try:
        yield
        time.sleep(for_s)
        assert not list((folder / "replicas").glob("*")), "the copy got nothing to run"
    finally:
        clone.kill()


@contextlib.contextmanager
def stale_epoch(bed: Bed, job: str) -> Iterator[None]:
    """A report of an end with an older epoch, over the node's own identity: it changes nothing."""
    identity = json.loads((bed.world.node_dir(0) / "node.json").read_text())
    replicas = bed.world.job(job)["replicas"]
    address = f"{bed.world.url.replace('http', 'ws', 1)}/api/v1/agent"
    with connect(address, additional_headers={"Authorization": f"Bearer {identity['token']}"}) as ws:
        running = [{"replica_id": one["id"], "epoch": one["epoch"], "state": "RUNNING"} for one in replicas]
        ws.send(json.dumps({"type": "hello", "version": "1", "replicas": running}))
        with contextlib.suppress(ConnectionClosed):
            for one in replicas:
                stale = {"replica_id": one["id"], "epoch": one["epoch"] - 1, "state": "EXITED", "exit_code": 0}
                ws.send(json.dumps({"type": "replica", **stale}))
            ws.send(json.dumps({"type": "beat"}))
            while json.loads(ws.recv(timeout=30))["type"] != "lease":
                continue
    states = {one["id"]: one["state"] for one in bed.world.job(job)["replicas"]}
    assert all(states[one["id"]] == one["state"] for one in replicas), states
    yield


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
