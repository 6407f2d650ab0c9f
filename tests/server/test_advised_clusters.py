"""Advice for jobs with parameter servers through a real server: from EXCHANGE frames to servers and trainers ranked."""

from __future__ import annotations

from typing import Any

import pytest
from tests.server.harness import Server
from tests.server.test_advice import advice, record, two_replicas
from tests.support.waiting import until_answer

from penstock.protocol.frames import Kind

pytestmark = pytest.mark.asyncio
MS = 1_000_000


def body(peer: str, sums: list[int], cpu_ms: int, *, stale: int = 0, **more: Any) -> dict[str, Any]:
    """Return a frame's body: one block, exchanged with one peer. `sums`: sent, received, waited in ns."""
    return {"peers": [peer], "blocks": ["w"], "rows": [[0, 0, 1, *sums, 0, stale, 0]], "cpu_ns": cpu_ms * MS, **more}


async def train(server: Server, trainer: Any, pserver: Any) -> None:
    """Ten steps of 15 ms each, of which 4 wait for the server. Busy: the trainer for 10 ms, the server for 2."""
    for step, at_ms in ((100, 0), (110, 150)):
        done = step - 100
        sums = [done * 1000, done * 900, done * 4 * MS]
        await trainer.frame(
            Kind.EXCHANGE, body=body("127.0.0.1:6174", sums, 500 + 10 * done), step=step, t0_ns=at_ms * MS
        )
        await pserver.frame(
            Kind.EXCHANGE, body=body("trainer 0", [0, 0, 0], 700 + 2 * done, mode="sync", stale=done), t0_ns=at_ms * MS
        )

    async def cells() -> list[dict[str, Any]]:
        answer = await server.http.get(f"/api/v1/jobs/{trainer.registered['job_id']}/exchange")
        return list(answer.json()["cells"])

    await until_answer(cells, lambda found: any(one["staleness"] == 10 and one["sent_bytes"] for one in found))
    await record(trainer, two_replicas(), step_ms=15.0)  # last: what is asked is answered from what there is by then


def is_of_the_whole_recording(found: dict[str, Any]) -> bool:
    """Whether all frames of `train` had come; of the first ones of its steps a shorter step follows."""
    return any(one["current"] and one["step_ms"] == 15.0 for one in found.get("clusters", ()))


async def test_servers_and_trainers_are_ranked_by_samples(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.attached(role="pserver", pid=8) as pserver:
        await train(sqlite_server, trainer, pserver)
        found = await until_answer(
            lambda: advice(sqlite_server, trainer.registered["job_id"]), is_of_the_whole_recording
        )
    rates = [one["samples_per_s"] for one in found["clusters"] if not one["current"]]
    assert rates == sorted(rates, reverse=True) and len(rates) == 8 + 1 + 3
    now = next(one for one in found["clusters"] if one["current"])
    assert (now["pservers"], now["trainers"], now["mode"], now["rows"]) == (1, 1, "sync", 100)
    # steps follow each other after 1 ms of their times' stamps: no time between them
    assert (now["step_ms"], now["wait_ms"]) == (15.0, 4.0)
    assert now["samples_per_s"] == pytest.approx(100 / 0.015, rel=1e-3)
    assert not now["can_run"] and sum(one["can_run"] for one in found["clusters"]) == 8
    assert "each trainer keeps its batch of 100 rows" in found["clusters_note"]


async def test_servers_that_report_no_mode_have_a_note(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.attached(role="pserver", pid=8) as pserver:
        await record(trainer, two_replicas(), step_ms=15.0)
        await pserver.frame(Kind.EXCHANGE, body=body("trainer 0", [0, 0, 0], 700))
        await trainer.frame(Kind.EXCHANGE, body={"peers": 3})
        found = await until_answer(
            lambda: advice(sqlite_server, trainer.registered["job_id"]), lambda one: "clusters" in one
        )
    assert found["clusters"] == [] and "not predicted" in found["clusters_note"]


async def test_a_job_without_servers_has_neither(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        await record(trainer, two_replicas(), step_ms=15.0)
        found = await until_answer(
            lambda: advice(sqlite_server, trainer.registered["job_id"]), lambda one: "clusters" in one
        )
    assert (found["clusters"], found["clusters_note"]) == ([], "")
