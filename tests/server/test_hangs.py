"""Hang detection: what counts as one, and what the server does about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.harness import FakeAgent, FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.protocol.frames import Kind
from penstock_server.services.arrivals import FACTOR, LEAST_S, MAX_ROWS, Arrivals, Hang

S = 10**9


def after(steps: dict[int, int], every_s: float) -> tuple[Arrivals, float]:
    """Trainers that have ended so many steps, one each `every_s`, all at once; and when the last was reported."""
    found, now = Arrivals(1, 0.0), 0.0
    for step in range(1, max(steps.values()) + 1):
        now = step * every_s
        for trainer, last in steps.items():
            if step <= last:
                found.note(trainer, step, int(now * S), now)
    return found, now


@given(st.floats(0.01, 100), st.floats(0.1, 2000))
def test_a_hang_is_eight_medians_and_a_minute(every_s: float, silent_s: float) -> None:
    found, last = after({0: 12, 1: 12}, every_s)
    limit_s = max(LEAST_S, FACTOR * every_s)
    if abs(silent_s - limit_s) > 1e-3 * limit_s:
        assert (found.hang(last + silent_s) is not None) == (silent_s > limit_s)


def test_no_hang_before_it_is_known_how_long_a_step_takes() -> None:
    found, last = after({0: 3}, 1.0)
    assert found.hang(last + 1e6) is None
    found.note(0, 4, 4 * S, 4.0)
    assert found.hang(last + 1e6) is not None


def test_a_trainer_that_repeats_steps_is_at_work() -> None:
    found, last = after({0: 1000}, 1.0)
    for step in range(900, 990):  # from a checkpoint
        found.note(0, step, int((last + step) * S), last + 30 + step)
    assert found.hang(last + 30 + 989 + 50) is None
    hang = found.hang(last + 30 + 989 + 70)
    assert hang is not None and hang.arrivals[0].step == 989


@pytest.mark.asyncio
async def test_a_node_that_comes_back_has_time_for_a_step(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        job = await server.submit(restart={"max_restarts": 1, "on": ["hang"]})
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await report_steps(agent, replica, range(1, 6))
            await until_answer(lambda: server.job(job["id"]), lambda j: j["latest"].get("step") == 5)
            clock.advance(17)
            await until_answer(lambda: server.job(job["id"]), lambda j: j["replicas"][0]["state"] == "UNKNOWN")
            clock.advance(53)  # 70 s since its last step: within the grace
            await server.runtime.hangs.step(server.runtime.diagnoses.unfinished)
            await silent(server, agent, clock, 50)
            back = await until_answer(lambda: server.job(job["id"]), lambda j: j["replicas"][0]["state"] == "RUNNING")
            await server.runtime.hangs.step(server.runtime.diagnoses.unfinished)
            assert back["attempt"] == 1 and await events_of(server, job["id"]) == []


def test_table_has_who_did_not_arrive_first() -> None:
    found, last = after({0: 12, 1: 9, 2: 12}, 1.0)
    hang = found.hang(last + 90)
    assert hang is not None
    assert hang.sentence() == (
        "hangs: no step for 90 s, where one takes 1 s in the median; trainer 1 did not arrive at step 12"
    )
    assert [row.split() for row in hang.table().splitlines()[1:]] == [
        ["1", "9", "93.0"], ["0", "12", "90.0"], ["2", "12", "90.0"],
    ]  # fmt: skip


def test_table_has_the_operator_where_it_is_known() -> None:
    found, last = after({0: 12, 1: 9}, 1.0)
    hang = found.hang(last + 90)
    assert hang is not None
    head, behind, other = hang.table({1: "fc_2_dw"}).splitlines()
    assert head.endswith("seconds ago  last reported in")
    assert (behind.split(), other.split()) == (["1", "9", "93.0", "fc_2_dw"], ["0", "12", "90.0"])


def test_table_of_many_trainers_is_bounded() -> None:
    found, last = after(dict.fromkeys(range(1000), 5), 1.0)
    hang = found.hang(last + 90)
    assert isinstance(hang, Hang) and len(hang.table()) < 2000
    assert hang.table().endswith(f"and {1000 - MAX_ROWS} more") and "every trainer ended step 5" in hang.sentence()


async def report_steps(agent: FakeAgent, replica: dict[str, Any], steps: range) -> None:
    for step in steps:
        body = {"step": step, "time_ns": step * S, "values": {"loss": 1.0}}
        await agent.frame(replica, Kind.SCALARS, seq=step, body=body)


async def events_of(server: Server, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await server.http.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
    return [event for event in found if event["reason"].startswith("hang")]


async def silent(server: Server, agent: FakeAgent, clock: FakeClock, seconds: int) -> None:
    """Let time pass in which the agent sends heartbeats, and its processes nothing."""
    for _ in range(0, seconds, 10):
        answered = await agent.count_leases()
        clock.advance(10)
        await agent.send(type="beat")
        await until_answer(agent.count_leases, lambda count, before=answered: count > before)  # type: ignore[misc]  # a default


@pytest.mark.asyncio
async def test_a_hang_is_an_event_with_the_arrivals_and_ends(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        job = await server.submit(trainers={"count": 2})
        async with server.agent(await server.join()) as agent:
            first, second = await agent.desired(2)
            for replica, last in ((second, 5), (first, 6)):  # what comes last is looked for
                await agent.start(replica)
                await report_steps(agent, replica, range(1, last + 1))
            await until_answer(lambda: server.job(job["id"]), lambda j: j["latest"].get("step") == 6)
            await silent(server, agent, clock, 50)
            assert await events_of(server, job["id"]) == []
            await silent(server, agent, clock, 20)
            [event] = await until_answer(lambda: events_of(server, job["id"]), bool)
            assert (event["from"], event["to"], event["reason"]) == ("RUNNING", "RUNNING", "hang")
            assert "trainer 1 did not arrive at step 6" in event["detail"]
            assert event["detail"].splitlines()[1].split() == ["trainer", "last", "step", "seconds", "ago"]
            assert (await server.job(job["id"]))["why"].startswith("hangs: no step for")
            await report_steps(agent, second, range(6, 7))
            over = await until_answer(lambda: events_of(server, job["id"]), lambda found: len(found) == 2)
            assert over[1]["reason"] == "hang_over"
            assert (await server.job(job["id"]))["why"] == "runs 2 trainers on node 'n1'"


@pytest.mark.asyncio
async def test_a_hang_takes_a_restart_if_the_job_says_so(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        job = await server.submit(restart={"max_restarts": 1, "on": ["hang"]})
        async with server.agent(await server.join()) as agent:
            for attempt in (1, 2):
                [replica] = await until_answer(
                    agent.get_desired,
                    lambda found, number=attempt: [r["attempt"] for r in found] == [number],  # type: ignore[misc]  # a default
                )
                await agent.start(replica)
                await server.job_in(job["id"], "RUNNING")
                await report_steps(agent, replica, range(1, 6))
                await until_answer(
                    lambda: server.http.get(f"/api/v1/jobs/{job['id']}/metrics", params={"attempt": attempt}),  # noqa: B023 - asked within this turn
                    lambda found: len(found.json()["series"].get("loss", {}).get("step", ())) == 5,
                )
                await silent(server, agent, clock, 70)
                await agent.desired(0)
                await agent.report(replica, "KILLED", signal=15, detail="stopped")
            failed = await server.job_in(job["id"], "FAILED")
    assert (failed["reason"], failed["restarts"]) == ("hang", 1)
    assert "hangs: no step for" in failed["why"]
