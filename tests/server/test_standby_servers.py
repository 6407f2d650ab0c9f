"""A standby passes on what it gets, and leads when the server that led is gone: real servers, a real agent, SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import structlog.testing
from tests.server.harness import running, settings_for
from tests.server.postgres_cluster import Cluster
from tests.support.waiting import until, until_answer

from penstock.client import Client
from penstock.distributed.ports import free_ports
from penstock.errors import Unavailable
from penstock_server.standby import Passage, opened_in_turn
from penstock_server.statedir import locked, write_address

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

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


def test_an_agent_with_two_addresses_follows_the_leader(tmp_path: Path) -> None:
    with Servers(tmp_path, None) as servers:
        first, its_url = servers.start()
        until(lambda: servers.leads(first) and answers(its_url), "the first server")
        second, url = servers.start("--standby")
        until(lambda: answers(url), "what the standby passes on")
        client = servers.client(f"{its_url},{url}")
        agent = ["penstock_worker", "--url", f"{its_url},{url}", "--state-dir", str(tmp_path / "agent"), "--name", "n1"]
        servers.run("agent", agent, PENSTOCK_JOIN_TOKEN=client.join_token()["token"])
        go = tmp_path / "go"
        entrypoint = [sys.executable, "-c", COUNTER.format(go=str(go))]
        job = client.submit({"name": "j", "entrypoint": entrypoint, "mode": "command", "trainers": {"memory": "1MiB"}})
        until(lambda: client.job(job["id"])["state"] == "RUNNING", "the job")
        log = tmp_path / "agent.log"
        assert f"connected to {its_url} as node" in log.read_text()

        first.send_signal(signal.SIGKILL)
        first.wait()
        until(lambda: f"connected to {url} as node" in log.read_text(), "the agent's second connection")
        assert servers.leads(second)
        go.touch()
        found = client.job(job["id"], wait_s=60.0)
        assert (found["state"], found["attempt"], found["restarts"]) == ("SUCCEEDED", 1, 0), (
            found["why"],
            servers.said(),
        )
        *numbers, end = client.logs(job["id"], found["replicas"][0]["id"])["text"].splitlines()
        assert (numbers, end) == ([str(number) for number in range(len(numbers))], "end"), "no line is lost or doubled"
        assert client.url == url


@pytest.mark.asyncio
async def test_a_standby_needs_the_folder_of_its_leader(tmp_path: Path, postgres_copy: str) -> None:
    other = settings_for(tmp_path / "two", postgres_copy).model_copy(update={"standby": True})
    async with running(settings_for(tmp_path / "one", postgres_copy)):
        with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(Unavailable, match="a shared one"):
            async with opened_in_turn(other, listener):
                pass


@asynccontextmanager
async def passing_on(folder: Path, lead: Serve, **options: int) -> AsyncIterator[tuple[Passage, tuple[str, int]]]:
    """A server that does what `lead` says, and a passage to it; yields that and its address."""
    passage = Passage(folder, ("127.0.0.1", 1), says_why=True, **options)
    leader = await asyncio.start_server(lead, "127.0.0.1", 0)
    standby = await asyncio.start_server(passage.serve, "127.0.0.1", 0)
    async with leader, standby:
        write_address(folder, f"http://127.0.0.1:{leader.sockets[0].getsockname()[1]}")
        yield passage, standby.sockets[0].getsockname()
        await passage.end()


async def say_all_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    writer.close()


async def say_lines_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async for line in reader:
        writer.write(line)
    writer.close()


async def rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return what comes until the end of a connection, in order or not."""
    found = b""
    with suppress(ConnectionResetError):
        found = await reader.read()
    writer.close()
    return found


@pytest.mark.asyncio
async def test_each_side_may_end_its_direction_first(tmp_path: Path) -> None:
    sent = random.Random(1).randbytes(3_000_000)
    async with passing_on(tmp_path, say_all_back) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        writer.write_eof()
        assert await rest(reader, writer) == sent


@pytest.mark.asyncio
async def test_connections_end_when_the_standby_leads(tmp_path: Path) -> None:
    async with passing_on(tmp_path, say_all_back) as (passage, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"a")
        await until_answer(passage.num_open, lambda found: found == 1)
        await passage.end()
        assert await rest(reader, writer) == b""


@pytest.mark.asyncio
async def test_of_too_many_connections_a_silent_one_goes(tmp_path: Path) -> None:
    async with passing_on(tmp_path, say_lines_back, max_open=2) as (passage, address):
        served = await asyncio.open_connection(*address)
        served[1].write(b"a\n")
        assert await served[0].readline() == b"a\n"
        silent = await asyncio.open_connection(*address)
        await until_answer(passage.num_open, lambda found: found == 2)
        new = await asyncio.open_connection(*address)
        assert await rest(*silent) == b""
        for reader, writer in (served, new):
            writer.write(b"b\n")
            assert await reader.readline() == b"b\n"
            writer.close()


@pytest.mark.asyncio
async def test_a_client_that_breaks_off_ends_at_the_leader(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def note_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionResetError):
            await reader.read()
        ended.set()
        writer.close()

    async with passing_on(tmp_path, note_end) as (passage, address):
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"a")
        await until_answer(passage.num_open, lambda found: found == 1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()  # a reset, as of a process that was killed
        await asyncio.wait_for(ended.wait(), 30)


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::1]"])
async def test_a_standby_passes_nothing_on_to_itself(tmp_path: Path, host: str) -> None:
    own: list[tuple[str, int]] = [("127.0.0.1", 0)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Passage(tmp_path, own[0], says_why=True).serve(reader, writer)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as standby:
        own[0] = standby.sockets[0].getsockname()
        write_address(tmp_path, f"http://{host}:{own[0][1]}")
        reader, writer = await asyncio.open_connection(*own[0])
        assert b"no_leader" in await rest(reader, writer)


@pytest.mark.asyncio
async def test_a_database_that_is_away_delays_the_turn(tmp_path: Path, postgres_apart: Cluster) -> None:
    settings = settings_for(tmp_path, postgres_apart.url).model_copy(update={"standby": True})

    async def lead(listener: socket.socket) -> str:
        async with opened_in_turn(settings, listener) as runtime:
            return "leads" if runtime is not None else "stopped"

    with socket.create_server(("127.0.0.1", 0)) as listener, structlog.testing.capture_logs() as said:
        with locked(settings.state_dir):
            turn = asyncio.create_task(lead(listener))

            async def events() -> list[str]:
                return [entry["event"] for entry in said]

            await until_answer(events, lambda found: "server stands by" in found)
            postgres_apart.stop()
        await until_answer(events, lambda found: "server cannot take over yet" in found)
        assert not turn.done()
        postgres_apart.start()
        assert await turn == "leads"


@pytest.mark.asyncio
async def test_a_signal_ends_a_standby(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, None).model_copy(update={"standby": True})
    with socket.create_server(("127.0.0.1", 0)) as listener, locked(settings.state_dir):
        async with asyncio.TaskGroup() as group:

            async def lead() -> None:
                async with opened_in_turn(settings, listener) as runtime:
                    assert runtime is None

            with structlog.testing.capture_logs() as said:
                group.create_task(lead())

                async def num_said() -> int:
                    return len(said)

                await until_answer(num_said, bool)
                os.kill(os.getpid(), signal.SIGTERM)
