"""Requests that wait for a change, and writes that name the version or the request that they belong to."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio

LONG_S = 60


async def waits(server: Server, job_id: str, **params: Any) -> asyncio.Task[httpx.Response]:
    """Send a request that waits; return it once the server has it."""
    asked = asyncio.create_task(server.http.get(f"/api/v1/jobs/{job_id}", params={"wait": LONG_S, **params}))

    async def is_waiting() -> bool:
        return job_id in server.runtime.changes.jobs()

    await until_answer(is_waiting, bool)
    return asked


async def test_wait_answers_when_the_job_ends(server: Server) -> None:
    job = await server.submit()
    asked = await waits(server, job["id"])
    await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
    answer = (await asked).json()
    assert answer["state"] == "CANCELLED"
    assert server.runtime.changes.jobs() == set()


async def test_wait_since_a_version_answers_at_the_next(sqlite_server: Server) -> None:
    node = await sqlite_server.join()
    job = await sqlite_server.submit()
    await sqlite_server.runtime.scheduling.run()  # says why it waits, which is a change, too
    job = await sqlite_server.job(job["id"])
    asked = await waits(sqlite_server, job["id"], since=job["version"])
    async with sqlite_server.agent(node):
        answer = (await asked).json()
    assert answer["version"] > job["version"]
    assert answer["state"] != "CANCELLED"


async def test_wait_of_a_changed_job_answers_at_once(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    answer = await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}", params={"wait": LONG_S, "since": 0})
    assert answer.json()["id"] == job["id"]
    assert answer.headers["ETag"] == f'"{answer.json()["version"]}"'


async def test_wait_ends_with_its_time_and_with_the_server(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    answer = await sqlite_server.http.get(f"/api/v1/jobs/{job['id']}", params={"wait": 0.05})
    assert answer.json()["state"] == "QUEUED"
    asked = await waits(sqlite_server, job["id"])
    sqlite_server.runtime.changes.close()
    assert (await asked).json()["state"] == "QUEUED"


async def test_wait_for_a_job_that_is_not_there_is_404(sqlite_server: Server) -> None:
    answer = await sqlite_server.http.get("/api/v1/jobs/no-such-job", params={"wait": LONG_S})
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")


async def test_wait_for_a_log_answers_when_it_grows_or_ends(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    async with sqlite_server.agent(await sqlite_server.join()) as agent:
        [order] = await agent.desired(1)
        await agent.start(order)
        await sqlite_server.job_in(job["id"], "RUNNING")
        path = f"/api/v1/jobs/{job['id']}/logs"

        async def awaits(offset: int) -> asyncio.Task[httpx.Response]:
            params = {"replica_id": order["replica_id"], "offset": offset, "wait": LONG_S}
            asked = asyncio.create_task(sqlite_server.http.get(path, params=params))

            async def is_waiting() -> bool:
                return job["id"] in sqlite_server.runtime.log_changes.jobs()

            await until_answer(is_waiting, bool)
            return asked

        asked = await awaits(0)
        await agent.log(order, 0, b"hello\n")
        piece = (await asked).json()
        assert (piece["text"], piece["next_offset"], piece["eof"]) == ("hello\n", 6, False)
        asked = await awaits(6)
        await agent.report(order, "EXITED", exit_code=0)
        piece = (await asked).json()
        assert (piece["text"], piece["eof"]) == ("", True)
    again = await sqlite_server.http.get(path, params={"offset": 6, "wait": LONG_S})
    assert again.json()["eof"] is True, "what has ended is not waited for"


async def test_cancel_of_a_job_that_changed_is_refused(server: Server) -> None:
    job = await server.submit()
    path = f"/api/v1/jobs/{job['id']}:cancel"
    await server.runtime.scheduling.run()  # says why it waits, which is a change, too
    current = (await server.http.get(f"/api/v1/jobs/{job['id']}")).headers["ETag"]
    stale = await server.http.post(path, headers={"If-Match": '"999"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "version_mismatch")
    assert (await server.job(job["id"]))["state"] == "QUEUED"
    assert (await server.http.post(path, headers={"If-Match": current})).status_code == 202


async def test_each_change_of_what_has_changed_is_refused(server: Server) -> None:
    node_id, _ = await server.join()
    token_id = (await server.http.post("/api/v1/tokens", json={"name": "t", "role": "viewer"})).json()["id"]
    changes = {
        f"/api/v1/nodes/{node_id}": [("POST", f"/api/v1/nodes/{node_id}:{verb}") for verb in ("cordon", "drain")],
        "/api/v1/projects/vision": [("PUT", "/api/v1/projects/vision")],
        f"/api/v1/tokens/{token_id}": [("DELETE", f"/api/v1/tokens/{token_id}")],
    }
    for resource, calls in changes.items():
        for method, path in calls:
            body = {"share": 2.0} if method == "PUT" else None
            stale = await server.http.request(method, path, json=body, headers={"If-Match": '"999"'})
            assert (stale.status_code, stale.json()["code"]) == (412, "version_mismatch"), path
            assert stale.json()["hint"] == "look at it again, and decide anew"
            seen = await server.http.get(resource)
            assert seen.headers["ETag"] == f'"{seen.json()["etag"]}"'
            done = await server.http.request(method, path, json=body, headers={"If-Match": seen.headers["ETag"]})
            assert done.is_success, (path, done.text)
            after = await server.http.get(resource)
            assert after.headers["ETag"] != seen.headers["ETag"], path
            again = await server.http.request(method, path, json=body, headers={"If-Match": seen.headers["ETag"]})
            assert again.status_code == 412, path


async def test_a_projects_tag_is_of_its_terms(sqlite_server: Server) -> None:
    before = (await sqlite_server.http.get("/api/v1/projects/vision")).headers["ETag"]
    await sqlite_server.submit(project="vision")
    listed = {one["name"]: one for one in (await sqlite_server.http.get("/api/v1/projects")).json()["items"]}
    assert (f'"{listed["vision"]["etag"]}"', listed["vision"]["waiting"]) == (before, 1)


async def test_calls_that_change_a_resource_take_if_match(sqlite_server: Server) -> None:
    document = (await sqlite_server.http.get("/openapi.json")).json()
    without = {
        "submitJob", "planJob", "createToken", "createJoinToken", "createLoginCode", "openSession", "closeSession",
        "joinNode", "uploadSnapshot", "reportPilots", "takeJobStacks", "recordJob",
        "createWebhook", "removeWebhook", "enableWebhook", "testWebhook",
    }  # fmt: skip
    for path, item in document["paths"].items():
        for method, operation in item.items():
            names = {one["name"] for one in operation.get("parameters", ())}
            wanted = method != "get" and operation["operationId"] not in without
            assert ("If-Match" in names) == wanted or "if-match" in names, (method, path)
            assert not wanted or "412" in operation["responses"], path
