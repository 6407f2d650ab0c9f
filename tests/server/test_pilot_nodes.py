"""Nodes that are there for a while: what is placed on them, and how they leave."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock_server.services.pilots import Stay, takes


@pytest.mark.parametrize(
    ("stay", "max_duration_s", "expected"),
    [
        (Stay(), None, True),
        (Stay(seconds_left=100.0), None, True),
        (Stay(seconds_left=100.0), 100.0, True),
        (Stay(seconds_left=100.0), 101.0, False),
        (Stay(seconds_left=0.0), None, False),
        (Stay(leaving=True), None, False),
        (Stay(once=True), None, True),
        (Stay(once=True, job_id="mine"), None, True),
        (Stay(once=True, job_id="other"), None, False),
    ],
)
def test_job_goes_to_a_pilot_whose_terms_hold_it(stay: Stay, max_duration_s: float | None, expected: bool) -> None:
    assert takes(stay, "mine", max_duration_s) is expected


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Server, FakeClock]]:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server:
        yield server, clock


async def node_in(server: Server, state: str) -> dict[str, Any]:
    async def nodes() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await server.http.get("/api/v1/nodes")).json()["items"]
        return found

    return (await until_answer(nodes, lambda found: bool(found) and found[0]["state"] == state))[0]


@pytest.mark.asyncio
async def test_second_job_waits_though_a_once_pilot_has_room(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    async with server.agent(await server.join(cpus=8), pilot={"once": True}) as agent:
        first = await server.submit(name="first")
        (replica,) = await agent.desired(1)
        second = await server.submit(name="second")
        job = await until_answer(lambda: server.job(second["id"]), lambda job: bool(job["why"]))
        assert job["state"] == "QUEUED"
        await agent.start(replica)
        await agent.report(replica, "EXITED", exit_code=0)
        await server.job_in(first["id"], "SUCCEEDED")
        assert (await server.job(second["id"]))["state"] == "QUEUED"


@pytest.mark.asyncio
async def test_job_longer_than_the_pilot_is_not_placed_there(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    async with server.agent(await server.join(), pilot={"seconds_left": 100.0}) as agent:
        clock.advance(10.0)
        long = await server.submit(name="long", max_duration_s=91)
        await server.submit(name="short", max_duration_s=90)
        (replica,) = await agent.desired(1)
        assert replica["job_name"] == "short"
        waiting = await server.job(long["id"])
        assert waiting["state"] == "QUEUED"
        assert "max_duration_s" in waiting["why"]


@pytest.mark.asyncio
async def test_nothing_is_placed_after_a_leaving_heartbeat(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    node = await server.join()
    async with server.agent(node, pilot={"seconds_left": 100.0}) as agent:
        await agent.send(type="beat", leaving="the time of this pilot is over")
        await until_answer(agent.count_leases, bool)
        assert (await node_in(server, "DRAINED"))["name"] == "n1"
        job = await server.submit()
        job = await until_answer(lambda: server.job(job["id"]), lambda job: bool(job["why"]))
        assert job["state"] == "QUEUED"
    assert await node_in(server, "DOWN"), "its agent said so: no lease has to expire"


@pytest.mark.asyncio
async def test_preempted_replica_costs_its_job_no_restart(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    async with server.agent(await server.join(), pilot={"seconds_left": 100.0}) as agent:
        job = await server.submit(restart={"max_restarts": 0})
        (replica,) = await agent.desired(1)
        await agent.start(replica)
        await agent.send(type="beat", leaving="the time of this pilot is over")
        await agent.report(replica, "KILLED", detail="preempted: the time of this pilot is over")
        again = await server.job_in(job["id"], "RECOVERING")
        assert again["restarts"] == 0
        assert again["reason"] == "preempted"


@pytest.mark.asyncio
async def test_job_ends_when_its_attempt_takes_too_long(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    async with server.agent(await server.join()) as agent:
        job = await server.submit(max_duration_s=3)
        (replica,) = await agent.desired(1)
        await agent.start(replica)
        await server.job_in(job["id"], "RUNNING")
        clock.advance(3.5)
        assert await agent.desired(0) == []
        await agent.report(replica, "KILLED", detail="stopped")
        ended = await server.job_in(job["id"], "FAILED")
        assert ended["reason"] == "max_duration"
        assert "max_duration_s" in ended["why"]


@pytest.mark.asyncio
async def test_reusable_token_lets_pilots_join_until_revoked(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    made = (await server.http.post("/api/v1/join-tokens", json={"expires_in_s": 9e5, "reusable": True})).json()

    async def join(host: str) -> tuple[int, str]:
        body = {
            "join_token": made["token"],
            "name": "slurm-0",
            "host": host,
            "cpus": 1,
            "memory_bytes": 1,
            "pilot": True,
        }
        answer = await server.http.post("/api/v1/nodes", json=body, headers={"Authorization": ""})
        return answer.status_code, answer.json().get("node_id", "")

    first, second = await join("a"), await join("b")
    assert first[0] == second[0] == 201
    assert first[1] == second[1], "a pilot of the same name has the same node, on whatever host"
    assert (await server.http.delete(f"/api/v1/tokens/{made['id']}")).status_code == 204
    assert (await join("c"))[0] == 401


@pytest.mark.asyncio
async def test_pilots_are_shown_as_reported_and_age(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    pilots = [{"name": "slurm-0-0", "state": "PENDING", "reason": "waits in Slurm: Resources"}]
    assert (await server.http.put("/api/v1/clusters/slurm/pilots", json={"pilots": pilots})).status_code == 200
    (shown,) = (await server.http.get("/api/v1/pilots")).json()["items"]
    assert shown == {"cluster": "slurm", **pilots[0]}
    clock.advance(61.0)
    (shown,) = (await server.http.get("/api/v1/pilots")).json()["items"]
    assert "reported 61 s ago" in shown["reason"]
    await server.http.put("/api/v1/clusters/slurm/pilots", json={"pilots": []})
    assert (await server.http.get("/api/v1/pilots")).json()["items"] == []
