"""What can be read of a job once its end can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import running, settings_for

from penstock.protocol.frames import Kind

pytestmark = pytest.mark.asyncio

POINT = {"step": 1, "time_ns": 1, "values": {"auc": 0.5}}


async def test_metrics_are_readable_once_a_job_has_ended(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path, metrics_flush_s=600)) as server:
        job = await server.submit()
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await agent.frame(replica, Kind.SCALARS, body=POINT)
            await agent.report(replica, "EXITED", exit_code=0)
            ended = await server.job_in(job["id"], "SUCCEEDED")
        found: dict[str, Any] = (await server.http.get(f"/api/v1/jobs/{job['id']}/metrics")).json()["series"]
        assert found["auc"]["value"] == [0.5]
        assert ended["latest"]["auc"] == 0.5


async def test_metrics_are_readable_once_an_attached_job_has_ended(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path, metrics_flush_s=600)) as server:
        async with server.attached() as trainer:
            job_id = trainer.registered["job_id"]
            await trainer.frame(Kind.SCALARS, body=POINT)
            await trainer.frame(Kind.GOODBYE, body={})
            await server.job_in(job_id, "SUCCEEDED")
        found: dict[str, Any] = (await server.http.get(f"/api/v1/jobs/{job_id}/metrics")).json()["series"]
        assert found["auc"]["value"] == [0.5]
