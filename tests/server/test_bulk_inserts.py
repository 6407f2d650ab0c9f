"""Points of many series go to PostgreSQL by one execution for each table, and nothing of them is changed on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event, select
from tests.server.harness import Server, running, settings_for

from penstock_server.streams.tiers import WIDTHS_NS, SeriesKey
from penstock_server.tables import MetricRow, TierRow

pytestmark = pytest.mark.asyncio

SPEC = {"name": "job", "entrypoint": ["true"]}


@pytest_asyncio.fixture
async def on_postgres(postgres_copy: str, tmp_path: Path) -> AsyncIterator[Server]:
    async with running(settings_for(tmp_path, postgres_copy)) as server:
        yield server


async def job_of(server: Server) -> str:
    answer = await server.http.post("/api/v1/jobs", json={"spec": SPEC})
    return str(answer.json()["id"])


async def test_many_series_are_one_execution_a_table(on_postgres: Server) -> None:
    job_id, found = await job_of(on_postgres), list[tuple[str, bool]]()

    def on_statement(_connection: Any, _cursor: Any, statement: str, _values: Any, _context: Any, many: bool) -> None:
        if statement.startswith("INSERT INTO"):
            found.append((statement.split()[2], many))

    engine = on_postgres.runtime.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", on_statement)
    for number in range(20):
        for step in (1, 2):
            on_postgres.runtime.metrics.add(SeriesKey(job_id, f"loss{number}", 1), step, step * 10**9, 0.5 * number)
    await on_postgres.runtime.metrics.settled()
    metrics = [one for one in found if one[0] in {"series", "metric_points", "metric_tiers"}]
    assert sorted(metrics) == [("metric_points", False), ("metric_tiers", False), ("series", False)]
    async with on_postgres.runtime.database.read() as session:
        points = [
            tuple(row) for row in await session.execute(select(MetricRow.series, MetricRow.step, MetricRow.value))
        ]
        levels = (await session.execute(select(TierRow.level).distinct())).scalars().all()
    assert sorted(points) == sorted((f"loss{n}", step, 0.5 * n) for n in range(20) for step in (1, 2))
    assert len(levels) == len(WIDTHS_NS)


async def test_a_name_that_is_too_long_is_refused_and_not_cut(on_postgres: Server) -> None:
    job_id, metrics = await job_of(on_postgres), on_postgres.runtime.metrics
    metrics.add(SeriesKey(job_id, "x" * 129, 1), 1, 1, 1.0)
    assert await metrics.settled()
    async with on_postgres.runtime.database.read() as session:
        assert (await session.execute(select(MetricRow.series))).scalars().all() == []
    refused = on_postgres.runtime.meters.refused.labels("bad_metrics")
    assert next(iter(refused.collect())).samples[0].value == 1
