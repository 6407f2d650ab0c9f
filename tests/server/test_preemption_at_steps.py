"""A preempted job saves at a step boundary and goes on from there; what does not save is stopped after its grace."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.server.harness import FakeAgent, FakeClock, Server, running, settings_for
from tests.server.test_lifecycle_decisions import exited, job, replica
from tests.support.waiting import until_answer

from penstock.protocol.states import NOT_SAVED, JobState, ReplicaState, StopReason
from penstock_server.services.lifecycle import JobFacts, ReplicaFacts, Step, decide
from penstock_server.services.preemption import grace_s, has_notice, outcome

pytestmark = pytest.mark.asyncio
R = ReplicaState
SCRIPT = Path(__file__).with_name("preempted_script.py")
SMALL = {"cpus": 1, "memory": "1MiB"}
SAVED = "preempted: it ended in order, with a checkpoint of step "


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Server, FakeClock]]:
    clock = FakeClock()
    async with running(settings_for(tmp_path, lease_ttl_s=1e7), clock) as server:
        yield server, clock


async def ask(server: Server, what: str, node_id: str | None = None, **body: Any) -> None:
    """Ask for something of a node, by default of the only one."""
    if node_id is None:
        (node_id,) = [node["id"] for node in (await server.http.get("/api/v1/nodes")).json()["items"]]
    answer = await server.http.post(f"/api/v1/nodes/{node_id}:{what}", json=body or None)
    assert answer.status_code == 202, answer.text


async def events_of(server: Server, job_id: str) -> list[dict[str, Any]]:
    """Return the events of a job itself, oldest first."""
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/events")
    answer.raise_for_status()
    return sorted((one for one in answer.json()["items"] if one["kind"] == "job"), key=lambda one: str(one["id"]))


async def running_on(server: Server, agents: list[FakeAgent], **spec: Any) -> tuple[str, list[dict[str, Any]]]:
    """Submit a job of a trainer for each agent, and have all run; return its id and the replicas."""
    given = {"checkpoint": {"preempt_grace_s": 20}, "stop_grace_s": 5, **spec}
    made = await server.submit(trainers={"count": len(agents), "cpus": 4, "memory": "1MiB"}, **given)
    replicas = [(await agent.desired(1))[0] for agent in agents]
    for agent, one in zip(agents, replicas, strict=True):
        await agent.start(one)
    await server.job_in(made["id"], "RUNNING")
    return made["id"], replicas


async def preempted_on(agent: FakeAgent, count: int, *, wanted: int = 0) -> dict[str, Any]:
    """Wait until so many replicas of a node have a notice, and as many are `wanted`; return the notices."""

    async def newest() -> tuple[int, dict[str, Any]]:
        found = [(len(one["replicas"]), one["preempted"]) for one in agent.messages if one["type"] == "desired"]
        return found[-1]

    _, notices = await until_answer(newest, lambda found: (found[0], len(found[1])) == (wanted, count))
    return notices


def computed(path: Path) -> dict[int, dict[int, list[int]]]:
    """Return the steps that ranks have computed, by rank and epoch."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines() if path.exists() else ():
        epoch, rank, step = map(int, line.split())
        found[rank][epoch].append(step)
    return found


async def test_preempted_trainers_save_and_repeat_no_step(sqlite_server: Server, node: Path, tmp_path: Path) -> None:
    lines, last = tmp_path / "lines", 30
    job = await sqlite_server.submit(
        mode="collective", entrypoint=[sys.executable, str(SCRIPT), str(lines), str(last)],
        trainers={"count": 2, **SMALL}, restart={"max_restarts": 0}, checkpoint={"every_steps": 1000},
    )  # fmt: skip

    async def steps() -> dict[int, dict[int, list[int]]]:
        return await asyncio.to_thread(computed, lines)

    await until_answer(steps, lambda found: len(found[0][1]) >= 3)
    await ask(sqlite_server, "drain", deadline_s=0)
    await sqlite_server.job_in(job["id"], "RECOVERING")
    await ask(sqlite_server, "uncordon")
    job = await sqlite_server.job_in(job["id"], "SUCCEEDED", "FAILED")
    assert (job["state"], job["attempt"], job["restarts"]) == ("SUCCEEDED", 2, 0), job["why"]
    found = await steps()
    stopped_after = found[0][1][-1]
    assert 3 <= stopped_after < last
    for rank in range(2):
        assert found[rank] == {1: list(range(1, stopped_after + 1)), 2: list(range(stopped_after + 1, last + 1))}
    said = [one["detail"] for one in await events_of(sqlite_server, job["id"]) if one["reason"] == "preempted"]
    assert said[-1] == (
        f"preempted at step {stopped_after}, checkpoint {stopped_after} is written: the next attempt resumes there"
    )


