"""Addresses that no page of ours writes are answered as such, never with a failure of the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server.harness import Server

pytestmark = pytest.mark.asyncio


async def test_path_longer_than_a_file_name_is_a_client_route(sqlite_server: Server, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<p>page</p>")
    sqlite_server.runtime.settings.static_dir = tmp_path
    for path in ("/" + "x" * 300, "/" + "x/" * 3000):
        answer = await sqlite_server.http.get(path)
        assert (answer.status_code, answer.text) == (200, "<p>page</p>")
    assert (await sqlite_server.http.get("/assets/" + "x" * 300)).status_code == 404


async def test_log_offset_beyond_any_file_gives_an_empty_piece(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    async with sqlite_server.agent(await sqlite_server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await agent.log(replica, 0, b"line\n")
        for offset in (6, 2**63 - 1, 2**80):
            answer = await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}/logs?offset={offset}")
            assert (answer.status_code, answer.json()["text"]) == (200, "")
            assert answer.json()["next_offset"] == offset


async def test_nul_in_an_address_is_refused(server: Server) -> None:
    for path in ("jobs/a%00b", "jobs?name=a%00b", "graphs/" + "a" * 63 + "%00"):
        answer = await server.http.get(f"/api/v1/{path}")
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_request"), answer.text


async def test_who_has_no_session_is_told_the_command_that_opens_one(sqlite_server: Server) -> None:
    stranger = await sqlite_server.http.get("/api/v1/me", headers={"Authorization": "Bearer psu_guess"})
    refused = await sqlite_server.http.post("/api/v1/session", json={"code": "psl_guess"})
    for answer in (stranger, refused):
        assert answer.status_code == 401
        assert "`penstock login-link`" in answer.json()["hint"]
