"""Recording in full on request: which agents are asked, and what is said of those that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.harness import FakeAgent, Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio


async def record(server: Server, job: dict[str, Any], token: str | None = None, **params: Any) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return await server.http.post(f"/api/v1/jobs/{job['id']}:record", headers=headers, params=params)


async def started(server: Server, agent: FakeAgent, job: dict[str, Any]) -> dict[str, Any]:
    [replica] = await agent.desired(1)
    await agent.start(replica)
    await until_answer(lambda: server.job(job["id"]), lambda found: found["replicas"][0]["state"] == "RUNNING")
    return replica


def orders(agent: FakeAgent) -> list[dict[str, Any]]:
    return [message for message in agent.messages if message["type"] == "record"]


async def test_the_agent_of_a_running_process_is_asked(sqlite_server: Server) -> None:
    server, job = sqlite_server, await sqlite_server.submit()
    async with server.agent(await server.join(), records=True) as agent:
        assert (await record(server, job)).json()["code"] == "replica_not_running"
        replica = await started(server, agent, job)
        answer = await record(server, job, seconds=7)
        assert answer.status_code == 202, answer.text
        found = answer.json()
        [process] = found["processes"]
        assert (found["seconds"], process["role"], process["index"], process["error"]) == (7, "trainer", 0, "")

        async def asked() -> list[dict[str, Any]]:
            return orders(agent)

        assert await until_answer(asked, bool) == [
            {"type": "record", "replica_id": replica["replica_id"], "seconds": 7}
        ]
    items = (await server.http.get(f"/api/v1/audit?subject={job['id']}")).json()["items"]
    assert len([one for one in items if one["route"].endswith(":record")]) == 1


async def test_an_older_agent_gets_no_unknown_message(sqlite_server: Server) -> None:
    server, job = sqlite_server, await sqlite_server.submit()
    async with server.agent(await server.join()) as agent:
        await started(server, agent, job)
        answer = await record(server, job)
        assert (answer.status_code, answer.json()["code"]) == (409, "not_recorded")
        assert "update Penstock there" in answer.json()["detail"]
        assert orders(agent) == []


async def test_what_cannot_be_recorded_is_said(sqlite_server: Server) -> None:
    server, job = sqlite_server, await sqlite_server.submit()
    async with server.agent(await server.join(), records=True) as agent:
        await started(server, agent, job)

    async def links() -> list[object]:
        return list(server.runtime.agents.all())

    await until_answer(links, lambda found: not found)
    assert "not connected" in (await record(server, job)).json()["detail"]
    async with server.attached("by-hand") as trainer:
        attached = await server.job(trainer.registered["job_id"])
        assert "started by hand" in (await record(server, attached)).json()["detail"]
    for seconds in (0, 31):
        assert (await record(server, job, seconds=seconds)).status_code == 422
    assert (await record(server, job, await server.token("read"))).status_code == 403
