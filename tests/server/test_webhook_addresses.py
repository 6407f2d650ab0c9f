"""Where webhooks may post to: no way into the operator's own network, whatever a name resolves to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import running, settings_for
from tests.server.test_webhooks import cancelled, failed
from tests.support.receiver import receiving

from penstock_server.webhooksender import MAX_LOOKUPS, NotSent, Refused, Sender, is_allowed

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
NOT_PUBLIC = [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fec0::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "::7f00:1", "64:ff9b::a00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::",
    "2001:0:5db8:d822:0:0:80ff:fffe", "192.0.0.192", "168.63.129.16", "192.88.99.1", "::ffff:168.63.129.16",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_ssrf_address_that_is_not_public_is_refused(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_allowed(address, [])
    assert is_allowed(address, [ipaddress.ip_network(text)])


@pytest.mark.parametrize("text", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"])
def test_public_address_is_allowed(text: str) -> None:
    assert is_allowed(ipaddress.ip_address(text), [])


@pytest.mark.asyncio
async def test_ssrf_webhook_to_the_servers_own_network_is_refused(tmp_path: Path) -> None:
    with receiving() as receiver:
        async with running(settings_for(tmp_path)) as server:
            for host in ("127.0.0.1", "169.254.169.254"):
                refused = await server.http.post("/api/v1/webhooks", json={"url": f"http://{host}:8080/"})
                assert (refused.status_code, refused.json()["code"]) == (409, "address_not_allowed")
            for name in ("localhost", "127.1", "2130706433", "0x7f000001"):  # names and forms that resolve to loopback
                body = {"url": receiver.url.replace("127.0.0.1", name)}
                made = await server.http.post("/api/v1/webhooks", json=body)
                assert made.status_code == 201
                await cancelled(server)
                assert "not public" in (await failed(server, 1))["reason"], name
                await server.http.delete(f"/api/v1/webhooks/{made.json()['id']}")
    assert receiver.got == []


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Have names resolve to each of these in turn, the last for ever; return the names that were asked for."""
    asked: list[str] = []

    def resolve(host: str, port: int, *args: object, **options: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[min(len(asked), len(addresses)) - 1], port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


@pytest.mark.asyncio
async def test_ssrf_name_that_rebinds_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose address may be posted to when it is checked and not when it is connected to."""
    with receiving() as receiver:
        url = receiver.url.replace("127.0.0.1", "rebinds.test")
        asked = resolves_to(monkeypatch, "240.0.0.1", "127.0.0.1")  # reserved: nothing answers at the first
        with pytest.raises(NotSent) as refused:
            await Sender([ipaddress.ip_network("240.0.0.0/4")], limit_s=1.0).post(url, {}, "{}")
    assert not isinstance(refused.value, Refused)
    assert asked == ["rebinds.test"]
    assert receiver.got == []


@pytest.mark.asyncio
async def test_ssrf_redirect_is_not_followed() -> None:
    with receiving(307) as receiver:
        assert await Sender([LOOPBACK]).post(receiver.url, {}, "{}") == 307
    assert len(receiver.got) == 1


@pytest.mark.asyncio
async def test_ssrf_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver, receiving() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert await Sender([LOOPBACK]).post(receiver.url, {}, "{}") == 200
    assert (len(receiver.got), proxy.got) == (1, [])


@pytest.mark.asyncio
async def test_attempt_is_bounded_and_ends_with_the_head_of_the_answer() -> None:
    with receiving(drips=True) as receiver:
        assert await Sender([LOOPBACK], limit_s=5.0).post(receiver.url, {}, "{}") == 200
    with receiving(holds=True) as silent, pytest.raises(NotSent, match=r"no answer within 0\.5 s"):
        await Sender([LOOPBACK], limit_s=0.5).post(silent.url, {}, "{}")


@pytest.mark.asyncio
async def test_name_server_that_hangs_delays_no_other_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the threads that the event loop has for everything else."""
    look_up = socket.getaddrinfo

    def hang(host: str, *args: Any, **options: Any) -> Any:
        if host.startswith("hangs"):
            time.sleep(2.0)
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    sender = Sender([LOOPBACK], limit_s=1.0)
    with receiving() as receiver:
        hanging = [asyncio.create_task(sender.post(f"http://hangs{n}.invalid/", {}, "{}")) for n in range(40)]
        await asyncio.sleep(0)
        assert await sender.post(receiver.url, {}, "{}") == 200
        await asyncio.wait_for(asyncio.to_thread(int), 1.0)
        found = await asyncio.gather(*hanging, return_exceptions=True)
    assert all(isinstance(one, NotSent) for one in found)


@pytest.mark.asyncio
async def test_name_that_hangs_takes_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), list[str]()
    look_up = socket.getaddrinfo

    def hang(host: str, *args: Any, **options: Any) -> Any:
        asked.append(host)
        assert not host.startswith("hangs") or go_on.wait(60)
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    sender = Sender([LOOPBACK], limit_s=0.02)
    try:
        for _ in range(MAX_LOOKUPS + 1):
            with pytest.raises(NotSent, match=r"no answer within 0\.02 s"):
                await sender.post("http://hangs.invalid/", {}, "{}")
        assert asked.count("hangs.invalid") == 1
    finally:
        go_on.set()


@pytest.mark.asyncio
@pytest.mark.parametrize("host", ["a" * 64 + ".invalid", "a..invalid", "no.such.name.invalid"])
async def test_name_that_cannot_be_resolved_is_a_failure(host: str) -> None:
    with pytest.raises(NotSent):
        await Sender([]).post(f"http://{host}/", {}, "{}")
