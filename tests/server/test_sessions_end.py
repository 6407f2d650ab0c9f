"""A token that ends takes its websockets with it, and each server's session cookie is its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import LIMIT_S
from websockets.asyncio.client import connect
from websockets.typing import Origin

pytestmark = pytest.mark.asyncio


async def closed_code(ws: Any) -> int | None:
    async with asyncio.timeout(LIMIT_S):
        await ws.wait_closed()
    code: int | None = ws.close_code
    return code


async def log_in(server: Server) -> httpx.Cookies:
    code = (await server.http.post("/api/v1/login-codes")).json()["code"]
    async with httpx.AsyncClient(timeout=LIMIT_S, base_url=server.url) as browser:
        return (await browser.post("/api/v1/session", json={"code": code})).cookies


async def test_revoked_token_loses_its_sockets_and_no_other_does(server: Server) -> None:
    made = (await server.http.post("/api/v1/tokens", json={"name": "r", "scopes": ["read"]})).json()
    async with server.connect("/api/v1/stream", made["token"]) as ws, server.browser() as other:
        await ws.send(json.dumps({"type": "subscribe", "id": 1, "topic": "jobs"}))
        await ws.recv()
        await server.http.delete(f"/api/v1/tokens/{made['id']}")
        assert await closed_code(ws) == 4401
        assert (await other.subscribe(1, topic="jobs"))["jobs"] == []


async def test_expired_token_of_an_attached_process_loses_its_socket(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        body = {"name": "a", "scopes": ["attach"], "expires_in_s": 60}
        made = (await server.http.post("/api/v1/tokens", json=body)).json()
        async with server.connect("/api/v1/attach", made["token"]) as ws:
            register = {"type": "register", "job_name": "j", "role": "trainer", "index": 0, "host": "h", "pid": 1}
            await ws.send(json.dumps(register))
            await ws.recv()
            clock.advance(61)
            assert await closed_code(ws) == 4401


async def test_logging_out_closes_the_page_of_the_session(sqlite_server: Server) -> None:
    cookies = await log_in(sqlite_server)
    [(name, value)] = cookies.items()
    address = sqlite_server.url.replace("http", "ws", 1) + "/api/v1/stream"
    headers = {"Cookie": f"{name}={value}"}
    async with connect(address, additional_headers=headers, origin=Origin(sqlite_server.url)) as ws:
        async with httpx.AsyncClient(timeout=LIMIT_S, base_url=sqlite_server.url, cookies=cookies) as browser:
            answer = await browser.delete("/api/v1/session", headers={"Origin": sqlite_server.url})
            assert answer.status_code == 204
        assert await closed_code(ws) == 4401


async def test_two_servers_of_one_host_keep_both_sessions(tmp_path: Path) -> None:
    jar = httpx.Cookies()
    async with running(settings_for(tmp_path / "a")) as one, running(settings_for(tmp_path / "b")) as two:
        for server in (one, two):
            jar.update(await log_in(server))
        for server in (one, two):
            async with httpx.AsyncClient(timeout=LIMIT_S, base_url=server.url, cookies=jar) as browser:
                assert (await browser.get("/api/v1/me")).status_code == 200


@pytest.mark.asyncio
async def test_a_known_token_costs_no_query_and_ends_at_once(sqlite_server: Server) -> None:
    tokens, looked = sqlite_server.runtime.tokens, []
    secret = await sqlite_server.token("read")
    made = (await sqlite_server.http.get("/api/v1/tokens")).json()["items"][-1]
    glance = sqlite_server.runtime.database.glance

    def counted() -> Any:
        looked.append(asyncio.current_task())
        return glance()

    sqlite_server.runtime.database.glance = counted  # type: ignore[method-assign]
    assert [await tokens.bearer(secret) is not None for _ in range(3)] == [True] * 3
    assert looked.count(asyncio.current_task()) == 1, "the server's own tasks look at other tables meanwhile"
    await tokens.revoke(made["id"])
    assert await tokens.bearer(secret) is None
    assert await tokens.session(secret) is None
