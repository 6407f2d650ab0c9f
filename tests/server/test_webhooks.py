"""Webhooks: signed, in order, at least once over a SIGKILL; a project's administrator has those of the project."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from tests.server.harness import NO_TLS, FakeClock, Server, running, settings_for
from tests.support.receiver import Receiver, receiving
from tests.support.waiting import LIMIT_S, until, until_answer, until_async

from penstock_server.db import StorageFull
from penstock_server.services.webhookrules import MAX_FAILURES, headers_of, new_secret, pause_after
from penstock_server.tables import WebhookDeliveryRow
from penstock_server.webhooksender import Sender

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


async def add(server: Server, receiver: Receiver, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post("/api/v1/webhooks", json={"url": receiver.url, **fields})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def hook(server: Server) -> dict[str, Any]:
    [found] = (await server.http.get("/api/v1/webhooks")).json()["items"]
    return dict(found)


async def failed(server: Server, count: int) -> dict[str, Any]:
    """Return the only webhook once so many attempts in a row have failed."""
    return await until_answer(lambda: hook(server), lambda one: one["failures"] == count)


async def deliveries(server: Server, webhook_id: str) -> list[dict[str, Any]]:
    answer = await server.http.get(f"/api/v1/webhooks/{webhook_id}/deliveries")
    return list(answer.json()["items"])


async def cancelled(server: Server, **spec: Any) -> str:
    job_id: str = (await server.submit(**spec))["id"]
    await server.http.post(f"/api/v1/jobs/{job_id}:cancel")
    return job_id


@pytest.mark.asyncio
async def test_changes_arrive_signed_and_in_order(migrated_url: str | None, tmp_path: Path) -> None:
    with receiving() as receiver:
        async with running(settings_for(tmp_path, migrated_url, webhook_allow=[LOOPBACK])) as server:
            made = await add(server, receiver, events=["QUEUED", "CANCELLED"], project="vision")
            await server.submit(project="ctr")
            job_id = await cancelled(server, project="vision", name="resnet")
            first, last = (await receiver.received(2))[:2]
            shown = await hook(server)
            assert made["secret"] not in json.dumps([shown, await deliveries(server, made["id"])])
    assert [one["data"]["to"] for one in (first, last)] == ["QUEUED", "CANCELLED"]
    assert last["type"] == "job.state"
    assert (last["data"]["job_id"], last["data"]["name"], last["data"]["project"]) == (job_id, "resnet", "vision")
    headers, body = receiver.got[0]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(made["secret"].removeprefix("whsec_"))
    digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{digest}"


@pytest.mark.asyncio
async def test_failed_delivery_is_repeated_with_its_id_after_a_pause(tmp_path: Path) -> None:
    clock = FakeClock()
    with receiving(503, 302) as receiver:
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK]), clock) as server:
            made = await add(server, receiver)
            await cancelled(server)
            for failures in (1, 2):
                await failed(server, failures)
                assert len(receiver.got) == failures
                clock.advance(10.0)
            await receiver.received(3)

            async def delivery() -> dict[str, Any]:
                [one] = await deliveries(server, made["id"])
                return one

            done = await until_answer(delivery, lambda one: one["delivered_at"] is not None)
            assert (done["attempts"], done["status"]) == (3, 200)
            assert (await hook(server))["failures"] == 0
    assert receiver.ids() == {done["id"]}


@pytest.mark.asyncio
async def test_receiver_that_is_gone_is_disabled_until_enabled(tmp_path: Path) -> None:
    with receiving(410) as receiver:
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK])) as server:
            made = await add(server, receiver)
            await cancelled(server)
            found = await until_answer(lambda: hook(server), lambda one: one["disabled_at"] is not None)
            assert found["reason"] == "disabled: answered with 410"
            await cancelled(server)  # not recorded: the webhook is disabled
            assert len(await deliveries(server, made["id"])) == 1
            refused = await server.http.post(f"/api/v1/webhooks/{made['id']}:test")
            assert (refused.status_code, refused.json()["code"]) == (409, "webhook_disabled")
            await server.http.post(f"/api/v1/webhooks/{made['id']}:enable")
            await receiver.received(2)
            await server.http.post(f"/api/v1/webhooks/{made['id']}:test")
            assert (await receiver.received(3))[2]["type"] == "test"
            await cancelled(server)
            assert (await receiver.received(4))[3]["type"] == "job.state"


@pytest.mark.asyncio
async def test_failures_in_a_row_disable_a_webhook(tmp_path: Path) -> None:
    clock = FakeClock()
    with receiving(*[500] * MAX_FAILURES) as receiver:
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK], lease_ttl_s=1e6), clock) as server:
            await add(server, receiver)
            await cancelled(server)
            for failures in range(1, MAX_FAILURES + 1):
                await failed(server, failures)
                clock.advance(3600.0)
            found = await hook(server)
            assert found["reason"] == f"disabled after {MAX_FAILURES} failures in a row: answered with 500"
            assert found["disabled_at"] is not None
    assert len(receiver.got) == MAX_FAILURES


@pytest.mark.asyncio
async def test_slow_receiver_delays_no_other(tmp_path: Path) -> None:
    with receiving(holds=True) as slow, receiving() as quick:
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK])) as server:
            await add(server, slow)
            await add(server, quick)
            for count in (1, 2, 3):
                await cancelled(server)
                await quick.received(count)
            assert len(slow.got) == 1
            slow.held.set()
            await slow.received(3)


@pytest.mark.asyncio
async def test_stopped_server_waits_for_no_receiver(tmp_path: Path) -> None:
    with receiving(holds=True) as receiver:
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK])) as server:
            await add(server, receiver)
            await cancelled(server)
            await receiver.received(1)
            stopping_at = time.monotonic()
        assert time.monotonic() - stopping_at < 8.0  # an attempt may take 10 s
        receiver.held.set()
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK])):
            await receiver.received(2)
    assert len(receiver.ids()) == 1


@pytest.mark.asyncio
async def test_removed_webhook_stops_no_job(server: Server) -> None:
    with receiving() as receiver:
        server.runtime.webhooks._allowed = [LOOPBACK]
        made = await add(server, receiver, events=["QUEUED"])
        assert (await server.http.delete(f"/api/v1/webhooks/{made['id']}")).status_code == 204
        await server.submit()
        assert (await server.http.get("/api/v1/webhooks")).json() == {"items": []}
        assert (await server.http.get(f"/api/v1/webhooks/{made['id']}/deliveries")).status_code == 404


@pytest.mark.asyncio
async def test_nothing_is_sent_after_a_removal(tmp_path: Path) -> None:
    with receiving(holds=True) as receiver:
        async with running(settings_for(tmp_path, webhook_allow=[LOOPBACK])) as server:
            made = await add(server, receiver)
            for _ in range(3):
                await cancelled(server)
            await receiver.received(1)
            assert (await server.http.delete(f"/api/v1/webhooks/{made['id']}")).status_code == 204
            receiver.held.set()
            await until_async(lambda: not server.runtime.deliveries._busy)
            assert len(receiver.got) == 1


@pytest.mark.asyncio
async def test_nothing_is_sent_while_it_cannot_be_noted(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        runtime = sqlite_server.runtime
        runtime.webhooks._allowed = [LOOPBACK]
        runtime.deliveries._sender = Sender([LOOPBACK])
        made = await add(sqlite_server, receiver, events=["QUEUED"])
        monkeypatch.setattr(runtime.database, "trouble", StorageFull("no space"))
        monkeypatch.setattr(runtime.database, "_trouble_until", time.monotonic() + 3600)
        await sqlite_server.submit()
        await until_async(lambda: runtime.deliveries._troubles.get(made["id"], 0) >= 2)
        assert receiver.got == []
        runtime.database.trouble, runtime.database._trouble_until = None, 0.0
        await receiver.received(1)


@pytest.mark.asyncio
async def test_rolled_back_change_is_not_delivered(sqlite_server: Server) -> None:
    await sqlite_server.http.post("/api/v1/webhooks", json={"url": "https://hooks.invalid/", "events": ["QUEUED"]})
    [made] = (await sqlite_server.http.get("/api/v1/webhooks")).json()["items"]
    answer = await sqlite_server.http.post(
        "/api/v1/jobs", json={"spec": {"name": "j", "entrypoint": ["true"], "snapshot": "0" * 64}}
    )
    assert answer.status_code == 409
    assert await deliveries(sqlite_server, made["id"]) == []
    await sqlite_server.submit()
    assert len(await deliveries(sqlite_server, made["id"])) == 1


@pytest.mark.asyncio
async def test_administrator_of_a_project_has_its_webhooks_alone(sqlite_server: Server) -> None:
    foreign = (await sqlite_server.http.post("/api/v1/webhooks", json={"url": "https://hooks.invalid/"})).json()
    answer = await sqlite_server.http.post(
        "/api/v1/tokens", json={"name": "ana", "projects": {"vision": "admin", "ctr": "viewer"}}
    )
    headers = {"Authorization": f"Bearer {answer.json()['token']}"}
    async with httpx.AsyncClient(base_url=sqlite_server.url, headers=headers, timeout=LIMIT_S, verify=NO_TLS) as ana:
        for project, status in ((None, 403), ("ctr", 403), ("other", 403), ("vision", 201)):
            body = {"url": "https://hooks.invalid/", "project": project}
            assert (await ana.post("/api/v1/webhooks", json=body)).status_code == status, project
        [own] = (await ana.get("/api/v1/webhooks")).json()["items"]
        assert own["project"] == "vision"
        for call in (":test", ":enable"):
            assert (await ana.post(f"/api/v1/webhooks/{foreign['id']}{call}")).status_code == 404
            assert (await ana.post(f"/api/v1/webhooks/{own['id']}{call}")).is_success
        path = f"/api/v1/webhooks/{foreign['id']}"
        assert [(await ana.delete(path)).status_code, (await ana.get(f"{path}/deliveries")).status_code] == [404, 404]
        assert (await ana.delete(f"/api/v1/webhooks/{own['id']}")).status_code == 204
    assert [one["id"] for one in (await sqlite_server.http.get("/api/v1/webhooks")).json()["items"]] == [foreign["id"]]


@pytest.mark.asyncio
async def test_webhooks_of_one_project_are_limited(sqlite_server: Server) -> None:
    body = {"url": "https://hooks.invalid/", "project": "vision"}
    for _ in range(20):
        assert (await sqlite_server.http.post("/api/v1/webhooks", json=body)).status_code == 201
    refused = await sqlite_server.http.post("/api/v1/webhooks", json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "too_many_webhooks")
    assert (await sqlite_server.http.post("/api/v1/webhooks", json={**body, "project": "ctr"})).status_code == 201


@pytest.mark.asyncio
async def test_deliveries_are_retained_for_a_week(migrated_url: str | None, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, migrated_url, lease_ttl_s=1e9), clock) as server:
        body = {"url": "https://hooks.invalid/", "events": ["QUEUED"]}
        await server.http.post("/api/v1/webhooks", json=body)
        await server.submit()
        counts = []
        for days in (6, 2):
            clock.advance(days * 86_400.0)
            await server.runtime.sweeper.step()
            async with server.runtime.database.read() as session:
                number = select(func.count()).select_from(WebhookDeliveryRow)
                counts.append((await session.execute(number)).scalar_one())
    assert counts == [1, 0]


def test_pauses_grow_to_an_hour() -> None:
    pauses = [pause_after(count, 1.0).total_seconds() for count in range(1, MAX_FAILURES)]
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600]
    assert pause_after(1, 0.0).total_seconds() == 2.5


def test_signature_depends_on_secret_and_body() -> None:
    at, secret = datetime(2026, 1, 1, tzinfo=UTC), new_secret()
    one = headers_of("id", "{}", secret, at)
    assert one == headers_of("id", "{}", secret, at)
    assert one["webhook-signature"] != headers_of("id", "{}", new_secret(), at)["webhook-signature"]
    assert one["webhook-signature"] != headers_of("id", "{} ", secret, at)["webhook-signature"]


@dataclass
class Process:
    """A real server process over one folder and database, killed and started again."""

    folder: Path
    database_url: str | None
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> httpx.Client:
        address = self.folder / "server.json"
        address.unlink(missing_ok=True)
        env = {**os.environ, "PENSTOCK_SERVER_WEBHOOK_ALLOW": '["127.0.0.0/8"]'}
        if self.database_url is not None:
            env["PENSTOCK_SERVER_DATABASE_URL"] = self.database_url
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock_server", "--port", "0", "--state-dir", str(self.folder)], env=env
        )
        until(address.exists)
        headers = {"Authorization": f"Bearer {(self.folder / 'admin.token').read_text().strip()}"}
        url = json.loads(address.read_text())["url"]
        http = httpx.Client(base_url=url, headers=headers, verify=NO_TLS, trust_env=False, timeout=LIMIT_S)
        until(lambda: is_ready(http))
        return http

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:  # it does not listen yet
        return False


def cancel_until_killed(http: httpx.Client, answered: list[str]) -> None:
    with suppress(httpx.HTTPError):
        while True:
            made = http.post("/api/v1/jobs", json={"spec": {"name": "j", "entrypoint": ["true"]}}).json()
            http.post(f"/api/v1/jobs/{made['id']}:cancel").raise_for_status()
            answered.append(made["id"])


def test_no_answered_change_is_lost_when_the_server_is_killed(migrated_url: str | None, tmp_path: Path) -> None:
    """The server is killed amid changes and deliveries; the next one delivers what is missing, by the same ids."""
    server, answered = Process(tmp_path / "state", migrated_url), list[str]()
    try:
        with receiving() as receiver:
            with closing(server.start()) as http:
                http.post("/api/v1/webhooks", json={"url": receiver.url}).raise_for_status()
                changing = threading.Thread(target=cancel_until_killed, args=(http, answered))
                changing.start()
                until(lambda: len(answered) >= 10 and receiver.got)
                server.kill()
                changing.join()
            with closing(server.start()):
                until(lambda: {one["data"]["job_id"] for one in receiver.bodies()} >= set(answered))
    finally:
        server.kill()
    jobs = {headers["webhook-id"]: json.loads(body)["data"]["job_id"] for headers, body in receiver.got}
    assert len(jobs) == len(set(jobs.values()))  # a job is CANCELLED once: whatever came twice came with one id


@pytest.mark.asyncio
async def test_task_that_is_cancelled_leaves_no_stale_webhook(sqlite_server: Server) -> None:
    """A client may go while its webhook is removed: jobs must not fail on a row that is not there."""
    for _ in range(5):
        body = {"url": "https://hooks.invalid/", "events": ["QUEUED"]}
        made = (await sqlite_server.http.post("/api/v1/webhooks", json=body)).json()
        await sqlite_server.submit()  # the webhook is cached now
        removing = asyncio.create_task(sqlite_server.runtime.webhooks.remove(made["id"]))
        while not removing.done():
            await asyncio.sleep(0)
            if sqlite_server.runtime.webhooks._enabled is None:
                removing.cancel()
        await asyncio.wait([removing])
        await sqlite_server.submit()
