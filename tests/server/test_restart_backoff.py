"""What fails again and again, a process or a whole attempt, is started after ever longer pauses; first at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import FakeAgent, FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock_server.services.backoff import FIRST, LONGEST, LONGEST_OF_ATTEMPTS, STEADY, Span, starts_at

START = datetime(2026, 1, 1, tzinfo=UTC)
MOMENT = timedelta(milliseconds=10)


def lives(*lasted: timedelta) -> list[Span]:
    return [Span(START, START + one) for one in lasted]


def pause_after(*lasted: timedelta) -> timedelta:
    return starts_at(lives(*lasted), START) - START


def test_restart_pause_starts_at_the_second_failure_and_doubles() -> None:
    pauses = [pause_after(*[MOMENT] * count) for count in range(8)]
    assert pauses == [0 * FIRST, 0 * FIRST, FIRST, 2 * FIRST, 4 * FIRST, LONGEST, LONGEST, LONGEST]


def test_long_life_wipes_out_what_was_before() -> None:
    assert pause_after(MOMENT, MOMENT, MOMENT, STEADY) == 0 * FIRST
    assert pause_after(MOMENT, MOMENT, STEADY, MOMENT) == FIRST


def test_thousand_failures_pause_no_longer() -> None:
    assert pause_after(*[MOMENT] * 1000) == LONGEST
    attempts = lives(*[MOMENT] * 1000)
    assert starts_at(attempts, START, longest=LONGEST_OF_ATTEMPTS) - START == LONGEST_OF_ATTEMPTS


@pytest.mark.asyncio
async def test_agent_is_told_of_the_third_process_only_after_a_pause(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            job = await start(server, agent)
            for count in (2, 3):
                await fail_pserver(agent)
                await has_replicas(server, job["id"], 1 + count)
                if count == 2:
                    await agent.desired(2)  # at once
            await until_answer(agent.get_desired, lambda orders: [one["role"] for one in orders] == ["trainer"])
            clock.advance(FIRST.total_seconds())
            orders = await agent.desired(2)
    assert {one["role"] for one in orders} == {"trainer", "pserver"}


@pytest.mark.asyncio
async def test_third_attempt_waits_and_says_so_while_other_jobs_go_on(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            job = await server.submit(restart={"max_restarts": 5, "on": ["user"]})
            for attempt in (1, 2):
                await fail_trainer(agent, attempt)
            waits = await server.job_in(job["id"], "RECOVERING")
            due = clock.now() + FIRST
            assert datetime.fromisoformat(waits["next_attempt_at"]) == due
            assert (waits["restarts"], waits["restarts_left"], waits["attempt"]) == (2, 3, 2)
            assert "restart 2 of 5 follows after a pause of 1 s, since attempts failed soon" in waits["why"]
            other = await server.submit(name="other")
            await server.job_in(other["id"], "STARTING")
            assert (await server.job(job["id"]))["state"] == "RECOVERING"
            clock.advance(FIRST.total_seconds())
            again = await server.job_in(job["id"], "STARTING")
    assert (again["attempt"], again["next_attempt_at"]) == (3, None)


@pytest.mark.asyncio
async def test_job_may_be_cancelled_during_its_pause(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path), FakeClock()) as server, server.agent(await server.join()) as agent:
        job = await server.submit(restart={"max_restarts": 5, "on": ["user"]})
        for attempt in (1, 2):
            await fail_trainer(agent, attempt)
        await server.job_in(job["id"], "RECOVERING")
        await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
        over = await server.job_in(job["id"], "CANCELLED")
    assert over["next_attempt_at"] is None


async def fail_trainer(agent: FakeAgent, attempt: int) -> None:
    """Have the only replica of this attempt end with exit code 1."""
    [order] = await until_answer(agent.get_desired, lambda orders: [one["attempt"] for one in orders] == [attempt])
    await agent.start(order)
    await agent.report(order, "EXITED", exit_code=1)


async def start(server: Server, agent: FakeAgent) -> dict[str, Any]:
    small = {"count": 1, "cpus": 0, "memory": "1MiB"}
    job = await server.submit(mode="pserver", trainers=small, pservers=small, restart={"max_restarts": 5})
    for order in await agent.desired(2):
        await agent.start(order)
    return await server.job_in(job["id"], "RUNNING")


async def has_replicas(server: Server, job_id: str, count: int) -> None:
    await until_answer(lambda: server.job(job_id), lambda job: len(job["replicas"]) == count)


async def fail_pserver(agent: FakeAgent) -> None:
    """Have the pserver that is wanted now end, and wait until something else is wanted."""
    order = next(one for one in await agent.get_desired() if one["role"] == "pserver")
    await agent.start(order)
    await agent.report(order, "EXITED", signal=9)
    gone = order["replica_id"]
    await until_answer(agent.get_desired, lambda orders: gone not in [one["replica_id"] for one in orders])
