"""A pass of the scheduler decides while others write: it holds them up briefly, and starts only what still stands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from tests.server.harness import FakeClock, settings_for
from tests.support.databases import migrate
from tests.support.waiting import until_async

from penstock.protocol.agent import Hello, ReplicaReport
from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import ReplicaState
from penstock_server.auth.principal import Principal
from penstock_server.db import Database, Effects, Tx
from penstock_server.runtime import Runtime, build
from penstock_server.schemas import api
from penstock_server.services.backfill import LOOKED_AT
from penstock_server.services.fairness import Line
from penstock_server.services.lines import AHEAD
from penstock_server.services.pilots import Stay
from penstock_server.services.placement import BEHIND
from penstock_server.services.scheduling import JOBS_AT_ONCE, LASTS_S
from penstock_server.streams.agents import AgentLink
from penstock_server.tables import JobRow, ProjectRow, ReplicaRow

pytestmark = pytest.mark.asyncio

ASKER = Principal("token", "user", "test", frozenset({"submit"}))
ONE: Any = {"count": 1, "cpus": 1, "memory": "1MiB"}
TOO_LARGE: Any = {"count": 1, "cpus": 100, "memory": "1MiB"}


@dataclass
class Site:
    """The services of a server whose loops do not run: a pass is made when the test says so."""

    runtime: Runtime

    async def join(self, name: str, *, cpus: int, labels: dict[str, str] | None = None) -> str:
        """Join a node, and connect its agent."""
        async with self.runtime.database.write() as tx:
            made = self.runtime.tokens.mint(tx, "join", "join token", [], expires_in_s=300)
        size = {"cpus": cpus, "gpus": 0, "memory_bytes": 64 << 30}
        body = api.NodeJoin(join_token=made.secret, name=name, host=f"{name}.test", version="1", **size)
        node_id = (await self.runtime.nodes.join(body)).node_id
        await self.connect(node_id, labels)
        return node_id

    async def connect(self, node_id: str, labels: dict[str, str] | None = None) -> AgentLink:
        link = AgentLink(node_id, self.runtime.clock.monotonic())
        self.runtime.agents.connect(link, alive_s=1.0)
        await self.runtime.reports.hello(node_id, Hello(version="1", boot_id="b", replicas=[], labels=labels or {}))
        return link

    async def submit(self, name: str = "job", **spec: Any) -> str:
        return (await self.runtime.jobs.submit(JobSpec(name=name, entrypoint=["true"], **spec), ASKER, None)).id

    async def state(self, job_id: str) -> str:
        return (await self.runtime.jobs.get(job_id)).state

    async def nodes_of(self, job_id: str) -> set[str | None]:
        async with self.runtime.database.read() as session:
            found = await session.execute(select(ReplicaRow.node_id).where(ReplicaRow.job_id == job_id))
            return set(found.scalars())

    async def end(self, job_id: str) -> None:
        """Have the replicas of a job end well."""
        async with self.runtime.database.read() as session:
            rows = (await session.execute(select(ReplicaRow).where(ReplicaRow.job_id == job_id))).scalars().all()
        for row in rows:
            report = ReplicaReport(replica_id=row.id, epoch=row.epoch, state=ReplicaState.EXITED, exit_code=0)
            assert row.node_id is not None
            await self.runtime.reports.report(row.node_id, report)

    async def pass_during(self, change: Callable[[], Awaitable[object]]) -> int:
        """Have something change after a pass has read and before it writes; return how many jobs it started.

        The test has the lock of writes until the pass waits for it, and `change` goes before the pass.
        """
        lock = self.runtime.database.lock
        async with lock.turn(urgent=True):
            passing = asyncio.create_task(self.runtime.scheduling.run())
            await until_async(lambda: lock.num_waiting == 1)
            changing = asyncio.ensure_future(change())
            await until_async(lambda: lock.num_waiting == 2)
        await changing
        return await passing


@pytest_asyncio.fixture
async def site(database_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    await migrate(database_url)
    database = Database(database_url)
    try:
        settings = settings_for(tmp_path)
        settings.state_dir.mkdir(mode=0o700)
        yield Site(build(settings, FakeClock(), database))
    finally:
        await database.close()


async def test_a_pass_starts_a_few_jobs_in_each_transaction(site: Site) -> None:
    await site.join("n1", cpus=64)
    for number in range(3 * JOBS_AT_ONCE):
        await site.submit(f"job-{number}", trainers={"count": 1, "cpus": 1, "memory": "1MiB"})
    started: list[int] = []
    site.runtime.database.on_commit = lambda effects: started.append(
        sum(event.to_state == "STARTING" for event in effects.events)
    )
    assert await site.runtime.scheduling.run() == 3 * JOBS_AT_ONCE
    assert started == [JOBS_AT_ONCE] * 3


async def test_a_pass_decides_while_another_writes(site: Site) -> None:
    await site.join("n1", cpus=4)
    job = await site.submit()
    assert await site.pass_during(lambda: site.submit("second")) == 1
    assert await site.state(job) == "STARTING"


async def test_node_cordoned_after_it_was_chosen_takes_no_job(site: Site) -> None:
    small, large = await site.join("small", cpus=2), await site.join("large", cpus=8)
    job = await site.submit(trainers={"count": 2, "cpus": 1, "memory": "1MiB"})
    assert await site.pass_during(lambda: site.runtime.nodes.want(small, "cordon")) == 1
    assert await site.nodes_of(job) == {large}


async def test_agent_that_leaves_after_it_was_chosen_takes_no_job(site: Site) -> None:
    small, large = await site.join("small", cpus=2), await site.join("large", cpus=8)
    job = await site.submit(trainers={"count": 2, "cpus": 1, "memory": "1MiB"})

    async def leave() -> None:
        link = site.runtime.agents.get(small)
        assert link is not None
        link.leaving = "its time is over"
        await site.submit("behind")  # any write

    assert await site.pass_during(leave) == 2
    assert await site.nodes_of(job) == {large}


async def test_node_of_a_new_connection_is_looked_at_again(site: Site) -> None:
    node = await site.join("n1", cpus=2)
    job = await site.submit()
    assert await site.pass_during(lambda: site.connect(node)) == 1
    assert await site.state(job) == "STARTING"


async def test_job_cancelled_after_it_was_placed_never_starts(site: Site) -> None:
    await site.join("n1", cpus=1)
    first = await site.submit("first")
    second = await site.submit("second")
    assert await site.pass_during(lambda: site.runtime.jobs.cancel(first, ASKER)) == 1
    assert await site.state(first) == "CANCELLED"
    assert (await site.nodes_of(first), await site.state(second)) == (set(), "STARTING")


async def test_quota_set_after_a_job_was_placed_holds_it_back(site: Site) -> None:
    await site.join("n1", cpus=4)
    job = await site.submit(trainers={"count": 2, "cpus": 1, "memory": "1MiB"})

    async def limit() -> None:
        async with site.runtime.database.write(urgent=True) as tx:
            tx.session.add(ProjectRow(name="default", share=1.0, max_cpus=1))

    assert await site.pass_during(limit) == 0
    assert "the quota of project 'default' is 1" in (await site.runtime.jobs.get(job)).why


async def test_submission_behind_a_job_placed_meanwhile_is_looked_at(site: Site) -> None:
    await site.join("n1", cpus=4)
    scheduling = site.runtime.scheduling
    whole = await site.submit("whole", trainers={"count": 4, "cpus": 1, "memory": "1MiB"})
    await scheduling.run()
    head = await site.submit("head", trainers={"count": 2, "cpus": 1, "memory": "1MiB"})
    await scheduling.run()
    await site.end(whole)
    woken: list[Effects] = []
    site.runtime.database.on_commit = woken.append
    behind: list[str] = []

    async def submit() -> None:
        behind.append(await site.submit("behind"))

    assert await site.pass_during(submit) == 2, "the pass is followed by another"
    assert not any(effects.schedule for effects in woken), "nothing else would look at it"
    assert (await site.state(head), await site.state(behind[0])) == ("STARTING", "STARTING")


async def test_pass_leaves_later_submissions_to_the_next(site: Site) -> None:
    await site.join("n1", cpus=64)
    for _ in range(AHEAD):
        await site.submit(trainers=ONE)
    late: list[str] = []

    async def submit() -> None:
        late.append(await site.submit("late", trainers=ONE))

    assert await site.pass_during(submit) == AHEAD
    assert await site.state(late[0]) == "QUEUED"
    assert await site.runtime.scheduling.run() == 1


async def test_pass_ends_while_jobs_are_submitted(site: Site) -> None:
    await site.join("n1", cpus=4)
    await site.submit(trainers=TOO_LARGE)
    passing = asyncio.create_task(site.runtime.scheduling.run())

    async def submit() -> None:
        while not passing.done():
            await site.submit(trainers=TOO_LARGE)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(submit())
        await passing


async def test_long_pass_ends_for_a_job_that_goes_first(site: Site) -> None:
    await site.join("n1", cpus=JOBS_AT_ONCE + 1)
    for _ in range(2 * JOBS_AT_ONCE):
        await site.submit(trainers=ONE)
    urgent: list[str] = []

    async def submit() -> None:
        site.runtime.clock.advance(2 * LASTS_S)  # type: ignore[attr-defined]  # a FakeClock
        urgent.append(await site.submit("urgent", priority=10, trainers=ONE))

    assert await site.pass_during(submit) == JOBS_AT_ONCE + 1
    assert await site.state(urgent[0]) == "STARTING"


async def test_stop_ends_a_pass(site: Site) -> None:
    await site.join("n1", cpus=64)
    for _ in range(3 * JOBS_AT_ONCE):
        await site.submit(trainers=ONE)

    async def stop() -> None:
        site.runtime.scheduling.stop()
        await site.submit("late", trainers=ONE)

    assert await site.pass_during(stop) == JOBS_AT_ONCE


async def test_jobs_that_fit_no_node_share_a_transaction(site: Site) -> None:
    await site.join("n1", cpus=4)
    jobs = [await site.submit(trainers=TOO_LARGE) for _ in range(30)]
    changed: list[set[str]] = []
    site.runtime.database.on_commit = lambda effects: changed.append(effects.jobs)
    await site.runtime.scheduling.run()
    assert changed == [set(jobs)]


async def test_no_job_starts_before_one_whose_node_changed(site: Site) -> None:
    first, second = await site.join("a", cpus=8), await site.join("b", cpus=8)
    whole: Any = {"count": 1, "cpus": 8, "memory": "1MiB"}
    high = await site.submit("high", priority=10, trainers=whole)
    low = await site.submit("low", trainers=whole)
    assert await site.pass_during(lambda: site.runtime.nodes.want(first, "cordon")) == 1
    assert (await site.nodes_of(high), await site.state(low)) == ({second}, "QUEUED")


async def test_job_has_all_of_its_time_after_a_long_pass(site: Site) -> None:
    await site.join("n1", cpus=4)
    job = await site.submit(max_duration_s=60, trainers=ONE)

    async def pass_time() -> None:
        site.runtime.clock.advance(30)  # type: ignore[attr-defined]  # a FakeClock
        await site.submit("late", trainers=ONE)

    await site.pass_during(pass_time)
    async with site.runtime.database.read() as session:
        row = await session.get_one(JobRow, job)
        assert row.ends_by == row.state_at + timedelta(seconds=60) == site.runtime.clock.now() + timedelta(seconds=60)


async def test_cancelled_job_does_not_end_the_pass(site: Site) -> None:
    await site.join("n1", cpus=64)
    jobs = [await site.submit(trainers=ONE) for _ in range(2 * JOBS_AT_ONCE)]
    looks = 0
    look = site.runtime.scheduling.stays

    async def counted(session: AsyncSession) -> dict[str, Stay]:
        nonlocal looks
        looks += 1
        return await look(session)

    site.runtime.scheduling.stays = counted  # type: ignore[method-assign]
    started: list[int] = []

    async def cancel() -> None:
        await site.runtime.jobs.cancel(jobs[0], ASKER)
        site.runtime.database.on_commit = lambda effects: started.append(looks)

    assert await site.pass_during(cancel) == 2 * JOBS_AT_ONCE - 1
    assert started == [1, 1], "both transactions are of the first pass"


async def blocked_by_a_head(site: Site) -> str:
    """Have a job wait for room behind one that runs; return it."""
    await site.join("n1", cpus=4)
    await site.submit("runs", trainers={"count": 3, "cpus": 1, "memory": "1MiB"})
    await site.runtime.scheduling.run()
    head = await site.submit("head", trainers={"count": 4, "cpus": 1, "memory": "1MiB"})
    await site.runtime.scheduling.run()
    return head


@pytest.mark.parametrize("line", [Line(), Line(everyone="waits for a node")], ids=["none", "another"])
async def test_submission_that_commits_after_its_line_is_gone_wakes(site: Site, line: Line) -> None:
    head = await blocked_by_a_head(site)
    wakes: list[str] = []
    write = site.runtime.database.write

    @asynccontextmanager
    async def slow(*, urgent: bool = False) -> AsyncIterator[Tx]:
        async with write(urgent=urgent) as tx:
            yield tx
            site.runtime.database.write = write  # type: ignore[method-assign]
            site.runtime.scheduling.line = line  # as passes leave it that end before this commit

    await site.runtime.jobs.cancel(head, ASKER)
    site.runtime.scheduling.on_wake = lambda: wakes.append("wake")
    site.runtime.database.write = slow  # type: ignore[method-assign]
    late = await site.submit("late", trainers=ONE)
    assert wakes == ["wake"]
    assert await site.runtime.scheduling.run() == 1
    assert await site.state(late) == "STARTING"


async def test_submission_of_a_former_line_gets_the_new_reason(site: Site) -> None:
    node = await site.join("n1", cpus=4)
    await site.runtime.nodes.want(node, "cordon")
    await site.submit("first", trainers={"count": 5, "cpus": 1, "memory": "1MiB"})
    await site.runtime.scheduling.run()
    former = site.runtime.scheduling.line.why("default", 0)
    await site.runtime.nodes.want(node, "run")
    link = site.runtime.agents.get(node)
    assert link is not None
    site.runtime.agents.disconnect(link)
    behind: list[str] = []

    async def submit() -> None:
        behind.append(await site.submit("behind", trainers=ONE))

    await site.pass_during(submit)
    why = site.runtime.scheduling.line.why("default", 0)
    assert former != why == (await site.runtime.jobs.get(behind[0])).why


async def test_plan_is_no_submission(site: Site) -> None:
    await blocked_by_a_head(site)
    noted: list[str] = []

    def waits(project: str, priority: int) -> str | None:
        noted.append(project)
        return None

    site.runtime.scheduling.waits = waits  # type: ignore[method-assign]
    plan = await site.runtime.plans.of(JobSpec(name="plan", entrypoint=["true"]))
    assert (plan.would_start, noted) == (False, [])
    assert "waits behind others" in plan.why


def cores(cpus: int) -> Any:
    return {"count": 1, "cpus": cpus, "memory": "1MiB"}


async def test_job_for_a_busy_label_reserves_that_node_alone(site: Site) -> None:
    east, west = await site.join("east", cpus=4, labels={"zone": "east"}), await site.join("west", cpus=2)
    busy = await site.submit("busy", trainers=cores(3), node_selector={"zone": "east"})
    await site.runtime.scheduling.run()
    waits = await site.submit("waits", trainers=cores(2), node_selector={"zone": "east"})
    small = [await site.submit(f"small-{number}", trainers=ONE) for number in range(3)]
    assert await site.runtime.scheduling.run() == 2
    assert [await site.nodes_of(one) for one in small] == [{west}, {west}, set()], (
        "one core of east is free, and stays so"
    )
    assert "waits behind others" in (await site.runtime.jobs.get(small[2])).why
    assert "waits for room" in (await site.runtime.jobs.get(waits)).why
    spec = JobSpec.model_validate({"name": "p", "entrypoint": ["true"], "trainers": ONE})
    plan = await site.runtime.plans.of(spec)
    assert (plan.would_start, plan.why) == (False, BEHIND)
    await site.end(busy)
    await site.runtime.scheduling.run()
    assert [await site.nodes_of(one) for one in (waits, small[2])] == [{east}, {east}]


async def test_many_jobs_for_a_busy_label_hold_no_other_project(site: Site) -> None:
    await site.join("east", cpus=1, labels={"zone": "east"})
    west = await site.join("west", cpus=1)
    for number in range(LOOKED_AT + 3):
        newest = await site.submit(f"job-{number}", trainers=ONE, node_selector={"zone": "east"})
    other = await site.submit("other", trainers=ONE, project="other")
    assert await site.runtime.scheduling.run() == 2
    assert await site.nodes_of(other) == {west}
    assert f"behind {LOOKED_AT} others of project" in (await site.runtime.jobs.get(newest)).why
    assert site.runtime.scheduling.waits("default", 0) is not None, "a submission behind them wakes no pass"
    assert site.runtime.scheduling.waits("other", 0) is None
