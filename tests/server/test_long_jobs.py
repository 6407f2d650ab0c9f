"""Metrics of long jobs: a page of any job costs the same, and no heartbeat waits for one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text
from tests.server.harness import Server
from tests.support.waiting import until_answer

from penstock.protocol.stream import Points
from penstock_server.db import Database, upgrade
from penstock_server.services.series import Part, course
from penstock_server.streams.tiers import WIDTHS_NS, Extremes, High, Low, SeriesKey, Summary, level_for
from penstock_server.tables import MetricRow, TierRow

S = 1_000_000_000
KEY = SeriesKey("job", "loss", 1)
POINT = st.tuples(st.integers(0, 300 * S), st.integers(0, 50), st.integers(-3, 3).map(float))


def columns(points: list[tuple[int, int, float]]) -> Points:
    return Points(step=[p[1] for p in points], time_ns=[p[0] for p in points], value=[p[2] for p in points])


def joined(batches: list[list[tuple[int, int, float]]]) -> dict[tuple[int, int], Extremes]:
    """Return what a database holds that joins each row with the one that is there."""
    summary, rows = Summary(), dict[tuple[int, int], Extremes]()
    for batch in batches:
        tiers = summary.of({KEY: columns(batch)})
        for tier in tiers:
            at = tier.level, tier.bucket
            rows[at] = tier.extremes.joined(rows[at]) if at in rows else tier.extremes
        summary.stored(tiers)
    return rows


@given(st.lists(st.lists(POINT, min_size=1, max_size=20), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_tiers_follow_from_the_points_in_any_order(batches: Any, random: Any) -> None:
    points = [point for batch in batches for point in batch]
    expected = {}
    for level, width in enumerate(WIDTHS_NS):
        for bucket in {at // width for at, _, _ in points}:
            inside = [p for p in points if p[0] // width == bucket]
            low = min(Low(value, at, step) for at, step, value in inside)
            expected[level, bucket] = Extremes(low, min(High(-value, at, step) for at, step, value in inside))
    assert joined(batches) == expected
    again = random.sample(points, len(points)) + points
    assert joined([again[i : i + 7] for i in range(0, len(again), 7)]) == expected


def test_a_tier_is_as_fine_as_the_points_allow() -> None:
    assert level_for(10 * S, 2000) == 0
    assert level_for(8 * 3600 * S, 2000) == 3
    assert level_for(10**6 * 3600 * S, 4) == len(WIDTHS_NS) - 1
    for span in (1, 100 * S, 10**4 * S, 10**6 * S):
        assert 2 * (span // WIDTHS_NS[level_for(span, 2000)] + 2) <= 2000


def test_what_a_later_attempt_repeats_is_left_out() -> None:
    assert course({1: 0}) == [Part(1, None)]
    assert course({1: 0, 2: 500}) == [Part(1, 500), Part(2, None)]
    assert course({1: 0, 2: 500, 3: 400}) == [Part(1, 400), Part(3, None)]
    assert course({1: 0, 2: 0}) == [Part(2, None)]


async def feed(server: Server, job_id: str, count: int, *, first: int = 0, attempt: int = 1) -> None:
    """Store `count` points, ten a second, with one peak."""
    for start in range(first, first + count, 5000):
        for step in range(start, min(start + 5000, first + count)):
            peak = 1e6 if step == first + count // 3 else float(step % 7)
            server.runtime.metrics.add(SeriesKey(job_id, "loss", attempt), step, (step + attempt) * S // 10, peak)
        await server.runtime.metrics.flush()


async def read(server: Server, job_id: str, query: str = "") -> dict[str, list[float]]:
    found: dict[str, list[float]] = (await server.http.get(f"/api/v1/jobs/{job_id}/metrics{query}")).json()["series"][
        "loss"
    ]
    return found


async def cost(server: Server, job_id: str) -> float:
    """Return the processor time of one read, all threads."""
    found = []
    for _ in range(3):
        begin = time.process_time()
        await server.runtime.series.read(job_id, None, 2000)
        found.append(time.process_time() - begin)
    return min(found)


@pytest.mark.speed
@pytest.mark.asyncio
async def test_a_page_of_a_long_job_costs_what_any_costs(sqlite_server: Server) -> None:
    short, long = (await sqlite_server.submit())["id"], (await sqlite_server.submit())["id"]
    await feed(sqlite_server, short, 2000)
    await feed(sqlite_server, long, 60_000)
    assert await cost(sqlite_server, long) < 2 * await cost(sqlite_server, short)


@pytest.mark.asyncio
async def test_a_long_series_keeps_its_ends_and_its_peak(server: Server) -> None:
    job = (await server.submit())["id"]
    await feed(server, job, 9000)
    series = await read(server, job, "?max_points=200")
    assert len(series["step"]) <= 200
    assert (series["step"][0], series["step"][-1]) == (0, 8999)
    assert (max(series["value"]), min(series["value"])) == (1e6, 0.0)
    assert series["time_ns"] == sorted(series["time_ns"])
    assert len((await read(server, job, "?max_points=9000"))["step"]) == 9000


@pytest.mark.asyncio
async def test_series_of_several_attempts_are_not_mixed(server: Server) -> None:
    job = (await server.submit())["id"]
    await feed(server, job, 100)
    await feed(server, job, 100, first=60, attempt=2)
    assert (await read(server, job))["step"] == list(range(160))
    assert (await read(server, job, "?attempt=1"))["step"] == list(range(100))
    assert (await read(server, job, "?attempt=2"))["step"] == list(range(60, 160))
    assert len((await read(server, job, "?max_points=20"))["step"]) <= 20


@pytest.mark.asyncio
async def test_no_heartbeat_waits_for_a_page(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    job, going_on = await sqlite_server.submit(), asyncio.Event()
    whole = sqlite_server.runtime.series.read

    async def slow(*given: Any, **more: Any) -> Any:
        found = await whole(*given, **more)
        await going_on.wait()
        return found

    monkeypatch.setattr(sqlite_server.runtime.series, "read", slow)
    async with sqlite_server.agent(await sqlite_server.join()) as agent, sqlite_server.browser() as browser:
        page = asyncio.create_task(browser.subscribe(1, topic="job", job_id=job["id"]))
        await asyncio.sleep(0)
        for count in (1, 2):
            sqlite_server.runtime.metrics.add(SeriesKey(job["id"], "loss", 1), count, count, 0.5)
            await agent.send(type="beat")
            await until_answer(agent.count_leases, count.__eq__)
        assert not page.done()
        going_on.set()
        shown = list((await page)["metrics"].get("loss", {"step": []})["step"])

        async def steps() -> list[int]:
            added = [m["series"]["loss"]["step"] for m in browser.messages if m["type"] == "metrics"]
            return shown + [step for part in added for step in part]

        assert await until_answer(steps, lambda found: len(found) >= 2) == [1, 2]


@pytest.mark.asyncio
async def test_migration_makes_the_tiers_that_the_writer_makes(database_url: str) -> None:
    database = Database(database_url)
    try:
        await upgrade(database, "0005")
        points = [(i * S * 7 // 3, i, float(i * i % 11)) for i in range(200)]
        async with database.write() as tx:
            now = "CURRENT_TIMESTAMP"
            await tx.session.execute(
                text(
                    "INSERT INTO jobs (id, name, kind, state, reason, reason_detail, why, spec, epoch, attempt, "
                    "restarts, created_at, state_at, latest, version) VALUES "
                    f"('job', 'j', 'managed', 'RUNNING', '', '', '', '{{}}', 1, 1, 0, {now}, {now}, '{{}}', 1)"
                )
            )
            for at, step, value in points:
                await tx.session.execute(
                    text(
                        "INSERT INTO metrics (job_id, series, time_ns, step, value) VALUES ('job', 'loss', :t, :s, :v)"
                    ),
                    {"t": at, "s": step, "v": value},
                )
        await upgrade(database)
        async with database.read() as session:
            rows = (await session.execute(select(TierRow))).scalars().all()
            kept = (await session.execute(select(MetricRow.attempt))).scalars().all()
        found = {
            (row.level, row.bucket): Extremes(
                Low(row.low, row.low_time_ns, row.low_step), High(-row.high, row.high_time_ns, row.high_step)
            )
            for row in rows
        }
        assert found == joined([points])
        assert kept == [0] * len(points)
    finally:
        await database.close()
