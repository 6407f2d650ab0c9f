"""Advice through a real server: from frames of a trainer to ranked settings."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.server.harness import FakeAgent, Server
from tests.support.waiting import until_answer

from penstock.advice import budget
from penstock.advice.ranked import Option, advise
from penstock.advice.recorded import Recorded
from penstock.advice.setting import Setting
from penstock.protocol.frames import FLAG_WHOLE_STEP, Column, Kind
from penstock.protocol.graphdoc import GraphDocument, Op, Sync, Value, graph_hash
from penstock_server.services import advice as service

pytestmark = pytest.mark.asyncio
MS = 1_000_000


def value(name: str, *shape: int) -> Value:
    return Value(name=name, dtype="float32", shape=list(shape))


def op(name: str, kind: str, role: str, replica: int, inputs: list[Value], outputs: list[Value]) -> Op:
    return Op.model_validate({
        "name": name, "type": f"aten.{name.split('_')[0]}.default", "kind": kind, "role": role, "replica": replica,
        "module": "", "source": "train.py:3", "inputs": inputs, "outputs": outputs, "bytes": 0, "flops": 0,
    })  # fmt: skip


def two_replicas() -> GraphDocument:
    """Return a product on two replicas, its gradient, their exchange, and the update on the owner."""
    x, w, y, g = value("x", 50, 40), value("w", 40, 40), value("y", 50, 40), value("w@GRAD", 40, 40)
    ops = [
        op("mm_0", "computation", "forward", 0, [x, w], [y]), op("mm_0", "computation", "forward", 1, [x, w], [y]),
        op("mm_1", "computation", "backward", 0, [y, x], [g]), op("mm_1", "computation", "backward", 1, [y, x], [g]),
        op("reduce.w@GRAD", "reduce", "communication", 0, [g, g], [g]),
        op("sgd_0", "computation", "optimize", 0, [w, g], [w]),
    ]  # fmt: skip
    sync = Sync(parameter="w", gradient="w@GRAD", mode="reduce", owner=0, bytes=6400, sparse=False, ops=[4])
    return GraphDocument(
        program="train", mode="reduce", num_replicas=2, num_threads=8, batch=[50, 50], ops=ops,
        edges=[(0, 2), (1, 3), (2, 4), (3, 4), (4, 5)], syncs=[sync],
    )  # fmt: skip


async def advice(server: Server, job_id: str) -> dict[str, Any]:
    """Return the answer, or the problem."""
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/advice")
    found: dict[str, Any] = answer.json()
    return found


async def record(trainer: Any, document: GraphDocument, *, step_ms: float, count: int = 8) -> None:
    """Send a graph, whole steps of it on one thread, and their times."""
    await trainer.frame(Kind.GRAPH, body=document.model_dump(mode="json"))
    await trainer.frame(Kind.GRAPH_USED, body={"hash": graph_hash(document)})
    durations = np.array([2 * MS, 2 * MS, 4 * MS, 4 * MS, MS // 10, MS])
    columns = {
        Column.START_NS: np.cumsum(durations) - durations, Column.DURATION_NS: durations,
        Column.OP: np.arange(6), Column.THREAD: np.zeros(6),
    }  # fmt: skip
    for step in range(1, count + 1):
        await trainer.frame(Kind.OP_EVENTS, columns=columns, step=step, flags=FLAG_WHOLE_STEP)
    metrics = {
        Column.STEP: np.arange(1, count + 1), Column.TIME_NS: time.time_ns() + np.arange(count) * MS,
        Column.LOSS: np.full(count, 0.5), Column.SAMPLES: np.full(count, 100),
        Column.STEP_NS: np.full(count, int(step_ms * MS)), Column.SYNC_BYTES: np.zeros(count),
        Column.SYNC_NS: np.zeros(count),
    }  # fmt: skip
    await trainer.frame(Kind.METRICS, columns=metrics)


async def test_a_job_without_recorded_steps_has_no_advice(server: Server) -> None:
    async with server.attached() as trainer:
        answer = await server.http.get(f"/api/v1/jobs/{trainer.registered['job_id']}/advice")
    assert answer.status_code == 409, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert answer.json()["code"] == "nothing_recorded" and "second" in answer.json()["hint"]
    missing = await server.http.get("/api/v1/jobs/0198c0de-0000-7000-8000-000000000000/advice")
    assert missing.status_code == 404


async def test_recorded_steps_become_ranked_settings(sqlite_server: Server) -> None:
    document = two_replicas()
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await record(trainer, document, step_ms=14.0)
        found = await until_answer(lambda: advice(sqlite_server, job_id), lambda one: one.get("step_ms") == 14)
    assert (found["graph"], found["sampled_steps"], found["step_ms"]) == (graph_hash(document), 8, 14.0)
    options = found["options"]
    current = next(one for one in options if one["current"])
    others = [one["step_ms"] for one in options if not one["current"]]
    assert others == sorted(others) and len(others) == 3
    # an attached trainer's machine is unknown, and its events are of one thread: so one core
    assert current["step_ms"] == pytest.approx(14.0, abs=0.01)
    assert (current["cpu_num"], current["reduce_strategy"]) == (2, "Reduce")
    assert sum(current["busy_ms"]) == pytest.approx(13.1, rel=0.02)
    whole = next(one for one in options if one["cpu_num"] == 1)
    assert whole["step_ms"] < current["step_ms"]  # without the exchange, and with one dispatch for each operator
    assert whole["env"] == {"CPU_NUM": "1", "PENSTOCK_NUM_THREADS": "1"}
    assert whole["reason"] == "no part of the step changes by more than 2 %"
    assert options.index(current) < options.index(whole)  # so small a gain is no reason to change


async def recorded_job(server: Server, trainer: Any, document: GraphDocument) -> str:
    """Record steps of a job; return its id once all of that has arrived."""
    job_id: str = trainer.registered["job_id"]
    await record(trainer, document, step_ms=14.0)
    await until_answer(lambda: server.job(job_id), lambda job: job["latest"].get("step_ms") == 14.0)
    return job_id


async def test_those_that_ask_meanwhile_share_one_answer(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on, threads = threading.Event(), threading.Event(), []

    def slow(run: Recorded, settings: Sequence[Setting]) -> list[Option]:
        threads.append(threading.get_ident())
        entered.set()
        assert go_on.wait(60)
        return advise(run, settings)

    monkeypatch.setattr(service, "advise", slow)
    async with sqlite_server.attached() as trainer:
        job_id = await recorded_job(sqlite_server, trainer, two_replicas())
        asking = [asyncio.create_task(advice(sqlite_server, job_id)) for _ in range(6)]
        assert await asyncio.to_thread(entered.wait, 60)
        # the server answers meanwhile
        assert (await sqlite_server.job(job_id))["state"] == "RUNNING"
        asking.append(asyncio.create_task(advice(sqlite_server, job_id)))
        go_on.set()
        answers = await asyncio.gather(*asking)
        answers.append(await advice(sqlite_server, job_id))  # nothing was recorded since
    assert all(answer["options"] and answer == answers[0] for answer in answers)
    assert len(threads) == 1 and threads[0] != threading.get_ident()


async def test_jobs_are_simulated_one_at_a_time(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, overlap = threading.Lock(), threading.Event()

    def alone(*given: Any) -> Any:
        if not turn.acquire(blocking=False):
            overlap.set()
            return compute(*given)
        overlap.wait(0.5)  # for another that should not come
        turn.release()
        return compute(*given)

    compute = service._computed
    monkeypatch.setattr(service, "_computed", alone)
    async with sqlite_server.attached("one") as one, sqlite_server.attached("two") as two:
        jobs = [await recorded_job(sqlite_server, trainer, two_replicas()) for trainer in (one, two)]
        answers = await asyncio.gather(*(advice(sqlite_server, job) for job in jobs))
    assert [answer["job_id"] for answer in answers] == jobs
    assert not overlap.is_set()


async def test_a_new_step_is_a_new_answer(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REST", 0.0)
    async with sqlite_server.attached() as trainer:
        job_id = await recorded_job(sqlite_server, trainer, two_replicas())
        assert (await advice(sqlite_server, job_id))["sampled_steps"] == 8
        await record(trainer, two_replicas(), step_ms=14.0, count=4)
        found = await until_answer(lambda: advice(sqlite_server, job_id), lambda one: one["sampled_steps"] == 12)
    assert found["options"]


async def test_settings_too_large_are_named(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REST", 0.0)
    monkeypatch.setattr(budget, "MOST_WORK_OF_ALL", 1)
    async with sqlite_server.attached() as trainer:
        job_id = await recorded_job(sqlite_server, trainer, two_replicas())
        found = await advice(sqlite_server, job_id)
        assert [one["name"] for one in found["options"]] == ["default threads, 2 replicas, Reduce"]
        assert len(found["left_out"]) == 3 and "1 thread, 1 replica" in found["left_out"]
        monkeypatch.setattr(budget, "MOST_WORK", 1)
        await record(trainer, two_replicas(), step_ms=14.0)
        refused = await until_answer(lambda: advice(sqlite_server, job_id), lambda one: "code" in one)
    assert refused["code"] == "too_large_to_simulate" and "6 operators on 2 replicas" in refused["detail"]


@pytest.mark.parametrize(("beside", "cores"), [(1, 2), (0, 4)])
async def test_a_trainer_beside_others_has_the_cores_that_it_reserves(
    sqlite_server: Server, beside: int, cores: int
) -> None:
    node = await sqlite_server.join(cpus=4)
    async with sqlite_server.agent(node) as agent:
        spec = {"mode": "pserver", "pservers": {"count": 1, "cpus": 1}} if beside else {"mode": "local"}
        job = await sqlite_server.submit(**spec, trainers={"count": 1, "cpus": 2})
        replicas = await agent.desired(1 + beside)
        for replica in replicas:
            await agent.start(replica)
        trainer = Replica(agent, next(one for one in replicas if one["role"] == "trainer"))
        await record(trainer, two_replicas(), step_ms=14.0)
        found = await until_answer(lambda: advice(sqlite_server, job["id"]), lambda one: one.get("step_ms") == 14)
    assert found["cores"] == cores


@dataclass
class Replica:
    """A replica that an agent runs, as `record` writes to it."""

    agent: FakeAgent
    replica: dict[str, Any]
    seq: int = 0

    async def frame(self, kind: Kind, **fields: Any) -> bytes:
        self.seq += 1
        return await self.agent.frame(self.replica, kind, seq=self.seq - 1, **fields)


async def test_frames_that_hold_no_step_are_left_out(sqlite_server: Server) -> None:
    names = (Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD)
    nothing = {name: np.zeros(0) for name in names}
    unknown = {name: np.arange(3) + 1000 * (name is Column.OP) for name in names}
    async with sqlite_server.attached() as trainer:
        job_id = await recorded_job(sqlite_server, trainer, two_replicas())
        for columns in (nothing, unknown):
            await trainer.frame(Kind.OP_EVENTS, columns=columns, step=9, flags=FLAG_WHOLE_STEP)
        await trainer.frame(Kind.SCALARS, body={"step": 9, "time_ns": 5, "values": {"seen": 1.0}})
        await until_answer(lambda: sqlite_server.job(job_id), lambda job: "seen" in job["latest"])
        answer = await sqlite_server.http.get(f"/api/v1/jobs/{job_id}/advice")
        assert answer.status_code == 200, answer.text
        assert answer.json()["sampled_steps"] == 9  # that of operators nobody knows among them
        why = await sqlite_server.http.get(f"/api/v1/jobs/{job_id}/why")
        assert why.status_code == 200, why.text
