"""Tables and histograms of jobs: stored once, bounded, read by whoever may read the job, and gone with its metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from tests.server.harness import FakeClock, FakeTrainer, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.protocol.frames import Kind
from penstock.telemetry.media import Histogram, Table
from penstock_server.db import DatabaseAway
from penstock_server.services import media
from penstock_server.tables import MediaRow

pytestmark = pytest.mark.asyncio


async def log(trainer: FakeTrainer, step: int, **values: Table | Histogram) -> None:
    for name, value in values.items():
        body = {"step": step, "time_ns": step + 1, "values": {}, "media": {name: value.content()}}
        await trainer.frame(Kind.SCALARS, body=body)


async def listed(server: Server, job_id: str) -> dict[str, dict[str, Any]]:
    found = (await server.http.get(f"/api/v1/jobs/{job_id}/media")).json()["items"]
    return {one["name"]: one for one in found}


async def until_steps(server: Server, job_id: str, name: str, steps: list[int]) -> dict[str, Any]:
    def shown(found: dict[str, dict[str, Any]]) -> bool:
        return [item["step"] for item in found.get(name, {"items": []})["items"]] == steps

    return (await until_answer(lambda: listed(server, job_id), shown))[name]


def table(*rows: list[object]) -> Table:
    return Table(["label", "share"], rows)


async def test_what_is_logged_is_listed_and_read_as_it_was(server: Server) -> None:
    confusion, weights = table(["cat", 0.5], ["dög", None]), Histogram([1.0, 2.0, float("nan")], 2)
    async with server.attached() as trainer, server.browser() as browser:
        job_id = trainer.registered["job_id"]
        await browser.subscribe(1, topic="job", job_id=job_id)
        await log(trainer, 10, **{"eval/confusion": confusion}, weights=weights)
        shown = await until_steps(server, job_id, "weights", [10])
        assert (shown["type"], shown["removed"], shown["items"][0]["attempt"]) == ("histogram", 0, 1)
        assert {m["name"] for m in await browser.of("media", lambda m: m["name"] == "weights")} == {"weights"}
        for name, value in (("eval/confusion", confusion), ("weights", weights)):
            [item] = (await listed(server, job_id))[name]["items"]
            answer = await server.http.get(f"/api/v1/jobs/{job_id}/media/{item['id']}")
            assert answer.json() == value.content()
            assert item["size_bytes"] == len(answer.content)
            assert "immutable" in answer.headers["Cache-Control"]


async def test_of_each_name_the_newest_stay_and_the_rest_is_counted(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "KEPT", 3)
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        for step in range(5):
            await log(trainer, step, confusion=table())
        await log(trainer, 4, confusion=table())  # sent again after a reconnect
        await log(trainer, 0, other=table())
        await until_steps(sqlite_server, job_id, "other", [0])
        shown = await until_steps(sqlite_server, job_id, "confusion", [2, 3, 4])
        assert shown["removed"] == 2


async def test_a_job_has_the_newest_that_fit_its_bytes(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "JOB_BYTES", 200)
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        for step in range(9):
            await log(trainer, step, **{f"name{step % 2}": table([f"{step}" * 9, step])})
        await until_steps(sqlite_server, job_id, "name0", [8])
        async with sqlite_server.runtime.database.read() as session:
            total = (await session.execute(select(func.sum(MediaRow.stored_bytes)))).scalar_one()
        assert total <= 200
        assert (await listed(sqlite_server, job_id))["name1"]["items"][-1]["step"] == 7


async def test_what_is_none_or_one_name_too_many_is_refused_alone(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MAX_NAMES", 1)
    async with sqlite_server.attached() as trainer:
        job_id = trainer.registered["job_id"]
        await trainer.frame(
            Kind.SCALARS, body={"step": 1, "time_ns": 1, "values": {}, "media": {"x": {"type": "image"}}}
        )
        await trainer.frame(Kind.SCALARS, body={"step": 1, "time_ns": 1, "values": {}, "media": [1]})
        await trainer.frame(Kind.SCALARS, body={"step": 1, "time_ns": 1, "values": {}, "media": {"n" * 97: {}}})
        await log(trainer, 1, first=table())
        await log(trainer, 1, second=table())
        await log(trainer, 2, first=table())
        await until_steps(sqlite_server, job_id, "first", [1, 2])
        assert list(await listed(sqlite_server, job_id)) == ["first"]
        metrics = (await sqlite_server.http.get("/metrics")).text
        assert 'penstock_refused_total{reason="bad_frame"} 4.0' in metrics


async def test_names_of_other_trainers_have_a_suffix(sqlite_server: Server) -> None:
    async with sqlite_server.attached(index=1) as trainer, sqlite_server.attached("another") as other:
        job_id, another = trainer.registered["job_id"], other.registered["job_id"]
        await log(trainer, 1, confusion=table())
        [item] = (await until_steps(sqlite_server, job_id, "confusion.trainer1", [1]))["items"]
        for path in (f"jobs/{another}/media/{item['id']}", "jobs/none/media"):
            assert (await sqlite_server.http.get(f"/api/v1/{path}")).status_code == 404


async def test_what_a_database_could_not_take_is_not_confirmed(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends, as with a graph: its sender keeps what was not confirmed, and sends it over the next."""
    real = media.Media.take

    async def away(*args: Any) -> None:
        raise DatabaseAway("the connection was lost")

    monkeypatch.setattr(media.Media, "take", away)
    async with sqlite_server.attached() as trainer:
        await log(trainer, 1, confusion=table())
        await asyncio.wait_for(trainer.ws.wait_closed(), 30)
        assert trainer.ws.close_code == 1013
    monkeypatch.setattr(media.Media, "take", real)


async def test_media_go_with_the_metrics_of_their_job(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, retain_metrics_days=1.0), clock) as server:
        async with server.attached() as trainer:
            job_id = trainer.registered["job_id"]
            await log(trainer, 1, confusion=table())
            await until_steps(server, job_id, "confusion", [1])
            await trainer.frame(Kind.GOODBYE, body={})
            await server.job_in(job_id, "SUCCEEDED")
        clock.advance(0.5 * 86_400)
        await server.runtime.sweeper.step()
        assert len(await listed(server, job_id)) == 1
        clock.advance(86_400)
        await server.runtime.sweeper.step()
        assert await listed(server, job_id) == {}
