"""Why a job is slow, through a real server: from frames of its processes to the sentence that names the cause."""

from __future__ import annotations

import time
from functools import partial
from operator import lt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.server.graph_sample import sample_graph
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.protocol.frames import Column, Frame, Kind
from penstock.protocol.graphdoc import Threads, graph_hash
from penstock_server.services.evidence import GraphFacts, OpFacts, Ran, rank_of, summed, trainer_of

pytestmark = pytest.mark.asyncio
MS = 1_000_000


async def steps(
    trainer: Any, *, step_ms: float, every_ms: float, count: int = 40, first: int = 1, behind_s: int = 0
) -> None:
    """Report `count` steps that end every `every_ms`, the last one now by a clock that is `behind_s`."""
    at = time.time_ns() - behind_s * 10**9 - (np.arange(count)[::-1] * every_ms * MS).astype(np.int64)
    columns = {
        Column.STEP: np.arange(first, first + count), Column.TIME_NS: at, Column.LOSS: np.full(count, 0.5),
        Column.SAMPLES: np.full(count, 100), Column.STEP_NS: np.full(count, int(step_ms * MS)),
        Column.SYNC_BYTES: np.zeros(count), Column.SYNC_NS: np.zeros(count),
    }  # fmt: skip
    await trainer.frame(Kind.METRICS, columns=columns)


async def why(server: Server, job_id: str) -> list[dict[str, Any]]:
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/why")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["findings"]
    return found


async def test_a_starved_reader_is_named_by_the_server(server: Server) -> None:
    async with server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        assert await why(server, job_id) == []
        nothing = (await server.http.get(f"/api/v1/jobs/{job_id}/operators")).json()
        assert (nothing["trainer"], nothing["graph"], nothing["operators"]) == (None, None, [])
        await steps(trainer, step_ms=60, every_ms=100)
        found = await until_answer(lambda: why(server, job_id), bool)
    assert found[0]["sentence"] == "input: 40 % of the step waits for data: 40.0 ms between steps"


@pytest.mark.parametrize("behind_s", [3600, -3600])
async def test_a_clock_that_differs_is_no_silence(sqlite_server: Server, behind_s: int) -> None:
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await steps(trainer, step_ms=60, every_ms=60.5, behind_s=behind_s)
        found = await until_answer(lambda: why(sqlite_server, job_id), bool)
    assert found[0]["cause"] == "healthy"


