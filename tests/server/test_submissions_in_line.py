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
        assert {job["why"] for job in behind} == {"waits behind others, the first of which waits for room"}
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


async def test_a_placed_job_changes_only_the_next_that_waits(server: Server) -> None:
    node = await server.join()
    async with server.agent(node) as agent:
        first = await server.submit(trainers={"count": 4})
        [*replicas] = await agent.desired(4)
        waiting = [await server.submit(name=f"waiting-{number}", trainers={"count": 4}) for number in range(6)]
        await server.runtime.scheduling.run()
        versions = {job["id"]: (await server.job(job["id"]))["version"] for job in waiting}
        for replica in replicas:
            await agent.report(replica, "RUNNING")
        for replica in replicas:
            await agent.report(replica, "EXITED", exit_code=0)
        await server.job_in(first["id"], "SUCCEEDED")
        await server.job_in(waiting[0]["id"], "STARTING")
        changed = [job["id"] for job in waiting if (await server.job(job["id"]))["version"] != versions[job["id"]]]
        assert set(changed) <= {waiting[0]["id"], waiting[1]["id"]}


async def test_what_makes_no_room_wakes_no_scheduler(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    async with sqlite_server.agent(node) as agent:
        job = await sqlite_server.submit()
        [replica] = await agent.desired(1)
        seen: list[tuple[set[str], bool]] = []
        forward = sqlite_server.runtime.database.on_commit

        def on_commit(effects: Effects) -> None:
            seen.append(({event.to_state for event in effects.events}, effects.schedule))
            forward(effects)

        sqlite_server.runtime.database.on_commit = on_commit
        await agent.report(replica, "PREPARING")
        await agent.report(replica, "RUNNING")
        await sqlite_server.job_in(job["id"], "RUNNING")
        await agent.report(replica, "EXITED", exit_code=0)
        await sqlite_server.job_in(job["id"], "SUCCEEDED")
        assert {state: wakes for states, wakes in seen for state in states} == {
            "PREPARING": False, "RUNNING": False, "EXITED": True, "STOPPING": True, "SUCCEEDED": True,
        }  # fmt: skip
