"""Peers without a token: silent sockets, half-sent requests, foreign names; and addresses that others can reach."""

from __future__ import annotations

import socket
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import trustme
from tests.server.harness import Server
from tests.server.test_server_process import refuse, serving
from tests.support.waiting import until_answer

from penstock_server.admission import BODY_BYTES_PER_S, Admission
from penstock_server.guard import host_allowed

DESCRIPTORS, SILENT = 256, 400


class Peer:
    """A connection that an admission may end."""

    ended = False

    def end(self) -> None:
        self.ended = True


@pytest.mark.asyncio
async def test_of_too_many_connections_the_longest_silent_goes() -> None:
    admission, peers = Admission(10.0, max_connections=3), [Peer() for _ in range(5)]
    for number, peer in enumerate(peers[:3]):
        admission.opened(peer, number + 1)
    admission.received(peers[0], waits=False, sends=False, num_bytes=9)  # its request is being answered
    admission.opened(peers[3], 4)
    assert [peer.ended for peer in peers] == [False, True, False, False, False]
    admission.received(peers[0], waits=True, sends=False, num_bytes=0)  # and is answered: it owes the next
    admission.opened(peers[4], 4)
    assert [peer.ended for peer in peers] == [False, True, True, False, False]
    for peer in peers:
        admission.closed(peer)


@pytest.mark.asyncio
async def test_a_body_that_goes_on_coming_has_time() -> None:
    now = [0.0]
    admission, fast, slow = Admission(0.01, 9, now=lambda: now[0]), Peer(), Peer()
    for peer, num_bytes in ((fast, 100 * BODY_BYTES_PER_S), (slow, 1)):
        admission.opened(peer, 1)
        admission.received(peer, waits=False, sends=True, num_bytes=num_bytes)
    now[0] = 50.0

    async def is_ended() -> bool:
        return slow.ended

    await until_answer(is_ended, bool)
    assert not fast.ended
    admission.closed(fast)


def test_silent_sockets_do_not_disable_the_server(tmp_path: Path) -> None:
    limited = ("bash", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "-")
    with ExitStack() as sockets, serving(tmp_path / "state", before=limited) as (_, url):
        for _ in range(SILENT):
            sockets.enter_context(socket.create_connection(address(url), timeout=30))
        begin = time.monotonic()
        with urllib.request.urlopen(f"{url}/readyz", timeout=30) as answer:
            assert answer.status == 200
        assert time.monotonic() - begin < 10
    log = (tmp_path / "state.log").read_text()
    assert len(log) < 10_000
    assert "Traceback" not in log


def test_half_sent_requests_are_closed(tmp_path: Path) -> None:
    halves = (
        b"",
        b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
    )
    with ExitStack() as sockets, serving(tmp_path / "state", PENSTOCK_SERVER_REQUEST_HEAD_S="0.5") as (_, url):
        opened = [sockets.enter_context(socket.create_connection(address(url), timeout=30)) for _ in halves]
        for one, half in zip(opened, halves, strict=True):
            one.sendall(half)
        for one in opened:
            with suppress(ConnectionResetError):  # closed, as the end of a stream is
                while one.recv(4096):
                    pass


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7080", "[::1]:7080", "10.0.0.7", "localhost:1", "LOCALHOST", "mine.example", None]
)
def test_the_names_of_a_server_are_let_in(host: str | None) -> None:
    assert host_allowed(host, own="127.0.0.1", extra=["mine.example"])


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:7080", "localhost.evil.example", "x"])
def test_a_name_that_is_none_of_a_server_is_refused(host: str) -> None:
    assert not host_allowed(host, own="127.0.0.1", extra=["mine.example"])


@pytest.mark.asyncio
async def test_a_foreign_host_gets_no_answer(sqlite_server: Server) -> None:
    async with httpx.AsyncClient(base_url=sqlite_server.url) as client:
        for path in ("/", "/healthz/", "/api/v1/jobs"):
            answer = await client.get(path, headers={"Host": "evil.example"})
            assert (answer.status_code, answer.json()["code"]) == (421, "unknown_host")
        assert (await client.get("/healthz", headers={"Host": "probe.example"})).status_code == 200
    named = await sqlite_server.http.get("/api/v1/jobs", headers={"Host": "proxy.example"})  # it shows a token
    assert named.status_code == 200


def test_plain_http_for_other_machines_is_refused(tmp_path: Path) -> None:
    said = refuse(tmp_path / "state", "--host", "0.0.0.0", "--port", "0")
    assert "--insecure" in said and "--tls-cert" in said


def test_plain_http_for_others_is_served_if_told_so(tmp_path: Path) -> None:
    with serving(tmp_path / "state", "--host", "0.0.0.0", "--insecure") as (_, url):
        assert url.startswith("http://0.0.0.0:")


def test_a_server_with_a_certificate_speaks_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    chain, key, root = (tmp_path / name for name in ("chain.pem", "key.pem", "root.pem"))
    made.private_key_pem.write_to_path(str(key))
    for part in made.cert_chain_pems:
        part.write_to_path(str(chain), append=True)
    authority.cert_pem.write_to_path(str(root))
    monkeypatch.setenv("SSL_CERT_FILE", str(root))
    with serving(tmp_path / "state", "--tls-cert", str(chain), "--tls-key", str(key)) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        token = (tmp_path / "state" / "admin.token").read_text().strip()
        answer = httpx.get(f"{url}/api/v1/me", headers={"Authorization": f"Bearer {token}"})
        assert answer.json()["name"] == "admin"
