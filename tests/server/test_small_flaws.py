"""Limits on what peers send, damage, and mistakes of administrators: each is an answer that says what to do."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.server.test_server_process import refuse
from websockets.exceptions import ConnectionClosed

from penstock_server.auth.rates import MAX_NAMES, of_tokens
from penstock_server.auth.wrong import BURST, WrongSecrets


def test_wrong_secrets_are_forgiven_one_a_second() -> None:
    wrong = WrongSecrets()
    assert [wrong.note("a", 0.0) for _ in range(BURST + 2)] == [False] * BURST + [True] * 2
    assert not wrong.note("b", 0.0)
    assert wrong.note("a", 0.5)
    assert not wrong.note("a", 5.0)


@pytest.mark.asyncio
async def test_wrong_tokens_are_limited_and_right_ones_pass(tmp_path: Path, clock: FakeClock) -> None:
    wrong = {"Authorization": "Bearer psu_wrong"}
    async with running(settings_for(tmp_path), clock) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            found = [(await client.get("/api/v1/jobs", headers=wrong)).status_code for _ in range(BURST + 5)]
            assert found == [401] * BURST + [429] * 5
            last = await client.get("/api/v1/jobs", headers=wrong)
            assert (last.status_code, last.headers["Retry-After"]) == (429, "1")
            codes = [(await client.post("/api/v1/session", json={"code": "x"})).status_code for _ in range(3)]
            assert codes == [429] * 3
        assert (await server.http.get("/api/v1/jobs")).status_code == 200


def test_a_token_that_asks_too_often_is_served_at_its_rate() -> None:
    rates = of_tokens(200.0)
    served = [second for at in range(60 * 250) if not rates.note("a", at / 250) for second in [at // 250]]
    assert {served.count(second) for second in range(50, 60)} <= {199, 200, 201}


def test_rate_is_forgiven_and_bounded_for_each_name() -> None:
    rates = of_tokens(2.0)
    assert [rates.note("a", 0.0) for _ in range(22)] == [False] * 20 + [True] * 2
    assert not rates.note("b", 0.0), "each has its own"
    assert rates.note("a", 0.4), "less than one is forgiven"
    assert not rates.note("a", 1.5)
    for number in range(MAX_NAMES + 5):
        rates.note(str(number), 2.0)
    assert len(rates._owed) == MAX_NAMES


@pytest.mark.asyncio
async def test_many_requests_with_one_token_are_limited(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, requests_per_s=1.0), clock) as server:
        other = {"Authorization": f"Bearer {await server.token('read')}"}
        node = await server.join()
        found = [(await server.http.get("/api/v1/me")).status_code for _ in range(12)]
        assert found[0] == 200 and found[-1] == 429
        refused = await server.http.get("/api/v1/me")
        assert (refused.headers["Retry-After"], refused.json()["code"]) == ("1", "too_many_requests")
        assert (await server.http.get("/api/v1/me", headers=other)).status_code == 200
        async with server.agent(node), server.browser():
            pass  # websockets are not counted, with the same token or another
        clock.advance(1.0)
        assert (await server.http.get("/api/v1/me")).status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("seconds", [1e300, 1e18, 0, -1])
async def test_an_expiry_beyond_all_time_is_refused(sqlite_server: Server, seconds: float) -> None:
    body = {"name": "t", "scopes": ["read"], "expires_in_s": seconds}
    answer = await sqlite_server.http.post("/api/v1/tokens", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


@pytest.mark.asyncio
async def test_local_peer_does_not_choose_its_address(sqlite_server: Server, tmp_path: Path) -> None:
    """X-Forwarded-For of a user of this machine: in the audit log, and to escape the limit of wrong tokens."""
    spec = {"spec": {"name": "j", "entrypoint": ["true"]}}

    async def peer_of(server: Server) -> str:
        await server.http.post("/api/v1/jobs", json=spec, headers={"X-Forwarded-For": "203.0.113.9"})
        newest = (await server.http.get("/api/v1/audit", params={"page_size": 1})).json()["items"][0]
        return str(newest["peer"])

    assert await peer_of(sqlite_server) == "127.0.0.1"
    async with httpx.AsyncClient(base_url=sqlite_server.url) as client:
        found = []
        for number in range(BURST + 5):
            headers = {"Authorization": "Bearer psu_wrong", "X-Forwarded-For": f"203.0.113.{number}"}
            found.append((await client.get("/api/v1/jobs", headers=headers)).status_code)
    assert found[-1] == 429
    async with running(settings_for(tmp_path / "behind", trusted_proxies=["127.0.0.0/8"])) as behind_proxy:
        assert await peer_of(behind_proxy) == "203.0.113.9"


@pytest.mark.asyncio
async def test_token_of_a_projects_administrator_ends_with_his_own(sqlite_server: Server) -> None:
    body = {"name": "ana", "projects": {"vision": "admin"}, "expires_in_s": 3600}
    ana = (await sqlite_server.http.post("/api/v1/tokens", json=body)).json()
    headers = {"Authorization": f"Bearer {ana['token']}"}
    code = (await sqlite_server.http.post("/api/v1/login-codes", headers=headers)).json()["code"]
    async with httpx.AsyncClient(base_url=sqlite_server.url, headers={"Origin": sqlite_server.url}) as browser:
        assert (await browser.post("/api/v1/session", json={"code": code})).status_code == 204
        for client, given in ((sqlite_server.http, headers), (browser, {})):
            ends = []
            for seconds in (None, 60, 1e8):
                asked = {"name": "ci", "projects": {"vision": "runner"}, "expires_in_s": seconds}
                made = await client.post("/api/v1/tokens", json=asked, headers=given)
                assert made.status_code == 201, made.text
                ends.append(made.json()["expires_at"])
            assert ends[0] == ends[2] == ana["expires_at"]
            assert ends[1] < ends[0]


@pytest.mark.asyncio
async def test_the_last_administrators_token_stays(sqlite_server: Server) -> None:
    [own] = (await sqlite_server.http.get("/api/v1/tokens")).json()["items"]
    answer = await sqlite_server.http.delete(f"/api/v1/tokens/{own['id']}")
    assert (answer.status_code, answer.json()["code"]) == (409, "last_admin_token")
    await sqlite_server.token("admin")
    assert (await sqlite_server.http.delete(f"/api/v1/tokens/{own['id']}")).status_code == 204


def test_a_damaged_database_is_one_line_of_advice(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "penstock.db").write_bytes(b"this is no database at all" * 100)
    said = refuse(state, "--port", "0")
    assert "damaged" in said and "backup" in said


@pytest.mark.asyncio
async def test_a_log_beyond_its_quota_is_no_longer_sent(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path, log_quota_bytes=1024)) as server:
        await server.submit()
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await agent.log(replica, 0, b"x" * 1000)
            assert [m["full"] for m in agent.messages if m["type"] == "ack"] == [False]
            await agent.log(replica, 1000, b"x" * 1000)
            assert [m["full"] for m in agent.messages if m["type"] == "ack"][-1]


async def greeted(server: Server, node: tuple[str, str], instance: str) -> Any:
    """Connect an agent; return its socket, once it has sent its hello."""
    ws = await server.connect("/api/v1/agent", node[1])
    hello = {"type": "hello", "version": "1", "boot_id": "b", "replicas": [], "instance": instance}
    await ws.send(json.dumps(hello))
    return ws


@pytest.mark.asyncio
async def test_a_copied_identity_evicts_no_agent(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        first = await greeted(server, node, "one")
        assert json.loads(await first.recv())["type"] == "welcome"
        copy = await greeted(server, node, "two")
        with pytest.raises(ConnectionClosed, match=r"4403.*copied"):
            await copy.recv()
        again = await greeted(server, node, "one")  # the same over another connection
        assert json.loads(await again.recv())["type"] == "welcome"
        clock.advance(server.runtime.settings.lease_ttl_s + 1)
        other = await greeted(server, node, "two")  # that one has been silent: it may have died with its machine
        assert json.loads(await other.recv())["type"] == "welcome"
        for ws in (first, again, other):
            await ws.close()


@pytest.mark.asyncio
async def test_what_is_asked_twice_a_second_reads_no_ended_job(server: Server) -> None:
    """By the plans of both databases, the steps of leases and time limits touch no row of a job that has ended."""
    if not server.runtime.database.is_sqlite:
        return
    questions = (
        "SELECT * FROM replicas JOIN jobs ON jobs.id = replicas.job_id WHERE replicas.state IN ('RUNNING', 'UNKNOWN') "
        "AND jobs.kind = 'managed' AND jobs.state IN ('STOPPING', 'RECOVERING')",
        "SELECT node_id, sum(cpus) FROM replicas WHERE state IN ('RUNNING', 'UNKNOWN') GROUP BY node_id",
        "SELECT id FROM jobs WHERE state IN ('QUEUED', 'RECOVERING') LIMIT 1",
        "SELECT * FROM jobs WHERE state = 'FAILED' AND id < 'x' ORDER BY id DESC LIMIT 51",
        "SELECT * FROM jobs WHERE name = 'n' AND id < 'x' ORDER BY id DESC LIMIT 51",
        "SELECT * FROM events WHERE job_id = 'j' AND id > 'x' ORDER BY id LIMIT 51",
    )
    async with server.runtime.database.read() as session:
        for question in questions:
            plan = [row[3] for row in await session.execute(text(f"EXPLAIN QUERY PLAN {question}"))]
            assert not any(step.startswith("SCAN") or "TEMP B-TREE FOR ORDER BY" in step for step in plan), plan


@pytest.mark.asyncio
async def test_logs_of_an_earlier_attempt_are_found(sqlite_server: Server) -> None:
    job = await sqlite_server.submit(restart={"max_restarts": 1, "on": ["user"]})
    async with sqlite_server.agent(await sqlite_server.join()) as agent:
        for attempt, (state, fields) in enumerate(
            (("EXITED", {"exit_code": 3}), ("EXITED", {"exit_code": 0})), start=1
        ):
            [replica] = await agent.desired(1)
            assert replica["attempt"] == attempt
            await agent.start(replica)
            await agent.log(replica, 0, base64.b16encode(b"%d" % attempt))
            await agent.report(replica, state, **fields)
            await agent.desired(0)
    await sqlite_server.job_in(job["id"], "SUCCEEDED")
    for attempt in (1, 2):
        [one] = (await sqlite_server.http.get(f"/api/v1/replicas?job_id={job['id']}&attempt={attempt}")).json()["items"]
        log = (await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}/logs?replica_id={one['id']}")).json()
        assert log["text"] == base64.b16encode(b"%d" % attempt).decode()
