"""Of several servers a client uses one until it fails; what a server may have done is not asked of another."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock import client as client_module
from penstock.async_client import AsyncClient
from penstock.client import Client
from penstock.distributed.ports import free_ports
from penstock.errors import SpecError, Unavailable
from penstock.failover import ServerAddresses
from penstock_worker.__main__ import _known
from penstock_worker.identity import Identity

NO_LEADER = {"code": "no_leader", "detail": "no server leads"}


class Server(HTTPServer):
    """Answers `status` and `body`; status 0: it hangs up without an answer. `got`: methods and bodies."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status, self.body = status, body
        self.got: list[tuple[str, bytes]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                sent += self.rfile.read(size)
                self.rfile.readline()
        server.got.append((self.command, sent))
        if server.status == 0:
            self.close_connection = True
            return
        text = json.dumps(server.body).encode()
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def start(status: int, **body: Any) -> Server:
            server = stack.enter_context(Server(status, body))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield start


def absent() -> str:
    return f"http://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"


def test_a_call_goes_to_the_server_that_answers(serve: Callable[..., Server]) -> None:
    there = serve(200, code="c")
    with Client(f"{absent()}, {there.url}/", token="t") as client:
        assert client.login_code() == "c"
        assert client.url == there.url
        client.login_code()
    assert len(there.got) == 2


def test_an_async_call_goes_to_the_server_that_answers(serve: Callable[..., Server]) -> None:
    there = serve(200, code="c")

    async def ask() -> list[str]:
        async with AsyncClient(f"{absent()},{there.url}", token="t") as client:
            return await asyncio.gather(*[client.login_code() for _ in range(5)])

    assert asyncio.run(ask()) == ["c"] * 5


def test_a_standby_without_leader_is_passed_over(serve: Callable[..., Server], tmp_path: Path) -> None:
    standby, leader = serve(503, **NO_LEADER), serve(200, sha256="a")
    archive = tmp_path / "archive"
    archive.write_bytes(b"x" * 100_000)
    with Client(f"{standby.url},{leader.url}", token="t") as client:
        client.upload_snapshot(archive)
    assert leader.got == [("POST", archive.read_bytes())], "the whole file, although the standby had read it"


@pytest.mark.parametrize(("status", "body"), [(0, {}), (503, {"code": "storage_full", "detail": "full"})])
def test_a_change_that_a_server_got_is_not_sent_to_another(
    serve: Callable[..., Server], status: int, body: dict[str, Any]
) -> None:
    first, second = serve(status, **body), serve(200, code="c")
    with Client(f"{first.url},{second.url}", token="t") as client, pytest.raises(Unavailable):
        client.login_code()
    assert (len(first.got), second.got) == (1, [])


def test_a_read_without_an_answer_goes_to_the_next_server(serve: Callable[..., Server]) -> None:
    first, second = serve(0), serve(200, items=[])
    with Client(f"{first.url},{second.url}", token="t") as client:
        assert list(client.nodes()) == []
    assert len(first.got) == 1


def test_a_download_comes_from_the_server_that_answers(serve: Callable[..., Server], tmp_path: Path) -> None:
    first, standby, there = serve(0), serve(503, **NO_LEADER), serve(200, whole="body")
    with Client(f"{first.url},{standby.url},{there.url}", token="t") as client:
        client.download_snapshot("a" * 64, tmp_path / "archive")
    assert (tmp_path / "archive").read_bytes() == b'{"whole": "body"}'
    assert [path.name for path in tmp_path.iterdir()] == ["archive"], "no part is left"


def test_one_of_several_servers_is_ready(serve: Callable[..., Server]) -> None:
    with Client(f"{absent()},{serve(200).url}", token="t") as client:
        assert client.is_ready()
    with Client(f"{absent()},{absent()}", token="t") as client:
        assert not client.is_ready()


def test_servers_refuse_when_each_has_since_the_last_success() -> None:
    addresses = ServerAddresses("http://a,http://b")
    assert not addresses.refused("http://a")
    assert not addresses.refused("http://a")
    addresses.succeeded()
    assert not addresses.refused("http://b")
    assert addresses.refused("http://a")


def test_a_call_waits_while_no_server_leads(serve: Callable[..., Server]) -> None:
    first, second = serve(503, **NO_LEADER), serve(503, **NO_LEADER)

    def lead() -> None:
        second.status, second.body = 200, {"code": "c"}

    timer = threading.Timer(0.3, lead)
    timer.start()
    with Client(f"{first.url},{second.url}", token="t") as client:
        assert client.login_code() == "c"
    timer.join()
    assert len(first.got) > 1, "all of them were asked again"


def test_without_any_server_the_error_names_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FAILOVER_S", 0.01)
    urls = f"{absent()},{absent()}"
    with Client(urls, token="t") as client, pytest.raises(Unavailable, match=urls):
        client.login_code()


def test_a_round_is_over_when_all_addresses_have_failed() -> None:
    servers = ServerAddresses("http://a/, http://b,http://a")
    assert (str(servers), servers.current) == ("http://a,http://b", "http://a")
    assert not servers.failed("http://a")
    assert not servers.failed("http://a"), "another caller's, which was slower"
    assert (servers.current, servers.from_current) == ("http://b", "http://b,http://a")
    servers.succeeded()
    assert not servers.failed("http://b")
    assert servers.failed("http://a")


@pytest.mark.parametrize("text", ["", "a:80", "http://a,", "http://a,ftp://b"])
def test_a_wrong_list_of_addresses_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="several with commas between"):
        ServerAddresses(text)


@pytest.mark.parametrize(
    ("url", "kept"), [(None, "http://a"), ("http://b,http://a", "http://b,http://a"), ("http://b", None)]
)
def test_a_node_stays_known_by_any_address_of_its_servers(url: str | None, kept: str | None) -> None:
    found = _known(Identity("http://a", "n", "secret"), url)
    assert (found and found.url) == kept
