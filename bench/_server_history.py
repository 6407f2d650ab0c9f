"""The database of a control plane with a long history, filled before its server starts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import insert, text

from penstock.protocol.jobspec import JobSpec
from penstock_server.db import Database, next_numbers, upgrade
from penstock_server.tables import AttemptRow, EventRow, JobRow, ReplicaRow
from penstock_server.uuid7 import uuid7

CHUNK = 2000
STATES = ("QUEUED", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED")
_NAMES = ("ctr", "mnist", "transformer", "din", "flights")


async def fill(url: str, *, finished: int, waiting: int) -> None:
    """Make the tables, and so many jobs that have ended (an attempt, a replica, five events each) or wait for a CPU."""
    database = Database(url)
    try:
        await upgrade(database)
        for start in range(0, finished, CHUNK):
            await _add(database, "SUCCEEDED", range(start, min(finished, start + CHUNK)))
        for start in range(0, waiting, CHUNK):
            await _add(database, "QUEUED", range(start, min(waiting, start + CHUNK)))
        if not database.is_sqlite:
            async with database.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
                await connection.execute(text("ANALYZE"))  # autovacuum does it within a minute
    finally:
        await database.close()


async def _add(database: Database, state: str, numbers: range) -> None:
    over = state == "SUCCEEDED"
    jobs = [_job(number, state) for number in numbers]
    async with database.write() as tx:
        await tx.session.execute(insert(JobRow), jobs)
        if over:
            first = await next_numbers(tx, "stream", len(jobs))
            attempts = [_attempt(job) for job in jobs]
            await tx.session.execute(insert(AttemptRow), attempts)
            replicas = [_replica(attempt, first + offset) for offset, attempt in enumerate(attempts)]
            await tx.session.execute(insert(ReplicaRow), replicas)
        await tx.session.execute(insert(EventRow), [event for job in jobs for event in _events(job)])


def _job(number: int, state: str) -> dict[str, Any]:
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    over = state == "SUCCEEDED"
    name = f"{_NAMES[number % len(_NAMES)]}-{number}"
    return {
        "id": uuid7(), "name": name, "kind": "managed", "state": state, "reason": "completed" if over else "",
        "reason_detail": "", "why": "", "spec": JobSpec(name=name, entrypoint=["true"]).model_dump(mode="json"),
        "epoch": int(over), "attempt": int(over), "restarts": 0, "next_attempt_at": None, "created_at": at,
        "state_at": at, "started_at": at if over else None, "finished_at": at if over else None, "progress": None,
        "eta_s": None, "latest": {"loss": 0.5} if over else {}, "version": 6 if over else 1,
    }  # fmt: skip


def _attempt(job: dict[str, Any]) -> dict[str, Any]:
    at = job["created_at"]
    return {
        "id": uuid7(), "job_id": job["id"], "number": 1, "epoch": 1, "created_at": at, "finished_at": at,
        "reason": "completed", "secret": "",
    }  # fmt: skip


def _replica(attempt: dict[str, Any], stream: int) -> dict[str, Any]:
    at = attempt["created_at"]
    return {
        "id": uuid7(), "job_id": attempt["job_id"], "attempt_id": attempt["id"], "epoch": 1, "attempt": 1,
        "role": "trainer", "index": 0, "state": "EXITED", "node_id": None, "host": "h", "pid": 1, "endpoint": None,
        "port": None, "meeting_port": None, "exit_code": 0, "signal": None, "reason": "", "stream": stream, "cpus": 1,
        "gpus": 0, "memory_bytes": 1 << 30, "created_at": at, "state_at": at, "started_at": at, "finished_at": at,
        "graph_hash": None, "version": 4,
    }  # fmt: skip


def _events(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    before: str | None = None
    for state in STATES if job["state"] == "SUCCEEDED" else STATES[:1]:
        yield {
            "id": uuid7(), "at": job["created_at"], "kind": "job", "subject": job["id"], "job_id": job["id"],
            "from_state": before, "to_state": state, "reason": "", "detail": "",
        }  # fmt: skip
        before = state