async def test_silence_is_measured_by_when_reports_arrive(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server, server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await steps(trainer, step_ms=60, every_ms=60.5, behind_s=3600)
        assert (await until_answer(lambda: why(server, job_id), bool))[0]["cause"] == "healthy"
        clock.advance(11)
        found = await why(server, job_id)
    assert found[0]["sentence"] == "no trainer has finished a step for 11 s, since step 40; a step takes 60.5 ms"


async def test_a_process_that_began_anew_is_not_silent(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server:
        async with server.attached() as trainer:
            job_id = trainer.registered["job_id"]
            await steps(trainer, step_ms=60, every_ms=60.5)
            await until_answer(lambda: why(server, job_id), bool)
        clock.advance(11)
        async with server.attached(pid=8) as trainer:
            assert trainer.registered["job_id"] == job_id
            assert (await why(server, job_id))[0]["cause"] == "healthy"


async def test_a_slow_server_is_named_by_what_trainers_counted(sqlite_server: Server) -> None:
    body = {
        "peers": ["127.0.0.1:6174", "127.0.0.1:6175"], "blocks": ["", "user.embedding.block0"],
        "rows": [[0, 0, 40, 0, 0, 40 * MS, 0, 0, 0], [1, 0, 40, 0, 0, 200 * MS, 0, 0, 0],
                 [1, 1, 40, 9, 9, 1000 * MS, 0, 0, 0]],
    }  # fmt: skip
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await steps(trainer, step_ms=60, every_ms=60.5)
        await trainer.frame(Kind.EXCHANGE, body=body, step=40)
        found = await until_answer(
            lambda: why(sqlite_server, job_id), lambda found: any(one["cause"] == "server" for one in found)
        )
    assert found[0]["sentence"] == (
        "50 % of each step waits for pserver-1; `user.embedding` is 25.0 ms of it; the other servers take 1.0 ms"
    )


async def test_a_cause_counts_once_it_is_most_of_four_seconds(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await steps(trainer, step_ms=60, every_ms=100, count=70, first=100)
        await steps(trainer, step_ms=60, every_ms=60.5, count=75, behind_s=7)
        found = await until_answer(lambda: why(sqlite_server, job_id), bool)
    assert found[0]["sentence"].startswith("input: 40 % of the step waits for data")


async def test_waits_are_those_of_the_newest_seconds(sqlite_server: Server) -> None:
    body: dict[str, Any] = {"peers": ["127.0.0.1:6174", "127.0.0.1:6175"], "blocks": [""]}
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await steps(trainer, step_ms=60, every_ms=60.5, count=1000)
        for step, at_s, waits_ms in ((900, 10, (9000, 9000)), (940, 4, (9040, 9040)), (1000, 0, (9060, 10840))):
            rows = [[peer, 0, step, 9, 9, ms * MS, 0, 0, 0] for peer, ms in enumerate(waits_ms)]
            await trainer.frame(Kind.EXCHANGE, body=body | {"rows": rows}, step=step, t0_ns=(20 - at_s) * 10**9)
        found = await until_answer(lambda: why(sqlite_server, job_id), lambda found: len(found) > 1)
    assert found[0]["sentence"] == "50 % of each step waits for pserver-1; the other servers take 0.33 ms"


async def test_a_node_whose_disk_is_full_is_named(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    async with sqlite_server.agent(await sqlite_server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await steps(SimpleNamespace(frame=partial(agent.frame, replica)), step_ms=60, every_ms=60.5)
        await until_answer(lambda: why(sqlite_server, job["id"]), bool)
        for free in (3 << 30, 1 << 20):
            answered = await agent.count_leases()
            await agent.send(type="beat", disk={"free_bytes": free, "total_bytes": 20 << 30})
            await until_answer(agent.count_leases, partial(lt, answered))
            found = await why(sqlite_server, job["id"])
            assert found[0]["cause"] == ("full_disk" if free == 1 << 20 else "healthy")
    name = (await sqlite_server.http.get("/api/v1/nodes")).json()["items"][0]["name"]
    assert found[0]["sentence"].startswith(f"the disk of {name} is full: 1.0 MB of 21,475 MB are free")


async def test_a_pass_without_training_is_evaluation() -> None:
    trains, tests = (GraphFacts((), np.empty((0, 2)), trains) for trains in (True, False))
    frames = [Frame(Kind.GRAPH_USED, 3, 1, seq, body={"hash": used}) for seq, used in enumerate(("train", "test"))]
    assert summed(frames, {}, {"train": trains, "test": tests})[3].evaluates
    assert summed(frames[::-1], {}, {"train": trains, "test": tests}) == {}


async def test_a_job_that_only_evaluates_has_no_operator_times(sqlite_server: Server) -> None:
    tests = sample_graph()  # one forward operator
    columns = {Column.OP: [0], Column.COUNT: [40], Column.TOTAL_NS: [3 * MS], Column.MAX_NS: [MS]}
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await trainer.frame(Kind.GRAPH, body=tests.model_dump(mode="json"))
        await trainer.frame(Kind.GRAPH_USED, body={"hash": graph_hash(tests)})
        await trainer.frame(Kind.OP_SUMS, columns={name: np.array(values) for name, values in columns.items()})
        await steps(trainer, step_ms=60, every_ms=60.5)
        await until_answer(lambda: why(sqlite_server, job_id), bool)
        answer = await sqlite_server.http.get(f"/api/v1/jobs/{job_id}/operators")
    assert answer.status_code == 200, answer.text
    assert (answer.json()["trainer"], answer.json()["graph"], answer.json()["operators"]) == (None, None, [])


async def test_operators_of_the_newest_steps_are_the_evidence(sqlite_server: Server) -> None:
    sample = sample_graph()
    named = [("mm_0", "forward"), ("mm_0_grad", "backward"), ("sgd_0", "optimize")]
    made = [sample.ops[0].model_copy(update={"name": name, "role": role}) for name, role in named]
    document = sample.model_copy(update={"ops": made})
    ops = np.arange(len(document.ops))
    total = np.where(ops == 1, 3000 * MS, 10 * MS)
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await trainer.frame(Kind.GRAPH, body=document.model_dump(mode="json"))
        await trainer.frame(Kind.GRAPH_USED, body={"hash": graph_hash(document)})
        columns = {
            Column.OP: ops,
            Column.COUNT: np.full(len(ops), 40),
            Column.TOTAL_NS: total,
            Column.MAX_NS: total // 40,
        }
        await trainer.frame(Kind.OP_SUMS, columns=columns)
        await steps(trainer, step_ms=60, every_ms=60.5)
        found = await until_answer(lambda: why(sqlite_server, job_id), bool)
        times = (await sqlite_server.http.get(f"/api/v1/jobs/{job_id}/operators")).json()
    assert (times["trainer"], times["graph"]) == (0, graph_hash(document))
    assert [(one["name"], one["role"], one["count"], one["total_ns"]) for one in times["operators"]] == [
        ("mm_0", "forward", 40, 10 * MS),
        ("mm_0_grad", "backward", 40, 3000 * MS),
        ("sgd_0", "optimize", 40, 10 * MS),
    ]
    assert {(one["sampled"], one["p50_ns"], one["p99_ns"]) for one in times["operators"]} == {(0, None, None)}
    healthy = next(one for one in found if one["cause"] == "healthy")
    assert f"`{document.ops[1].name}`" in healthy["sentence"]
    assert (healthy["op"], healthy["graph"]) == (1, graph_hash(document))


async def test_percentiles_are_of_each_operators_sampled_runs() -> None:
    rng = np.random.default_rng(7)
    spent = {op: rng.integers(0, 10**9, size=137 + op) for op in (0, 3)}
    runs = rng.permutation(np.concatenate([np.stack([np.full(len(ns), op), ns], 1) for op, ns in spent.items()]))
    frames = [
        Frame(Kind.OP_EVENTS, 1, 1, seq, 1, seq, flags, {
            Column.OP: part[:, 0], Column.DURATION_NS: part[:, 1], Column.START_NS: np.zeros(len(part)),
            Column.THREAD: np.zeros(len(part)),
        })
        for seq, (part, flags) in enumerate([(runs[:90], 1), (runs[90:], 1), (np.full((50, 2), 3), 0)])
    ]  # fmt: skip
    [ran] = summed(frames, {1: "g"}, {"g": GraphFacts((), np.empty((0, 2)), True)}).values()
    found = ran.durations_ns()
    assert sorted(found) == [0, 3]
    for op, ns in spent.items():
        for share in (0.5, 0.99):
            limit = rank_of(found[op], share)
            assert limit is not None
            assert (ns <= limit).mean() >= share > (ns < limit).mean()
    assert rank_of(found.get(1), 0.5) is None


async def test_a_pool_that_runs_one_operator_at_once_is_not_idle() -> None:
    """The default settings: four threads in the pool, one operator at once, which has all cores."""
    found = trainer_of(
        0, [(1, 0, 15.0)], Ran("g", Threads(1, 2), busy=[0.98]), {"g": GraphFacts((), np.empty((0, 2)), True)}, cores=2
    )
    assert (found.workers, found.intra_op_threads) == (1, 2)
    assert found.idle == pytest.approx(0.02)


async def test_threads_of_an_older_process_are_unknown() -> None:
    found = trainer_of(0, [(1, 0, 15.0)], Ran("g", busy=[0.5]), {"g": GraphFacts((), np.empty((0, 2)), True)}, cores=2)
    assert (found.intra_op_threads, found.idle) == (0, None)


async def test_the_longest_chain_of_operators_is_measured() -> None:
    ops = tuple(OpFacts(f"mm_{i}", "backward", "", 0.0) for i in range(4))
    facts = GraphFacts(ops, np.array([[0, 1], [0, 2], [1, 3], [2, 3]]), True)
    ran = Ran("g", Threads(1, 1), count=dict.fromkeys(range(4), 2), total_ns={0: 20, 1: 40, 2: 80, 3: 10})
    assert trainer_of(0, [(1, 0, 15.0)], ran, {"g": facts}, cores=2).path_ns == 10 + 40 + 5
