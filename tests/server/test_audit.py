"""The audit log: one row for each change, in its transaction; refused guesses in bounded rows; no secret in any."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from sqlalchemy import func, select
from tests.server.harness import FakeClock, Server, running, settings_for

from penstock.command.audit import since_time
from penstock_server.acting import Request
from penstock_server.auth.wrong import BURST
from penstock_server.services.audit import MAX_PEERS, Audit
from penstock_server.tables import AuditRow, JobRow

DAY_S = 86_400.0
GZIP = {"Content-Type": "application/gzip"}
CHANGES_NOTHING = {
    "planJob": "nothing is reserved or stored",
    "reportPilots": "repeated by `penstock cluster` every few seconds; kept in memory until the next report",
}
SEEN_ELSEWHERE = {
    "takeJobStacks": "an agent has to answer: test_python_stacks.py looks at its rows",
    "recordJob": "a process has to run: test_full_recordings.py looks at its rows",
}
Call = Callable[[], Awaitable[httpx.Response]]


async def entries(server: Server, **params: Any) -> list[dict[str, Any]]:
    answer = await server.http.get("/api/v1/audit", params=params)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


class Changes:
    """A call of each operation that changes something, by its id in the OpenAPI document."""

    def __init__(self, server: Server) -> None:
        self._http, self.secrets = server.http, [server.admin]

    async def _made(self, path: str, field: str, **body: Any) -> tuple[str, str]:
        made = (await self._http.post(path, json=body or None)).json()
        self.secrets.append(made[field])
        return made.get("id", ""), made[field]

    async def calls(self, node_id: str) -> dict[str, Call]:
        post, put, delete = self._http.post, self._http.put, self._http.delete
        spec = {"spec": {"name": "j", "entrypoint": ["true"], "env": {"API_TOKEN": "hidden-in-env"}}}
        job = (await post("/api/v1/jobs", json=spec)).json()["id"]
        token_id, _ = await self._made("/api/v1/tokens", "token", name="t", scopes=["read"])
        _, join = await self._made("/api/v1/join-tokens", "token")
        _, code = await self._made("/api/v1/login-codes", "code")
        hook, _ = await self._made("/api/v1/webhooks", "secret", url="https://hooks.example.org/")
        joins = {"join_token": join, "name": "n2", "host": "h2", "cpus": 1, "memory_bytes": 1}
        return {
            "submitJob": lambda: post("/api/v1/jobs", json=spec),
            "cancelJob": lambda: post(f"/api/v1/jobs/{job}:cancel"),
            "planJob": lambda: post("/api/v1/jobs:plan", json=spec),
            "setProject": lambda: put("/api/v1/projects/vision", json={"share": 2.0}),
            "createWebhook": lambda: post("/api/v1/webhooks", json={"url": "https://hooks.example.org/"}),
            "enableWebhook": lambda: post(f"/api/v1/webhooks/{hook}:enable"),
            "testWebhook": lambda: post(f"/api/v1/webhooks/{hook}:test"),
            "removeWebhook": lambda: delete(f"/api/v1/webhooks/{hook}"),
            "cordonNode": lambda: post(f"/api/v1/nodes/{node_id}:cordon"),
            "uncordonNode": lambda: post(f"/api/v1/nodes/{node_id}:uncordon"),
            "drainNode": lambda: post(f"/api/v1/nodes/{node_id}:drain"),
            "reportPilots": lambda: put("/api/v1/clusters/c/pilots", json={"pilots": []}),
            "uploadSnapshot": lambda: post("/api/v1/snapshots", content=b"\x1f\x8babc", headers=GZIP),
            "createToken": lambda: post("/api/v1/tokens", json={"name": "u", "scopes": ["read"]}),
            "createJoinToken": lambda: post("/api/v1/join-tokens"),
            "createLoginCode": lambda: post("/api/v1/login-codes"),
            "joinNode": lambda: post("/api/v1/nodes", json=joins, headers={"Authorization": ""}),
            "revokeToken": lambda: delete(f"/api/v1/tokens/{token_id}"),
            "openSession": lambda: post("/api/v1/session", json={"code": code}, headers={"Authorization": ""}),
            "closeSession": self._close_session,
        }

    async def _close_session(self) -> httpx.Response:
        self._http.headers.pop("Authorization")  # the cookie of openSession is what asks
        try:
            return await self._http.delete("/api/v1/session", headers={"Origin": str(self._http.base_url).rstrip("/")})
        finally:
            self._http.headers["Authorization"] = f"Bearer {self.secrets[0]}"


def described(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {
        operation["operationId"]: (method.upper(), path)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method != "get"
    }


@pytest.mark.asyncio
async def test_each_call_that_changes_leaves_one_row(server: Server) -> None:
    operations = described((await server.http.get("/openapi.json")).json())
    node_id, node_token = await server.join()
    changes = Changes(server)
    calls = await changes.calls(node_id)
    assert set(calls) | set(SEEN_ELSEWHERE) == set(operations), "a call that changes something has no case here"
    answers = {name: await call() for name, call in calls.items()}
    found = await entries(server, page_size=200)
    for name, answer in answers.items():
        assert answer.is_success, (name, answer.text)
        changes.secrets += [*answer.cookies.values(), *re.findall(r"ps[a-z]_[\w-]{43}", answer.text)]
        rows = [entry for entry in found if entry["request_id"] == answer.headers["X-Request-Id"]]
        if name in CHANGES_NOTHING:
            assert rows == [], name
            continue
        [row] = rows
        assert (row["method"], row["route"]) == operations[name]
        assert (row["status"], row["peer"], row["count"]) == (answer.status_code, "127.0.0.1", 1)
        assert row["subject"], name
        assert row["token_id"] and row["token_name"], name
    assert len({entry["request_id"] for entry in found}) == len(found)
    text = json.dumps(found)
    for secret in [*changes.secrets, node_token, "hidden-in-env"]:
        assert len(secret) > 8 and secret not in text


@pytest.mark.asyncio
async def test_what_changes_nothing_leaves_no_row(sqlite_server: Server) -> None:
    http, key = sqlite_server.http, {"Idempotency-Key": "k"}
    spec = {"spec": {"name": "j", "entrypoint": ["true"]}}
    reader = {"Authorization": f"Bearer {await sqlite_server.token('read')}"}
    first = (await http.post("/api/v1/jobs", json=spec, headers=key)).json()["id"]
    before = await entries(sqlite_server)
    refused = [
        await http.post("/api/v1/jobs", json=spec, headers=reader),
        await http.post("/api/v1/jobs/nowhere:cancel"),
        await http.post(f"/api/v1/jobs/{first}:cancel", headers={"If-Match": '"999"'}),
        await http.put("/api/v1/projects/vision", json={"share": -1}),
        await http.delete(f"/api/v1/tokens/{sqlite_server.admin}"),
    ]
    assert [answer.status_code for answer in refused] == [403, 404, 412, 422, 404]
    assert (await http.post("/api/v1/jobs", json=spec, headers=key)).json()["id"] == first
    assert await entries(sqlite_server) == before


@pytest.mark.asyncio
async def test_a_change_and_its_row_are_stored_together(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Request, subject: str) -> AuditRow:
        raise OSError("no row")

    monkeypatch.setattr(Request, "row", broken)
    assert (
        await sqlite_server.http.post("/api/v1/jobs", json={"spec": {"name": "j", "entrypoint": ["true"]}})
    ).is_error
    async with sqlite_server.runtime.database.read() as session:
        assert (await session.execute(select(func.count()).select_from(JobRow))).scalar_one() == 0


@pytest.mark.asyncio
async def test_wrong_tokens_beyond_the_limit_are_one_row(server: Server) -> None:
    guess = {"Authorization": "Bearer psu_guess-of-a-token"}
    answers = [(await server.http.get("/api/v1/jobs", headers=guess)).status_code for _ in range(BURST + 5)]
    refused = answers.count(429)
    assert refused >= 2
    await server.runtime.audit.step()
    found = [entry for entry in await entries(server) if entry["status"] == 429]
    assert sum(entry["count"] for entry in found) == refused
    assert len(found) <= 2  # the loop may have taken the first of them
    assert {(entry["peer"], entry["route"], entry["token_id"]) for entry in found} == {
        ("127.0.0.1", "/api/v1/jobs", None)
    }
    assert "guess" not in json.dumps(found)


@pytest.mark.asyncio
async def test_many_guessing_peers_make_a_bounded_number_of_rows(sqlite_server: Server, clock: FakeClock) -> None:
    audit = Audit(sqlite_server.runtime.database)
    for number in range(MAX_PEERS + 7):
        audit.refuse(Request(clock.now(), f"peer-{number}", "GET", "/api/v1/jobs", 429, "r"))
    await audit.step()
    async with sqlite_server.runtime.database.read() as session:
        rows = (await session.execute(select(AuditRow))).scalars().all()
    assert len(rows) == MAX_PEERS + 1
    assert [row.count for row in rows if row.peer == ""] == [7]


@pytest.mark.asyncio
async def test_pages_and_filters_of_the_audit_log(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        for number in range(5):  # two at one time, so that the id decides
            await server.http.put(f"/api/v1/projects/p{number}", json={})
            clock.advance(60.0 * (number % 2))
        start = FakeClock().now().timestamp()
        seen: list[str] = []
        token: str | None = None
        while True:
            params: dict[str, Any] = {"page_size": 2, **({"page_token": token} if token else {})}
            page = (await server.http.get("/api/v1/audit", params=params)).json()
            seen += [entry["subject"] for entry in page["items"]]
            token = page["next_page_token"]
            if token is None:
                break
            await server.http.put("/api/v1/projects/newer", json={})  # pages do not shift
        assert seen == ["p4", "p3", "p2", "p1", "p0"]

        async def subjects(**params: Any) -> list[str]:
            return [entry["subject"] for entry in await entries(server, **params)]

        assert await subjects(subject="p3") == ["p3"]
        assert await subjects(until_s=start + 60.0) == ["p1", "p0"]
        assert await subjects(since_s=start + 60.0, until_s=start + 120.0) == ["p3", "p2"]
        [one] = await entries(server, subject="p3", token="admin")
        assert [entry["id"] for entry in await entries(server, subject="p3", token=one["token_id"])] == [one["id"]]
        assert await subjects(token="nobody") == []
        assert await subjects(page_token="A" * 21 + "A") == []  # of a row whose retention is over
        reader = {"Authorization": f"Bearer {await server.token('submit', 'read')}"}
        assert (await server.http.get("/api/v1/audit", headers=reader)).status_code == 403


@pytest.mark.asyncio
async def test_audit_rows_go_after_their_retention(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, database_url, retain_audit_days=2.0), clock) as server:
        await server.http.put("/api/v1/projects/old", json={})
        clock.advance(1.5 * DAY_S)
        await server.http.put("/api/v1/projects/new", json={})
        await server.runtime.sweeper.step()
        assert [entry["subject"] for entry in await entries(server)] == ["new", "old"]
        clock.advance(DAY_S)
        await server.runtime.sweeper.step()
        assert [entry["subject"] for entry in await entries(server)] == ["new"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 1_000_000.0 - 5400), ("7d", 1_000_000.0 - 7 * DAY_S), ("1970-01-02", DAY_S), ("99999d", 0.0),
     ("1970-01-02T01:00:00+01:00", DAY_S)],
)  # fmt: skip
def test_since_takes_an_age_or_a_time(text: str, seconds: float) -> None:
    assert since_time(text, 1_000_000.0) == seconds


def test_since_of_neither_age_nor_time_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="neither an age"):
        since_time("yesterday", 0.0)
