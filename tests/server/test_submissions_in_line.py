"""A job that is submitted behind others that wait for room costs no pass of the scheduler."""

from __future__ import annotations

import pytest
from tests.server.harness import Server

from penstock_server.db import Effects

pytestmark = pytest.mark.asyncio


def passes_for(server: Server) -> dict[str, bool]:
    """Whether the first commit that changes a job wakes the scheduler, for each job from now on."""
    wakes: dict[str, bool] = {}
    forward = server.runtime.database.on_commit

    def on_commit(effects: Effects) -> None:
        for job_id in effects.jobs:
            wakes.setdefault(job_id, effects.schedule)
        forward(effects)

    server.runtime.database.on_commit = on_commit
    return wakes


async def test_flaw_15_submission_behind_others_wakes_no_scheduler(server: Server) -> None:
    node = await server.join()
    wakes = passes_for(server)
    async with server.agent(node) as agent:
        first = await server.submit(trainers={"count": 4})
        await agent.desired(4)
        head = await server.submit(name="head", trainers={"count": 4})
        await server.runtime.scheduling.run()
        behind = [await server.submit(name=f"behind-{number}") for number in range(5)]
        assert {job["why"] for job in behind} == {"waits behind job 'head', which waits for room"}
        assert [wakes[job["id"]] for job in (first, head, *behind)] == [True, True, *[False] * 5]
        await server.http.post(f"/api/v1/jobs/{head['id']}:cancel")
        await server.http.post(f"/api/v1/jobs/{first['id']}:cancel")
        for replica in await agent.get_desired():
            await agent.report(replica, "KILLED", signal=15)
        for job in behind[:4]:
            await server.job_in(job["id"], "STARTING")


async def test_first_submission_after_the_line_is_gone_is_looked_at(sqlite_server: Server) -> None:
    first = await sqlite_server.submit()
    await sqlite_server.runtime.scheduling.run()
    second = await sqlite_server.submit()
    assert second["why"] == (await sqlite_server.job(first["id"]))["why"]
    assert "none is READY" in second["why"]
    for job in (first, second):
        await sqlite_server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
    await sqlite_server.runtime.scheduling.run()
    wakes = passes_for(sqlite_server)
    third = await sqlite_server.submit()
    assert wakes[third["id"]]
