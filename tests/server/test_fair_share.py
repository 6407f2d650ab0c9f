"""Priorities, fair share and quotas: the decision by properties, and the scheduler that applies it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.harness import FakeAgent, Server
from tests.support.waiting import until_answer

from penstock_server.services.fairness import Head, Line, Terms, Turns, Use, capacity_of, over_quota
from penstock_server.services.placement import Chosen, Need, Room, place, take

PROJECTS = ("a", "b", "c")


@dataclass(frozen=True)
class Asked:
    """A job that waits. `number`: of its submission."""

    number: int
    project: str
    priority: int
    cpus: int

    @property
    def head(self) -> Head:
        return Head(self.project, self.priority, f"{self.number:04d}")

    @property
    def needs(self) -> list[Need]:
        return [Need("trainer", 0, (self.cpus, 0, 1))]


def room(cpus: int) -> Room:
    return Room("n", "n", (cpus, 0, 1000), (cpus, 0, 1000))


def place_all(jobs: list[Asked], cpus: int, terms: dict[str, Terms], used: dict[str, Use]) -> tuple[list[Asked], Line]:
    """One pass, as the scheduler makes it, over plain data."""
    lines = {
        project: sorted((job for job in jobs if job.project == project), key=lambda job: (-job.priority, job.number))
        for project in PROJECTS
    }
    turns = Turns([line[0].head for line in lines.values() if line], used, terms, (cpus, 0, 1000))
    rooms, placed = [room(cpus)], []
    while (head := turns.next()) is not None:
        job = lines[head.project].pop(0)
        following = lines[head.project][0].head if lines[head.project] else None
        quota = turns.over_quota(job.project, job.needs)
        if quota is not None:
            turns.follow(job.project, following if quota.forever else None)
            continue
        answer = place(job.needs, rooms)
        turns.follow(job.project, following)
        if isinstance(answer, Chosen):
            rooms = take(rooms, job.needs, answer)
            turns.place(job.project, job.needs)
            placed.append(job)
        elif not answer.forever:
            return placed, Line(blocked=(head, "behind"), burdens=turns.burdens())
    return placed, Line(burdens=turns.burdens())


def jobs_of(pairs: list[tuple[str, int, int]]) -> list[Asked]:
    return [Asked(number, *pair) for number, pair in enumerate(pairs)]


JOBS = st.lists(st.tuples(st.sampled_from(PROJECTS), st.integers(-2, 2), st.integers(1, 4)), max_size=20).map(jobs_of)
TERMS = st.dictionaries(
    st.sampled_from(PROJECTS),
    st.builds(
        Terms, share=st.sampled_from([0.5, 1.0, 2.0]), max_cpus=st.none() | st.integers(0, 8),
        max_jobs=st.none() | st.integers(0, 4),
    ),
)  # fmt: skip


@given(JOBS, TERMS, st.integers(1, 30))
def test_no_project_exceeds_its_quota(jobs: list[Asked], terms: dict[str, Terms], cpus: int) -> None:
    placed, _ = place_all(jobs, cpus, terms, {})
    assert sum(job.cpus for job in placed) <= cpus
    for project, given_ in terms.items():
        mine = [job for job in placed if job.project == project]
        assert given_.max_jobs is None or len(mine) <= given_.max_jobs
        assert given_.max_cpus is None or sum(job.cpus for job in mine) <= given_.max_cpus


@given(JOBS, st.integers(4, 30))
def test_lower_priority_never_goes_first_in_a_project(jobs: list[Asked], cpus: int) -> None:
    placed, _ = place_all(jobs, cpus, {}, {})
    for project in PROJECTS:
        keys = [(-job.priority, job.number) for job in placed if job.project == project]
        left = [(-j.priority, j.number) for j in jobs if j.project == project and j not in placed]
        assert keys == sorted(keys)
        assert not keys or not left or keys[-1] < min(left)


@given(st.lists(st.sampled_from(PROJECTS), max_size=60), TERMS, st.integers(1, 40))
def test_projects_get_their_shares_of_equal_jobs(order: list[str], terms: dict[str, Terms], cpus: int) -> None:
    shares = {project: Terms(share=one.share) for project, one in terms.items()}
    jobs = [Asked(number, project, 0, 1) for number, project in enumerate(order)]
    placed, _ = place_all(jobs, cpus, shares, {})
    count = Counter(job.project for job in placed)
    waiting = {job.project for job in jobs if job not in placed}

    def per_share(project: str, more: int = 0) -> float:
        return (count[project] + more) / shares.get(project, Terms()).share

    for project in waiting:  # nobody is ahead of one that waits by more than the job that brought it there
        assert all(per_share(other, -1) <= per_share(project) + 1e-9 for other in count if count[other])


@given(JOBS, st.integers(4, 30), st.sampled_from(PROJECTS), st.integers(-2, 2))
@settings(max_examples=200)
def test_line_says_a_new_job_waits_only_if_a_pass_would(
    jobs: list[Asked], cpus: int, project: str, priority: int
) -> None:
    placed, line = place_all(jobs, cpus, {}, {})
    used = {
        name: Use((sum(j.cpus for j in placed if j.project == name), 0, sum(j.project == name for j in placed)), 1)
        for name in {job.project for job in placed}
    }
    new = Asked(len(jobs), project, priority, 1)
    left = [job for job in jobs if job not in placed]
    free = cpus - sum(job.cpus for job in placed)
    if line.why(project, priority) is not None:
        turns = Turns(_heads([*left, new]), used, {}, (cpus, 0, 1000))
        while (head := turns.next()) is not None:
            assert head != new.head, "it would have been looked at"
            job = next(one for one in left if one.head == head)
            if job.cpus > free and job.cpus <= cpus:
                break
            left.remove(job)
            turns.follow(job.project, next((h for h in _heads([*left, new]) if h.project == job.project), None))


def _heads(jobs: list[Asked]) -> list[Head]:
    found: dict[str, Asked] = {}
    for job in sorted(jobs, key=lambda one: (-one.priority, one.number)):
        found.setdefault(job.project, job)
    return [job.head for job in found.values()]


def test_job_beyond_its_quota_waits_for_ever_and_says_so() -> None:
    found = over_quota("a", [Need("trainer", 0, (8, 0, 1))], Use(), Terms(max_cpus=4))
    assert found is not None and found.forever and "the quota of project 'a' is 4" in found.why


def test_use_is_the_dominant_share_for_the_projects_share() -> None:
    turns = Turns([], {"a": Use((1, 2, 0), 1)}, {"a": Terms(share=2.0)}, capacity_of([]))
    assert turns.burden("a") == 0.0  # no node: no part of it
    assert Turns([], {"a": Use((1, 2, 0), 1)}, {"a": Terms(share=2.0)}, (10, 4, 5)).burden("a") == 0.25


async def placed_names(server: Server, agent: FakeAgent, count: int) -> list[str]:
    orders = await agent.desired(count)
    return sorted(order["job_name"] for order in orders)


async def plan(server: Server, **spec: Any) -> dict[str, Any]:
    answer = await server.http.post("/api/v1/jobs:plan", json={"spec": {"name": "p", "entrypoint": ["true"], **spec}})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.asyncio
async def test_waiting_jobs_are_placed_by_share_then_priority(server: Server) -> None:
    async with server.agent(await server.join(cpus=2)) as agent:
        first = await server.submit(name="first", project="a", trainers={"count": 2})
        await agent.desired(2)
        for name, project, priority in (("a-low", "a", 0), ("a-high", "a", 5), ("b-one", "b", -5), ("a-more", "a", 0)):
            await server.submit(name=name, project=project, priority=priority)
        second = await server.submit(name="b-two", project="b")
        await until_answer(lambda: server.job(second["id"]), lambda job: job["why"].startswith("waits for room"))
        for replica in await agent.get_desired():
            await agent.start(replica)
            await agent.report(replica, "EXITED", exit_code=0)
        await server.job_in(first["id"], "SUCCEEDED")

        async def names() -> list[str]:
            return sorted(order["job_name"] for order in await agent.get_desired())

        # the agent may not have read yet what it is ordered after that end
        placed = await until_answer(names, lambda found: len(found) == 2 and "first" not in found)
        assert placed == ["a-high", "b-two"]


@pytest.mark.asyncio
async def test_quota_holds_one_project_back_and_no_other(server: Server) -> None:
    terms = {"share": 1, "max_cpus": 2, "max_jobs": 5}
    made = await server.http.put("/api/v1/projects/small", json=terms)
    assert (made.status_code, made.json()["max_cpus"], made.json()["max_gpus"]) == (200, 2, None)
    async with server.agent(await server.join(cpus=8)) as agent:
        await server.submit(name="one", project="small", trainers={"count": 2})
        await agent.desired(2)
        held = await server.submit(name="two", project="small")
        behind = await server.submit(name="three", project="small")
        told = await until_answer(lambda: server.job(held["id"]), lambda j: "quota" in j["why"])
        assert told["why"] == "waits for the quota of project 'small': 2 of 2 CPUs are in use, and it asks for 1"
        await until_answer(
            lambda: server.job(behind["id"]), lambda j: j["why"].startswith("waits behind others of project 'small'")
        )
        await server.submit(name="free")
        assert "free" in await placed_names(server, agent, 3)
        found = {one["name"]: one for one in (await server.http.get("/api/v1/projects")).json()["items"]}
        assert (found["small"]["cpus_used"], found["small"]["jobs"], found["small"]["waiting"]) == (2, 1, 2)
        await server.http.put("/api/v1/projects/small", json={})
        assert await placed_names(server, agent, 5) == ["free", "one", "one", "three", "two"]


@pytest.mark.asyncio
async def test_plan_says_where_or_why_not_for_each_node(server: Server) -> None:
    nothing = await plan(server)
    assert (nothing["would_start"], nothing["nodes"]) == (False, []) and "none is READY" in nothing["why"]
    await server.join("away")
    small, large = await server.join("small", cpus=1), await server.join("large", cpus=8)
    async with server.agent(small), server.agent(large):
        fits = await plan(server, trainers={"count": 2, "cpus": 3})
        assert (fits["would_start"], fits["why"]) == (True, "it would start now")
        assert {one["name"]: (one["replicas"], one["reason"]) for one in fits["nodes"]} == {
            "away": (0, "is JOINING"),
            "small": (0, "trainer 0 asks for 3 CPUs, 1 GiB; it has 1 CPU, 8 GiB"),
            "large": (2, "takes trainer 0, trainer 1"),
        }
        assert (await server.http.get("/api/v1/jobs")).json()["items"] == []
        await server.http.put("/api/v1/projects/small", json={"max_jobs": 0})
        assert "quota of project 'small' is 0" in (await plan(server, project="small"))["why"]
        await server.submit(name="head", trainers={"count": 3, "cpus": 3})
        await until_answer(
            lambda: plan(server, trainers={"cpus": 9}), lambda found: "no READY node has that" in found["why"]
        )
