"""The part of a history that the server holds: its event log, rows, audit log and series, and the logs of replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession
from tools.chaos.counting import SERIES
from tools.chaos.history import AttemptRecord, Event, History, JobRecord, LogSeen, NodeRecord, ReplicaRecord, SeriesSeen

from penstock.protocol.states import TERMINAL_REPLICA
from penstock_server.db import Database
from penstock_server.tables import AttemptRow, AuditRow, EventRow, JobRow, MetricRow, NodeRow, ReplicaRow


async def read_history(database: Database) -> History:
    """Return what the database holds, as of one moment."""
    # Identifiers of events follow the wall clock, which jumps; SQLite has the order in which rows were written.
    order = text("rowid") if database.is_sqlite else EventRow.id
    async with database.read() as session:
        events = (await session.execute(select(EventRow).order_by(order))).scalars().all()
        jobs = await _rows(session, JobRow)
        replicas = await _rows(session, ReplicaRow)
        nodes = await _rows(session, NodeRow)
        attempts = await _rows(session, AttemptRow)
        subjects = (await session.execute(select(AuditRow.subject))).scalars().all()
        counted = MetricRow.series.startswith(SERIES)
        points = (await session.execute(select(MetricRow.series, MetricRow.step, MetricRow.value).where(counted))).all()
    return History(
        events=tuple(map(_event, events)),
        jobs=tuple(map(_job, jobs)),
        replicas=tuple(map(_replica, replicas)),
        nodes=tuple(NodeRecord(n.id, n.host, n.state, (n.cpus, n.gpus, n.memory_bytes)) for n in nodes),
        attempts=tuple(AttemptRecord(a.job_id, a.number, a.epoch) for a in attempts),
        audited=frozenset(subjects),
        series=_series(jobs, replicas, [(name, step if step == value else -1) for name, step, value in points]),
    )


def _series(
    jobs: Sequence[JobRow], replicas: Sequence[ReplicaRow], points: Sequence[tuple[str, int]]
) -> tuple[SeriesSeen, ...]:
    """Return the series of counting processes. `points`: name and step; -1 of one whose value is not its step."""
    steps: dict[str, list[int]] = defaultdict(list)
    for name, step in points:
        steps[name.removeprefix(SERIES).partition(".")[0]].append(step)
    lost = {job.id: sum(job.lost.get(kind, 0) for kind in ("FRAMES", "SCALARS")) for job in jobs}
    return tuple(
        SeriesSeen(one.job_id, one.attempt, tuple(sorted(steps[one.id])), (), lost[one.job_id], one.id)
        for one in replicas
        if one.id in steps
    )


async def _rows(session: AsyncSession, table: Any) -> Sequence[Any]:
    return (await session.execute(select(table))).scalars().all()


def _event(row: EventRow) -> Event:
    at = row.at.timestamp()
    return Event(at, row.kind, row.subject, row.job_id, row.from_state, row.to_state, row.reason, row.detail)


def _job(row: JobRow) -> JobRecord:
    roles = ("trainers", "pservers")
    return JobRecord(
        id=row.id,
        state=row.state,
        attempt=row.attempt,
        epoch=row.epoch,
        restarts=row.restarts,
        max_restarts=row.spec.get("restart", {}).get("max_restarts", 0),
        size=sum(row.spec.get(role, {}).get("count", 0) for role in roles),
        why=row.why,
        is_managed=row.kind == "managed",
        window_s=row.spec.get("restart", {}).get("window_s"),
        budgets={
            name: (one["max_restarts"], one["window_s"])
            for name, one in row.spec.get("restart", {}).get("budgets", {}).items()
            if one is not None
        },
    )


def _replica(row: ReplicaRow) -> ReplicaRecord:
    return ReplicaRecord(
        id=row.id,
        job_id=row.job_id,
        attempt=row.attempt,
        epoch=row.epoch,
        role=row.role,
        index=row.index,
        node_id=row.node_id or "",
        state=row.state,
        amounts=(row.cpus, row.gpus, row.memory_bytes),
        ports=tuple(port for port in (row.port, row.meeting_port) if port is not None),
        exit_code=row.exit_code,
    )


def with_logs(history: History, jobs_dir: Path, *, is_over: bool) -> History:
    """Add the logs that the server holds in `jobs_dir`. `is_over`: agents have had time to send all of them."""
    logs = []
    for replica in history.replicas:
        path = jobs_dir / replica.job_id / "logs" / f"{replica.id}.log"
        content = path.read_bytes() if path.exists() else b""
        ended = replica.state in TERMINAL_REPLICA
        logs.append(LogSeen(replica.id, numbers_of(content), is_over=is_over and ended))
    return replace(history, logs=tuple(logs))


def numbers_of(content: bytes) -> tuple[int, ...]:
    """Return the numbers of the lines of a log; -1 for one that is none. Lines that the agent adds do not count."""
    whole = content[: content.rfind(b"\n") + 1].decode(errors="replace")
    lines = [line for line in whole.splitlines() if not line.startswith("penstock:")]
    return tuple(int(line) if line.isdecimal() else -1 for line in lines)
