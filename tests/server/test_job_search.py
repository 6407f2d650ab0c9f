"""The whole list of jobs, on both databases: searched, filtered, ordered and counted by the server, in pages by key."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete, update
from tests.server.harness import Server

from penstock_server.tables import EventRow, JobRow

pytestmark = pytest.mark.asyncio

# name, state, why, what it reported last; oldest first
JOBS: list[tuple[str, str, str, dict[str, float]]] = [
    ("wide", "FAILED", "exit code 3: ValueError: No rows", {"loss": 0.5, "samples_per_s": 10.0}),
    ("deep", "RUNNING", "", {"loss": 0.25, "samples_per_s": 30.5}),
    ("deep", "SUCCEEDED", "", {"loss": 0.1}),
    ("ctr_100%", "QUEUED", "waits for 4 cores", {}),
    ("ctr-1000", "CANCELLED", "cancelled by 'mia'", {"loss": 0.25}),
    ("arc", "FAILED", "pserver 1 was killed", {"samples_per_s": 30.5}),
    ("bus", "STOPPING", "", {"loss": -1.5}),
]
RANK = {"RUNNING": 0, "STOPPING": 0, "FAILED": 1, "QUEUED": 2, "SUCCEEDED": 3, "CANCELLED": 3}


async def made(server: Server) -> list[dict[str, Any]]:
    """Make the jobs, as if they had come to be so; return them oldest first."""
    jobs = []
    for name, state, why, latest in JOBS:
        job = await server.submit(name="job")
        row = {"name": name, "state": state, "why": why, "latest": latest}
        async with server.runtime.database.write() as tx:
            await tx.session.execute(update(JobRow).where(JobRow.id == job["id"]).values(**row))
            tx.effects.schedule = False
        jobs.append({"id": job["id"], **row})
    return jobs


async def found(server: Server, size: int = 200, **parameters: Any) -> list[str]:
    """Return the ids that all pages have, in their order."""
    ids: list[str] = []
    token: dict[str, str] = {}
    while True:
        answer = await server.http.get("/api/v1/jobs", params={**parameters, "page_size": size, **token})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        ids += [job["id"] for job in page["items"]]
        assert len(page["items"]) <= size
        if page["next_page_token"] is None:
            return ids
        token = {"page_token": page["next_page_token"]}


def ordered(jobs: list[dict[str, Any]], order: str) -> list[str]:
    """Return ids in the order that is asked for, by Python."""
    keys: dict[str, Any] = {
        "newest": lambda job: 0,
        "attention": lambda job: RANK[job["state"]],
        "name": lambda job: job["name"],
        "loss": lambda job: job["latest"].get("loss", float("inf")),
        "speed": lambda job: -job["latest"].get("samples_per_s", -1.0),
    }
    newest = jobs[::-1]
    return [job["id"] for job in sorted(newest, key=keys[order])]


async def test_every_order_gives_each_job_once_in_any_pages(server: Server) -> None:
    jobs = await made(server)
    for order in ("newest", "attention", "name", "loss", "speed"):
        for size in (1, 2, 3, 200):
            assert await found(server, size, order=order) == ordered(jobs, order), (order, size)


async def test_words_are_found_anywhere_whatever_their_case(server: Server) -> None:
    jobs = await made(server)

    async def names(words: str, **more: Any) -> list[str]:
        by_id = {job["id"]: job["name"] for job in jobs}
        return [by_id[one] for one in await found(server, words=words, **more)]

    assert await names("valueerror") == ["wide"]
    assert await names("ROWS exit") == ["wide"]
    assert await names("rows killed") == []
    assert await names("100%") == ["ctr_100%"]
    assert await names("r_1") == ["ctr_100%"]
    assert await names("failed", order="name") == ["arc", "wide"]
    assert await names("ed", state="CANCELLED,FAILED", order="attention") == ["arc", "wide", "ctr-1000"]
    assert await names(jobs[2]["id"][-8:]) == ["deep"]
    assert len(await names("  ")) == len(jobs)


async def test_jobs_are_counted_by_state(server: Server) -> None:
    await made(server)

    async def counts(words: str = "") -> dict[str, Any]:
        answer: dict[str, Any] = (await server.http.get("/api/v1/job-counts", params={"words": words})).json()
        return answer

    states = {"FAILED": 2, "RUNNING": 1, "SUCCEEDED": 1, "QUEUED": 1, "CANCELLED": 1, "STOPPING": 1}
    assert await counts() == {"states": states, "total": 7}
    assert await counts("killed") == {"states": {"FAILED": 1}, "total": 1}


async def test_search_that_cannot_be_is_a_problem(sqlite_server: Server) -> None:
    for query, code in (
        ("words=a+b+c+d+e+f+g+h+i", "invalid_request"), ("state=FAILED,", "invalid_request"),
        ("order=cost", "invalid_request"), (f"words={'x' * 201}", "invalid_request"),
    ):  # fmt: skip
        answer = await sqlite_server.http.get(f"/api/v1/jobs?{query}")
        assert (answer.status_code, answer.json()["code"]) == (422, code), query


async def test_page_after_a_removed_job_says_so(sqlite_server: Server) -> None:
    server, jobs = sqlite_server, await made(sqlite_server)
    first = (await server.http.get("/api/v1/jobs?order=loss&page_size=1")).json()
    async with server.runtime.database.write() as tx:
        await tx.session.execute(delete(EventRow).where(EventRow.job_id == jobs[-1]["id"]))
        await tx.session.execute(delete(JobRow).where(JobRow.id == jobs[-1]["id"]))
    token = first["next_page_token"]
    answer = await server.http.get(f"/api/v1/jobs?order=loss&page_size=1&page_token={token}")
    assert (answer.status_code, answer.json()["code"]) == (409, "page_gone")
    assert "not there any more" in answer.json()["detail"]


async def test_a_job_that_ends_between_two_pages_hides_no_other(server: Server) -> None:
    jobs = await made(server)
    for order in ("attention", "loss", "speed"):
        whole = await found(server, order=order)
        first = (await server.http.get("/api/v1/jobs", params={"order": order, "page_size": 2})).json()
        anchor = first["items"][-1]["id"]
        before = next(job for job in jobs if job["id"] == anchor)
        moved = {"state": "SUCCEEDED", "latest": {"loss": 9.0, "samples_per_s": 0.0}}
        async with server.runtime.database.write() as tx:
            await tx.session.execute(update(JobRow).where(JobRow.id == anchor).values(**moved))
            tx.effects.schedule = False
        rest = await found(server, order=order, page_token=first["next_page_token"])
        assert [one for one in rest if one != anchor] == whole[2:], order
        async with server.runtime.database.write() as tx:
            back = {"state": before["state"], "latest": before["latest"]}
            await tx.session.execute(update(JobRow).where(JobRow.id == anchor).values(**back))
            tx.effects.schedule = False