async def test_trainers_that_run_get_a_notice_and_the_job_its_step(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    first, second = await server.join("n1"), await server.join("n2")
    async with server.agent(first) as one, server.agent(second) as other:
        job_id, replicas = await running_on(server, [one, other])
        await ask(server, "drain", first[0], deadline_s=0)
        for agent, its in zip((one, other), replicas, strict=True):
            (notice,) = (await preempted_on(agent, 1)).items()
            assert notice[0] == its["replica_id"]
            assert notice[1]["grace_s"] == 20
            assert "node 'n1' is drained" in notice[1]["why"]
        await one.report(replicas[0], "KILLED", detail=f"{SAVED}12", exit_code=75)
        await preempted_on(one, 0)
        assert len(await preempted_on(other, 1)) == 1, "the other one still writes its part"
        await other.report(replicas[1], "KILLED", detail=f"{SAVED}12", exit_code=75)
        said = "preempted at step 12, checkpoint 12 is written: the next attempt resumes there"
        reasons = await until_answer(lambda: events_of(server, job_id), lambda found: found[-1]["detail"] == said)
        assert [one["to"] for one in reasons[-2:]] == ["RECOVERING", "RECOVERING"]
        assert (await server.job(job_id))["restarts"] == 0


async def test_jobs_on_a_leaving_pilot_save_within_its_time(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    async with server.agent(await server.join(), pilot={"seconds_left": 100.0}) as agent:
        job_id, _ = await running_on(server, [agent])
        await agent.send(type="beat", leaving="the time of this pilot is over")
        await until_answer(agent.count_leases, bool)
        clock.advance(79.0)
        await server.runtime.drains.step()
        assert (await server.job(job_id))["state"] == "RUNNING", "21 s are left, and its grace is 20 s"
        clock.advance(1.0)
        await server.runtime.drains.step()
        (notice,) = (await preempted_on(agent, 1)).values()
        assert notice["why"].startswith("the time of this pilot is over: node 'n1' leaves in 20 s")


async def test_a_pilot_that_is_asked_to_leave_has_jobs_save(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    first, second = await server.join("n1"), await server.join("n2")
    async with server.agent(first, pilot={"once": True}) as one, server.agent(second) as other:
        await running_on(server, [one, other])
        await one.send(type="beat", leaving="its pilot was stopped", ends_in_s=12.0)
        for agent in (one, other):
            assert len(await preempted_on(agent, 1)) == 1, "on all of its nodes"


async def test_a_leaving_pilot_ends_other_jobs_itself(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    async with server.agent(await server.join(), pilot={"seconds_left": 100.0}) as agent:
        job_id, _ = await running_on(server, [agent], checkpoint=None)
        await agent.send(type="beat", leaving="the time of this pilot is over")
        await until_answer(agent.count_leases, bool)
        clock.advance(99.0)
        await server.runtime.drains.step()
        assert (await server.job(job_id))["state"] == "RUNNING"


async def test_servers_are_wanted_until_their_trainers_have_saved(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    async with server.agent(await server.join()) as agent:
        job = await server.submit(
            mode="pserver", trainers={"count": 1, **SMALL}, pservers={"count": 1, **SMALL}, checkpoint={}
        )
        replicas = {one["role"]: one for one in await agent.desired(2)}
        for one in replicas.values():
            await agent.start(one)
        await server.job_in(job["id"], "RUNNING")
        await ask(server, "drain", deadline_s=0)
        notices = await preempted_on(agent, 1, wanted=1)
        assert list(notices) == [replicas["trainer"]["replica_id"]]
        assert [one["role"] for one in await agent.get_desired()] == ["pserver"]
        await agent.report(replicas["trainer"], "KILLED", detail=f"{SAVED}12", exit_code=75)
        assert await preempted_on(agent, 0) == {}


async def test_a_trainer_that_fails_meanwhile_ends_the_others(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    first, second = await server.join("n1"), await server.join("n2")
    async with server.agent(first) as one, server.agent(second) as other:
        job_id, replicas = await running_on(server, [one, other])
        await ask(server, "drain", first[0], deadline_s=0)
        await preempted_on(other, 1)
        await one.report(replicas[0], "EXITED", exit_code=1)
        await preempted_on(other, 0)
        assert (await server.job(job_id))["state"] == "RECOVERING"


@pytest.mark.parametrize("checkpoint", [None, {"preempt_grace_s": 0}])
async def test_jobs_without_a_grace_are_stopped_at_once(
    served: tuple[Server, FakeClock], checkpoint: dict[str, Any] | None
) -> None:
    server, _ = served
    node = await server.join()
    async with server.agent(node) as agent:
        await running_on(server, [agent], checkpoint=checkpoint)
        await ask(server, "drain", deadline_s=0)
        assert await preempted_on(agent, 0) == {}


async def test_a_silent_agent_is_given_up_after_notice_and_grace(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    node = await server.join()
    patience_s = server.runtime.settings.stop_patience_s
    async with server.agent(node) as agent:
        job_id, _ = await running_on(server, [agent])
        await ask(server, "drain", deadline_s=0)
        await preempted_on(agent, 1)
        await server.runtime.reports.overdue()
        clock.advance(20 + 5 + patience_s - 1)
        await server.runtime.reports.overdue()
        assert (await server.job(job_id))["replicas"][0]["state"] == "RUNNING"
        clock.advance(1)
        await server.runtime.reports.overdue()
        assert (await server.job(job_id))["replicas"][0]["state"] == "LOST"


async def test_a_wait_begins_once_all_have_saved(served: tuple[Server, FakeClock]) -> None:
    server, clock = served
    async with server.agent(await server.join()) as agent:
        job_id, (its,) = await running_on(server, [agent], checkpoint={"preempt_grace_s": 60}, max_wait_s=20)
        await ask(server, "drain", deadline_s=0)
        await preempted_on(agent, 1)
        for seconds in (40, 19):  # while it saves, and after that
            clock.advance(seconds)
            await server.runtime.reports.stop_long_ones()
            assert (await server.job(job_id))["state"] == "RECOVERING"
            await agent.report(its, "KILLED", detail=f"{SAVED}12", exit_code=75)
            await until_answer(lambda: server.job(job_id), lambda one: "checkpoint 12" in one["reason_detail"])
        clock.advance(2)
        await server.runtime.reports.stop_long_ones()
        assert (await server.job(job_id))["reason"] == "no_capacity"


async def test_a_job_that_completes_within_its_notice_is_over(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    node = await server.join()
    async with server.agent(node) as agent:
        job_id, (its,) = await running_on(server, [agent])
        await ask(server, "drain", deadline_s=0)
        await preempted_on(agent, 1)
        await agent.report(its, "EXITED", exit_code=0)
        assert (await server.job_in(job_id, "SUCCEEDED"))["attempt"] == 1


async def test_a_cancelled_job_loses_its_notice(served: tuple[Server, FakeClock]) -> None:
    server, _ = served
    node = await server.join()
    async with server.agent(node) as agent:
        job_id, _ = await running_on(server, [agent])
        await ask(server, "drain", deadline_s=0)
        await preempted_on(agent, 1)
        assert (await server.http.post(f"/api/v1/jobs/{job_id}:cancel")).is_success
        await preempted_on(agent, 0)


def preempted(*replicas: ReplicaFacts, **fields: Any) -> JobFacts:
    return job(*replicas, **{"state": JobState.RECOVERING, "reason": StopReason.PREEMPTED, **fields})


def saved(index: int, step: int = 12) -> ReplicaFacts:
    return replica(index, R.KILLED, exit_code=75, detail=f"{SAVED}{step}")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (preempted(replica(0), replica(1)), True),
        (preempted(replica(0), replica(1, R.UNKNOWN)), True),
        (preempted(saved(0), replica(1)), True),
        (preempted(exited(0), replica(1)), True),
        (preempted(replica(0), replica(1, R.ASSIGNED)), False),
        (preempted(replica(0), replica(1, R.PREPARING, started=False)), False),
        (preempted(replica(0), exited(1, 1)), False),
        (preempted(replica(0), replica(1, R.LOST)), False),
        (preempted(replica(0), replica(1, R.KILLED, detail="preempted: the time of this pilot is over")), False),
        (preempted(replica(0), reason=StopReason.HANG), False),
        (preempted(saved(0), saved(1)), False),
        (preempted(replica(0), replica(0, role="pserver"), has_pservers=True), True),
        (preempted(saved(0), replica(0, role="pserver"), has_pservers=True), False),
        (preempted(replica(0), exited(0, 1, role="pserver"), has_pservers=True), False),
        (preempted(replica(0), state=JobState.STOPPING), False),
        (preempted(replica(0), state=JobState.RUNNING), False),
    ],
)
async def test_only_an_attempt_that_runs_as_a_whole_is_noticed(facts: JobFacts, expected: bool) -> None:
    assert has_notice(facts) is expected


async def test_the_outcome_is_known_once_all_trainers_have_ended() -> None:
    assert outcome(preempted(saved(0), replica(1))) == ""
    assert "at step 12, checkpoint 12" in outcome(preempted(saved(0), saved(1)))
    assert "at step 12, checkpoint 12" in outcome(preempted(saved(0), exited(1)))
    assert "at step 12, checkpoint 12" in outcome(preempted(exited(0), saved(1)))
    late = replica(0, R.KILLED, detail=f"preempted: drained{NOT_SAVED}")
    assert outcome(preempted(late, exited(1, 1))).startswith("preempted without a checkpoint")
    assert outcome(preempted(replica(0, R.KILLED, detail="preempted: it leaves"))) == ""
    assert outcome(preempted(saved(0), state=JobState.STOPPING)) == ""


@pytest.mark.parametrize("detail", [f"{SAVED}12", f"{SAVED}x", f"preempted: drained{NOT_SAVED}"])
async def test_ends_after_a_notice_that_was_not_given_are_charged(detail: str) -> None:
    alone = job(replica(0, R.KILLED, exit_code=75, detail=detail), max_restarts=1)
    step = decide(alone)
    assert isinstance(step, Step)
    assert (step.to, step.is_restart, step.retry_class) == (JobState.RECOVERING, True, "infra")
    spent = decide(dataclasses.replace(alone, restarts=alone.max_restarts))
    assert isinstance(spent, Step)
    assert (spent.to, spent.reason) == (JobState.STOPPING, StopReason.REPLICA_FAILED)


async def test_what_completes_while_preempted_is_not_repeated() -> None:
    step = decide(preempted(exited(0), exited(1)))
    assert isinstance(step, Step)
    assert (step.to, step.reason) == (JobState.STOPPING, StopReason.COMPLETED)
    assert decide(preempted(exited(0), saved(1))) is None
    assert decide(preempted(exited(0), reason=StopReason.NODE_LOST)) is None
    assert decide(preempted()) is None


async def test_jobs_of_before_the_setting_have_its_default() -> None:
    assert grace_s({"checkpoint": {"every_steps": 500, "keep": 3}}) == 30.0
    assert grace_s({}) == grace_s({"checkpoint": None}) == 0.0
