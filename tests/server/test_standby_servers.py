"""A standby passes on what it gets, and leads when the server that led is gone: real servers, a real agent, SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from tests.server.harness import running, settings_for
from tests.support.waiting import until, until_answer

from penstock.client import Client
from penstock.distributed.ports import free_ports
from penstock.errors import Unavailable
from penstock_server.standby import Passage, opened_in_turn
from penstock_server.statedir import write_address

COUNTER = """
import itertools, os, time
for number in itertools.count():
    print(number, flush=True)
    if os.path.exists({go!r}):
        break
    time.sleep(0.01)
print("end")
"""


class Servers:
    """Servers on one state folder, each with a port, and what reaches them."""

    def __init__(self, folder: Path, database_url: str | None) -> None:
        self.folder, self.state = folder, folder / "state"
        self._options = [] if database_url is None else ["--database-url", database_url]
        self._stack = ExitStack()
        self._ports = iter(free_ports("127.0.0.1", 4))

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, *options: str) -> tuple[subprocess.Popen[bytes], str]:
        """Start a server; return it and its address."""
        port = next(self._ports)
        line = ["penstock_server", "--port", str(port), "--state-dir", str(self.state), *self._options, *options]
        return self.run(f"server-{port}", line), f"http://127.0.0.1:{port}"

    def run(self, name: str, line: list[str], **environ: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen([sys.executable, "-m", *line], stderr=log, env={**os.environ, **environ})
        self._stack.callback(_end, process)
        return process

    def client(self, url: str) -> Client:
        return self._stack.enter_context(Client(url, token=(self.state / "admin.token").read_text().strip()))

    def leads(self, process: subprocess.Popen[bytes]) -> bool:
        file = self.state / "server.json"
        return file.exists() and json.loads(file.read_text())["pid"] == process.pid

    def said(self) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob("*.log"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False).is_success
    except httpx.TransportError:
        return False


@pytest.fixture
def servers(tmp_path: Path, migrated_url: str | None) -> Iterator[Servers]:
    with Servers(tmp_path, migrated_url) as made:
        yield made


def test_a_job_goes_on_when_a_standby_takes_over(servers: Servers, tmp_path: Path) -> None:
    first, its_url = servers.start()
    until(lambda: servers.leads(first) and answers(its_url), "the first server")
    second, url = servers.start("--standby")
    until(lambda: answers(url), "what the standby passes on")
    assert servers.leads(first)
    client = servers.client(url)
    agent = ["penstock_worker", "--url", url, "--state-dir", str(tmp_path / "agent"), "--name", "n1"]
    servers.run("agent", agent, PENSTOCK_JOIN_TOKEN=client.join_token()["token"])
    go = tmp_path / "go"
    entrypoint = [sys.executable, "-c", COUNTER.format(go=str(go))]
    spec = {"name": "j", "entrypoint": entrypoint, "mode": "command", "trainers": {"memory": "1MiB"}}
    job = client.submit(spec)["id"]
    until(lambda: client.job(job)["state"] == "RUNNING", "the job")

    first.send_signal(signal.SIGKILL)
    first.wait()
    until(lambda: servers.leads(second) and answers(url), "the standby")
    go.touch()
    found = client.job(job, wait_s=60.0)
    assert (found["state"], found["attempt"], found["restarts"]) == ("SUCCEEDED", 1, 0), (found["why"], servers.said())
    *numbers, end = client.logs(job, found["replicas"][0]["id"])["text"].splitlines()
    assert (numbers, end) == ([str(number) for number in range(len(numbers))], "end"), "no line is lost or doubled"


def test_a_standby_without_a_leader_says_so_and_stops(tmp_path: Path) -> None:
    with Servers(tmp_path, None) as servers:
        first, its_url = servers.start()
        until(lambda: servers.leads(first) and answers(its_url), "the first server")
        second, url = servers.start("--standby")
        until(lambda: answers(url), "what the standby passes on")
        (servers.state / "server.json").unlink()
        answer = httpx.get(f"{url}/readyz", trust_env=False)
        assert (answer.status_code, answer.json()["code"], answer.headers["Retry-After"]) == (503, "no_leader", "1")
        second.terminate()
        assert second.wait(30) == 0
        assert "server stopped" in servers.said()
        assert answers(its_url)


@pytest.mark.asyncio
async def test_a_standby_needs_the_folder_of_its_leader(tmp_path: Path, postgres_copy: str) -> None:
    other = settings_for(tmp_path / "two", postgres_copy).model_copy(update={"standby": True})
    async with running(settings_for(tmp_path / "one", postgres_copy)):
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(Unavailable, match="a shared one"):
            async with opened_in_turn(other, listener):
                pass


@pytest.mark.asyncio
async def test_each_side_may_end_its_direction_first(tmp_path: Path) -> None:
    sent = random.Random(1).randbytes(3_000_000)

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read())
        writer.close()

    passage = Passage(tmp_path, says_why=True)
    leader = await asyncio.start_server(lead, "127.0.0.1", 0)
    standby = await asyncio.start_server(passage.serve, "127.0.0.1", 0)
    async with leader, standby:
        write_address(tmp_path, f"http://127.0.0.1:{leader.sockets[0].getsockname()[1]}")
        reader, writer = await asyncio.open_connection(*standby.sockets[0].getsockname())
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()


@pytest.mark.asyncio
async def test_connections_end_when_the_standby_leads(tmp_path: Path) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    passage = Passage(tmp_path, says_why=True)
    leader = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    standby = await asyncio.start_server(passage.serve, "127.0.0.1", 0)
    async with leader, standby:
        write_address(tmp_path, f"http://127.0.0.1:{leader.sockets[0].getsockname()[1]}")
        reader, writer = await asyncio.open_connection(*standby.sockets[0].getsockname())
        writer.write(b"a")
        await until_answer(passage.num_open, lambda found: found == 1)
        await passage.end()
        with suppress(ConnectionResetError):  # what the client sent may not have been read yet
            assert await reader.read() == b""
        writer.close()
