"""What is read and kept whole: graph documents, snapshots."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite

from penstock.protocol.states import ACTIVE_JOB
from penstock.protocol.stream import StreamGraph
from penstock_server.clock import Clock
from penstock_server.db import Database
from penstock_server.instruments import Instruments
from penstock_server.problems import NotFound, Problem
from penstock_server.schemas import api
from penstock_server.services.jobs import job_row
from penstock_server.tables import GraphRow, JobGraphRow, JobRow, NodeRow, ReplicaRow, SnapshotRow

_GZIP = b"\x1f\x8b"


class JobStorage:
    """Reads of what jobs left behind, and the store of snapshots."""

    def __init__(self, database: Database, clock: Clock, snapshots: Path) -> None:
        self._db, self._clock, self._snapshots = database, clock, snapshots

    async def count(self, meters: Instruments) -> None:
        """Set the gauges that count rows: jobs that have not ended, and nodes, by state."""
        active = JobRow.state.in_(ACTIVE_JOB)
        jobs = select(JobRow.state, func.count()).where(active).group_by(JobRow.state)
        nodes = select(NodeRow.state, func.count()).group_by(NodeRow.state)
        async with self._db.read() as session:
            for statement, gauge in ((jobs, meters.jobs), (nodes, meters.nodes)):
                gauge.clear()
                for state, number in await session.execute(statement):
                    gauge.labels(state).set(number)

    async def graphs(self, job_id: str) -> list[api.GraphUse]:
        """Return the graphs that a job used, oldest first."""
        statement = (
            select(JobGraphRow, GraphRow.program)
            .join(GraphRow, GraphRow.hash == JobGraphRow.hash)
            .where(JobGraphRow.job_id == job_id)
            .order_by(JobGraphRow.first_seen_at, JobGraphRow.hash)
        )
        async with self._db.read() as session:
            await job_row(session, job_id)
            pairs = (await session.execute(statement)).all()
        return [
            api.GraphUse(hash=use.hash, program=program, first_seen_at=use.first_seen_at, replica_id=use.replica_id)
            for use, program in pairs
        ]

    async def current_graphs(self, job_id: str) -> list[StreamGraph]:
        """Return which graph each replica of a job uses now."""
        statement = select(ReplicaRow.id, ReplicaRow.stream, ReplicaRow.graph_hash).where(ReplicaRow.job_id == job_id)
        async with self._db.read() as session:
            rows = (await session.execute(statement.order_by(ReplicaRow.id))).all()
        return [StreamGraph(replica_id=r, stream=s, hash=h) for r, s, h in rows if h is not None]

    async def graph(self, graph_hash: str, projects: Collection[str] | None = None) -> str:
        """Return the JSON of a graph document. `projects`: if a job of one of them used it. Raises NotFound."""
        statement = select(GraphRow).where(GraphRow.hash == graph_hash)
        if projects is not None:
            used = select(JobGraphRow.hash).join(JobRow, JobRow.id == JobGraphRow.job_id)
            statement = statement.where(GraphRow.hash.in_(used.where(JobRow.project.in_(projects))))
        async with self._db.read() as session:
            row = (await session.execute(statement)).scalar_one_or_none()
        if row is None:
            raise NotFound("graph", graph_hash)
        return row.document

    async def save_snapshot(self, body: AsyncIterator[bytes]) -> api.Snapshot:
        """Store a tar.gz under its SHA-256. The same bytes again change nothing."""
        with self._temporary() as (file, place):
            sha256, size = await _receive(body, file)
            place(sha256)
        async with self._db.write() as tx:
            insert = sqlite.insert if self._db.is_sqlite else postgresql.insert
            row = {"sha256": sha256, "size_bytes": size, "created_at": self._clock.now()}
            statement = insert(SnapshotRow).values(row).on_conflict_do_nothing().returning(SnapshotRow.sha256)
            tx.subject = (await tx.session.execute(statement)).scalar_one_or_none() or ""
        return api.Snapshot(sha256=sha256, size_bytes=size)

    @contextmanager
    def _temporary(self) -> Iterator[tuple[BinaryIO, Callable[[str], None]]]:
        """Open a file that is put in its place once its hash is known, or deleted."""
        self._snapshots.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=self._snapshots, suffix=".part")
        path = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:

                def place(sha256: str) -> None:
                    file.flush()
                    path.replace(self._snapshots / f"{sha256}.tar.gz")

                yield file, place
        finally:
            path.unlink(missing_ok=True)

    async def snapshot(self, sha256: str) -> Path:
        """Return the file of a snapshot. Raises NotFound."""
        async with self._db.read() as session:
            row = await session.get(SnapshotRow, sha256)
        if row is None:
            raise NotFound("snapshot", sha256)
        return self._snapshots / f"{row.sha256}.tar.gz"


async def _receive(body: AsyncIterator[bytes], file: BinaryIO) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    async for chunk in body:
        if size == 0 and chunk and not chunk.startswith(_GZIP[: len(chunk)]):
            raise Problem(422, "not_gzip", "the body is no gzip stream; send a tar.gz of the workdir")
        file.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    if size == 0:
        raise Problem(422, "not_gzip", "the body is empty; send a tar.gz of the workdir")
    return digest.hexdigest(), size
