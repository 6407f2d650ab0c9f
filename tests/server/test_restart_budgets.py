"""Budgets of single classes of failures, and how long a job waits for capacity."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.server.harness import FakeAgent, FakeClock, Server, running, settings_for
from tests.server.test_lifecycle_decisions import exited, job, replace_of, replica, step_of, with_pservers
from tests.server.test_restart_windows import WallClock
from tests.support.waiting import until_answer

from penstock.command.specfile import sent
from penstock.protocol.jobspec import JobSpec
from penstock.protocol.states import JobState, ReplicaState, StopReason
from penstock_server.services import budget
from penstock_server.services.budget import Budget
from penstock_server.services.lifecycle import hung
from penstock_server.services.reports import FIRST_WAIT_S

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PREEMPTED = "preempted: the time of this pilot is over"
J, R = JobState, ReplicaState


def test_class_with_a_budget_takes_nothing_from_the_others() -> None:
    crash = job(exited(0, 1), own={"user": Budget(0, 1, retry_class="user")})
    step = step_of(crash)
    assert (step.to, step.is_restart, step.retry_class) == (J.RECOVERING, True, "user")
    assert "restart 1 of 1 for user follows" in step.why
    spent = replace(crash, max_restarts=9, own={"user": Budget(1, 1, retry_class="user")})
    assert (step_of(spent).to, step_of(spent).reason) == (J.STOPPING, StopReason.REPLICA_FAILED)
    lost = replace(spent, replicas=(replica(0, R.LOST),))
    assert (step_of(lost).to, step_of(lost).retry_class) == (J.RECOVERING, "infra")


def test_preemptions_end_a_job_once_their_budget_is_spent() -> None:
    taken = job(replica(0, R.KILLED, detail=PREEMPTED), own={"preempted": Budget(1, 2, retry_class="preempted")})
    assert (step_of(taken).to, step_of(taken).is_restart) == (J.RECOVERING, True)
    spent = step_of(replace(taken, own={"preempted": Budget(2, 2, retry_class="preempted")}))
    assert (spent.to, spent.reason) == (J.STOPPING, StopReason.PREEMPTED)
    assert not step_of(replace(taken, own={})).is_restart
    early = step_of(replace(taken, own={"preempted": Budget(2, 2, retry_class="preempted")}, has_started=False))
    assert (early.to, early.is_restart) == (J.RECOVERING, False), "nothing had started"


def test_hang_has_a_budget_of_its_own() -> None:
    facts = job(replica(0), own={"hang": Budget(0, 1, retry_class="hang")})
    assert hung(facts, "hangs").retry_class == "hang"
    assert hung(replace(facts, own={"hang": Budget(1, 1, retry_class="hang")}), "hangs").to is J.STOPPING


def test_killed_process_is_replaced_from_the_budget_of_machines() -> None:
    killed = replica(0, R.EXITED, role="pserver", signal=9)
    found = replace_of(with_pservers(replica(0), killed, max_restarts=0, own={"infra": Budget(0, 1, None, "infra")}))
    assert found.retry_class == "infra"
    own = {"user": Budget(0, 1, retry_class="user")}
    left = replace_of(with_pservers(replica(0), replica(0, R.EXITED, role="pserver", signal=9), own=own))
    assert left.retry_class == "infra", "the script has not failed"
    shared = replace_of(with_pservers(replica(0), exited(0, 1, role="pserver"), restart_on=frozenset({"user"})))
    assert shared.retry_class == "user"


def test_charges_of_classes_are_counted_apart() -> None:
    restart = JobSpec.model_validate(
        {"name": "x", "entrypoint": ["x"], "restart": {"budgets": {"user": {"max_restarts": 2, "window_s": 60}}}}
    ).restart.model_dump(mode="json")
    by_class: dict[str, Any] = {}
    for seconds in (0, 50):
        by_class = budget.charged_to(restart, by_class, "user", NOW + timedelta(seconds=seconds))
    later = NOW + timedelta(seconds=61)
    assert budget.own(restart, by_class, NOW + timedelta(seconds=50))["user"].left == 0
    assert budget.own(restart, by_class, later)["user"].left == 1
    assert budget.shared(restart, 3, [], by_class, later) == Budget(1, 3)
    assert not budget.has_own(restart, "infra")


async def _restarted(server: Server, job_id: str, times: int) -> dict[str, Any]:
    return await until_answer(lambda: server.job(job_id), lambda found: found["restarts"] == times)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Server, FakeClock]]:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server:
        yield server, clock


async def order_of(agent: FakeAgent, attempt: int) -> dict[str, Any]:
    """Return the order of an attempt."""
    [order] = await until_answer(agent.get_desired, lambda orders: [one["attempt"] for one in orders] == [attempt])
    return order


@pytest.mark.asyncio
async def test_user_errors_end_a_job_that_survives_its_machines(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    node = await server.join()
    async with server.agent(node) as agent:
        budgets = {"user": {"max_restarts": 1, "first_pause_s": 0}, "infra": {"max_restarts": 5, "first_pause_s": 0}}
        made = await server.submit(restart={"max_restarts": 9, "on": ["user"], "budgets": budgets})  # shared by none
        for attempt, end in enumerate([("KILLED", {}), ("EXITED", {"exit_code": 1}), ("KILLED", {})], 1):
            order = await order_of(agent, attempt)
            await agent.start(order)
            await agent.report(order, end[0], **end[1])
        order = await order_of(agent, 4)
        found = await server.job(made["id"])
        assert (found["restarts"], found["restarts_left"]) == (3, 0)
        assert found["restarts_left_by_class"] == {"infra": 3, "user": 0}
        await agent.start(order)
        await agent.report(order, "EXITED", exit_code=1)
        assert (await server.job_in(made["id"], "FAILED"))["reason"] == "replica_failed"


@pytest.mark.asyncio
async def test_pauses_of_a_class_are_its_own(tmp_path: Path) -> None:
    clock = WallClock()
    async with running(settings_for(tmp_path), clock) as server:
        node = await server.join()
        async with server.agent(node) as agent:
            own = {"max_restarts": 9, "first_pause_s": 20, "longest_pause_s": 30}
            made = await server.submit(restart={"budgets": {"user": own}})
            for attempt, pause_s in enumerate((None, 20, 30, 30), 1):
                order = await order_of(agent, attempt)
                await agent.start(order)
                await agent.report(order, "EXITED", exit_code=1)
                found = await _restarted(server, made["id"], attempt)
                if pause_s is not None:
                    due = clock.now() + timedelta(seconds=pause_s)
                    assert datetime.fromisoformat(found["next_attempt_at"]) == due
                    clock.ahead += timedelta(seconds=pause_s)


@pytest.mark.asyncio
async def test_job_that_finds_no_room_in_time_fails(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    node = await server.join(cpus=1)
    async with server.agent(node):
        made = await server.submit(trainers={"count": 1, "cpus": 3}, max_wait_s=600)
        await until_answer(lambda: server.job(made["id"]), lambda one: "cpu" in one["why"].lower())
        clock.advance(599)
        await server.runtime.reports.stop_long_ones()
        assert (await server.job(made["id"]))["state"] == "QUEUED"
        clock.advance(2)
        await server.runtime.reports.stop_long_ones()
        found = await server.job(made["id"])
        assert (found["state"], found["reason"]) == ("FAILED", "no_capacity")
        assert "was not placed within 600 s, which is max_wait_s: " in found["why"]


@pytest.mark.asyncio
async def test_wait_for_the_next_attempt_counts_from_its_failure(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    node = await server.join()
    async with server.agent(node) as agent:
        made = await server.submit(max_wait_s=600, restart={"on": ["user"]})
        order = await order_of(agent, 1)
        await agent.start(order)
        clock.advance(10)
        await server.runtime.reports.stop_long_ones()
        assert (await server.http.post(f"/api/v1/nodes/{node[0]}:cordon")).status_code < 300
        await agent.report(order, "EXITED", exit_code=1)
        await server.job_in(made["id"], "RECOVERING")
        clock.advance(595)
        await server.runtime.reports.stop_long_ones()
        assert (await server.job(made["id"]))["state"] == "RECOVERING"
        clock.advance(6)
        await server.runtime.reports.stop_long_ones()
        assert (await server.job(made["id"]))["reason"] == "no_capacity"


@pytest.mark.asyncio
async def test_waiting_jobs_survive_an_outage_of_the_server(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    made = await server.submit(max_wait_s=600)
    clock.advance(900)
    reports = server.runtime.reports
    reports._began, reports._began_at = clock.monotonic(), clock.now()  # as a start now has them
    await reports.stop_long_ones()
    assert (await server.job(made["id"]))["state"] == "QUEUED"
    clock.advance(FIRST_WAIT_S + 1)
    await reports.stop_long_ones()
    assert (await server.job(made["id"]))["reason"] == "no_capacity"


def test_submission_without_budgets_suits_older_servers() -> None:
    fields = {"name": "x", "entrypoint": ["x"]}
    assert "budgets" not in sent(JobSpec.model_validate(fields))["restart"]
    asked = {**fields, "restart": {"budgets": {"user": {"max_restarts": 2}}}}
    assert sent(JobSpec.model_validate(asked))["restart"]["budgets"]["user"]["max_restarts"] == 2
