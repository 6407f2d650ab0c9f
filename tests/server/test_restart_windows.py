"""Restarts in a sliding window: what is older counts no more, and what is within it still ends the job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import FakeAgent, FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock_server.services import budget

NOW = datetime(2026, 1, 1, tzinfo=UTC)
WINDOW_S = 3600.0


def ago(*seconds: float) -> list[str]:
    return [(NOW - timedelta(seconds=one)).isoformat() for one in seconds]


def test_restart_counts_until_it_is_as_old_as_the_window() -> None:
    assert budget.taken(9, ago(3600, 3599.9, 0), WINDOW_S, NOW) == 2
    assert budget.taken(9, ago(3600, 3599.9, 0), None, NOW) == 9


def test_restart_of_the_future_counts() -> None:
    assert budget.taken(1, ago(-600), WINDOW_S, NOW) == 1


def test_old_restarts_are_not_recorded_for_ever() -> None:
    assert budget.charged(ago(9999, 10), WINDOW_S, NOW) == ago(10, 0)
    assert budget.charged([], None, NOW) == []


class WallClock(FakeClock):
    """A clock whose wall time alone moves: no lease is over."""

    ahead = timedelta()

    def now(self) -> datetime:
        return super().now() + self.ahead


async def _fail(agent: FakeAgent, attempt: int) -> None:
    [order] = await until_answer(agent.get_desired, lambda orders: [one["attempt"] for one in orders] == [attempt])
    await agent.start(order)
    await agent.report(order, "EXITED", exit_code=1)


async def _restarted(server: Server, job_id: str, times: int) -> dict[str, Any]:
    return await until_answer(lambda: server.job(job_id), lambda job: job["restarts"] == times)


@pytest.mark.asyncio
async def test_rare_failures_beyond_the_budget_end_no_job(tmp_path: Path) -> None:
    clock = WallClock()
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            job = await server.submit(restart={"max_restarts": 1, "on": ["user"], "window_s": WINDOW_S})
            for attempt in (1, 2, 3):
                await _fail(agent, attempt)
                assert (await _restarted(server, job["id"], attempt))["restarts_left"] == 0
                clock.ahead += timedelta(seconds=WINDOW_S)
                assert (await server.job(job["id"]))["restarts_left"] == 1


@pytest.mark.asyncio
async def test_job_ends_when_failures_of_a_window_pass_its_budget(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path), FakeClock()) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            job = await server.submit(restart={"max_restarts": 1, "on": ["user"], "window_s": WINDOW_S})
            await _fail(agent, 1)
            await _fail(agent, 2)
            assert (await server.job_in(job["id"], "FAILED"))["restarts"] == 1
