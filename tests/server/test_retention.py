"""What ended jobs left behind goes after its retention, part by part; what is needed stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import func, select
from tests.server.harness import FakeClock, Server, running, settings_for

from penstock_server.streams.tiers import SeriesKey
from penstock_server.tables import EventRow, IdempotencyRow, MetricRow, SeriesRow, TierRow

DAY_S = 86_400.0
KEPT = {f"retain_{part}_days": 1.0 for part in ("telemetry", "logs", "metrics", "events", "snapshots")}


async def num_rows(server: Server, job_id: str) -> list[int]:
    async with server.runtime.database.read() as session:
        return [
            (await session.execute(select(func.count()).select_from(table).where(table.job_id == job_id))).scalar_one()
            for table in (MetricRow, TierRow, SeriesRow, EventRow)
        ]


def folders(server: Server, job_id: str) -> list[str]:
    folder = server.runtime.settings.state_dir / "jobs" / job_id
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def snapshots(server: Server) -> list[Path]:
    return sorted((server.runtime.settings.state_dir / "snapshots").iterdir())


async def uploaded(server: Server, content: bytes, *, at_s: float) -> str:
    answer = await server.http.post(
        "/api/v1/snapshots", content=b"\x1f\x8b" + content, headers={"Content-Type": "application/gzip"}
    )
    path = server.runtime.settings.state_dir / "snapshots" / f"{answer.json()['sha256']}.tar.gz"
    os.utime(path, (at_s, at_s))  # as of the server's clock
    return str(answer.json()["sha256"])


@pytest.mark.asyncio
async def test_what_is_older_than_its_retention_goes(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, database_url, **KEPT, grace_s=1e9), clock) as server:
        now = clock.now().timestamp()
        needed, old = await uploaded(server, b"needed", at_s=now), await uploaded(server, b"old", at_s=now)
        jobs = [(await server.submit(snapshot=needed))["id"] for _ in range(2)]
        for job_id in jobs:
            server.runtime.metrics.add(SeriesKey(job_id, "loss", 1), 1, 1, 0.5)
            for part in ("logs", "segments"):
                (server.runtime.settings.state_dir / "jobs" / job_id / part).mkdir(parents=True)
        await server.runtime.metrics.flush()
        assert (await server.http.post(f"/api/v1/jobs/{jobs[0]}:cancel")).status_code == 202
        await server.job_in(jobs[0], "CANCELLED")
        clock.advance(DAY_S / 2)
        await server.runtime.sweeper.step()
        assert [(await num_rows(server, job_id))[:3] for job_id in jobs] == [[1, 9, 1]] * 2
        assert [folders(server, job_id) for job_id in jobs] == [["logs", "segments"]] * 2
        assert len(snapshots(server)) == 2
        clock.advance(DAY_S)
        again = await uploaded(server, b"again", at_s=clock.now().timestamp())
        await server.runtime.sweeper.step()
        assert await num_rows(server, jobs[0]) == [0, 0, 0, 0]
        assert folders(server, jobs[0]) == []
        assert (await num_rows(server, jobs[1]))[:3] == [1, 9, 1]
        assert folders(server, jobs[1]) == ["logs", "segments"]
        assert {path.name[:64] for path in snapshots(server)} == {needed, again}
        assert old not in {needed, again}
        assert (await server.job(jobs[0]))["state"] == "CANCELLED"


def recorded(server: Server, job_id: str, size: int) -> None:
    folder = server.runtime.settings.state_dir / "jobs" / job_id / "segments"
    folder.mkdir(parents=True)
    (folder / "1.seg").write_bytes(bytes(size))


def metric(server: Server, name: str, reason: str) -> float:
    return server.runtime.meters.registry.get_sample_value(f"penstock_{name}_total", {"reason": reason}) or 0.0


@pytest.mark.asyncio
async def test_beyond_the_quota_of_all_jobs_the_first_ended_go(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(
        settings_for(tmp_path, database_url, telemetry_quota_bytes=10_000, grace_s=1e9), clock
    ) as server:
        jobs = [(await server.submit(name=f"job-{number}"))["id"] for number in range(5)]
        for job_id in jobs:
            recorded(server, job_id, 9000)
        for job_id in (jobs[2], jobs[0], jobs[3]):
            clock.advance(10)
            await server.http.post(f"/api/v1/jobs/{job_id}:cancel")
            await server.job_in(job_id, "CANCELLED")
        await server.runtime.sweeper.step()
        assert all("segments" in folders(server, job_id) for job_id in jobs)  # those of the last day stay
        clock.advance(2 * DAY_S)
        await server.runtime.sweeper.step()
        left = [job_id for job_id in jobs if "segments" in folders(server, job_id)]
        assert left == [jobs[1], jobs[3], jobs[4]]  # of 27,000 bytes two had to go; those that go on stay
        assert (metric(server, "removed_recordings", "size"), metric(server, "removed_recording_bytes", "size")) == (
            2, 18_000,
        )  # fmt: skip
        recorded(server, jobs[0], 9000)
        await server.runtime.sweeper.step()
        assert "segments" not in folders(server, jobs[0])


@pytest.mark.asyncio
async def test_recordings_within_the_quota_stay_until_they_are_old(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, database_url, grace_s=1e9), clock) as server:
        job_id = (await server.submit())["id"]
        recorded(server, job_id, 9000)
        await server.http.post(f"/api/v1/jobs/{job_id}:cancel")
        await server.job_in(job_id, "CANCELLED")
        clock.advance(89 * DAY_S)
        await server.runtime.sweeper.step()
        assert "segments" in folders(server, job_id)
        clock.advance(2 * DAY_S)
        await server.runtime.sweeper.step()
        assert "segments" not in folders(server, job_id)
        assert metric(server, "removed_recordings", "age") == 1


@pytest.mark.asyncio
async def test_without_a_setting_everything_stays(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    before = await num_rows(sqlite_server, job["id"])
    await sqlite_server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
    await sqlite_server.job_in(job["id"], "CANCELLED")
    await sqlite_server.runtime.sweeper.step()
    assert (await num_rows(sqlite_server, job["id"]))[3] > before[3] > 0


@pytest.mark.asyncio
async def test_an_idempotency_key_stands_for_a_day(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, database_url, grace_s=1e9), clock) as server:

        async def submit(key: str) -> str:
            body = {"spec": {"name": "once", "entrypoint": ["x"]}}
            answer = await server.http.post("/api/v1/jobs", json=body, headers={"Idempotency-Key": key})
            return str(answer.json()["id"])

        first, other = await submit("a"), await submit("b")
        clock.advance(DAY_S - 60)
        await server.runtime.sweeper.step()
        assert await submit("a") == first
        clock.advance(120)
        assert await submit("a") != first, "not swept yet, and over all the same"
        await server.runtime.sweeper.step()
        async with server.runtime.database.read() as session:
            kept = (await session.execute(select(IdempotencyRow.key, IdempotencyRow.job_id))).all()
        assert [key for key, _ in kept] == ["a"] and other not in {job_id for _, job_id in kept}
