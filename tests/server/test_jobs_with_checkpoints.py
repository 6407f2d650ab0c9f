"""A job whose description asks for checkpoints goes on from them in its next attempt; they go with the job."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Server
from tests.support.waiting import until_answer

pytestmark = pytest.mark.asyncio
SCRIPT = Path(__file__).with_name("checkpointed_script.py")


async def test_a_killed_job_goes_on_from_its_checkpoint(sqlite_server: Server, node: Path) -> None:
    job = await sqlite_server.submit(
        mode="local",
        entrypoint=[sys.executable, str(SCRIPT)],
        trainers={"count": 1, "cpus": 1, "memory": "1MiB"},
        restart={"max_restarts": 2, "on": ["infra", "user"]},
        checkpoint={"every_steps": 2, "keep": 1},
    )
    job = await sqlite_server.job_in(job["id"], "SUCCEEDED", "FAILED")

    async def log() -> str:
        answer = await sqlite_server.http.get(
            f"/api/v1/jobs/{job['id']}/logs", params={"replica_id": job["replicas"][-1]["id"]}
        )
        answer.raise_for_status()
        piece: dict[str, Any] = answer.json()
        return str(piece["text"]) if piece["eof"] else ""

    said = await until_answer(log, bool)
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 2), said
    assert "from 4" in said
    assert "kept ['checkpoint.000002.000000000008']" in said

    answer = await sqlite_server.http.get(
        f"/api/v1/jobs/{job['id']}/metrics", params={"names": "checkpoint_step,checkpoint_s"}
    )
    written = answer.json()["series"]
    assert written["checkpoint_step"]["value"][-2:] == [6, 8], "the first attempt may not have sent its own"
    assert all(took_s > 0 for took_s in written["checkpoint_s"]["value"])

    async def left() -> list[Path]:
        return await asyncio.to_thread(lambda: list(node.rglob("checkpoint.0*")))

    assert await until_answer(left, lambda found: not found) == [], "checkpoints of a job that is over are removed"
