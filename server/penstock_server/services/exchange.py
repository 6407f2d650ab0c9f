"""The exchange of a job with its parameter servers: the newest EXCHANGE frame of each process, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import structlog

from penstock.errors import PeerError
from penstock.protocol.exchange import ProcessRows, matrix, rows_of
from penstock.protocol.frames import Kind, decode, decode_header
from penstock.protocol.tables import Table, TableSums, joined, tables_of
from penstock_server.schemas import api, tables
from penstock_server.services.jobs import Jobs
from penstock_server.streams.recorder import Recorder

log = structlog.get_logger(__name__)


class Exchanges:
    """Reads what the recorder kept. A frame that does not hold what its kind promises is left out, and logged."""

    def __init__(self, jobs: Jobs, recorder: Recorder) -> None:
        self._jobs, self._recorder = jobs, recorder

    async def of(self, job_id: str) -> api.Exchange:
        """Return the exchange of a job's newest attempt. Raises NotFound."""
        return await self.as_of(await self._jobs.get(job_id))

    async def as_of(self, job: api.Job, *, age_ns: int = 0) -> api.Exchange:
        """Return the exchange as each process had reported it `age_ns` before its newest report."""
        frames = await self._recorder.newest(job.id, Kind.EXCHANGE, age_ns=age_ns)
        processes = _process_rows(job.replicas, frames)
        endpoints = {r.index: r.endpoint or "" for r in job.replicas if r.role == "pserver"}
        known = _in_order(endpoints)
        steps: dict[int, int] = {}
        for one in processes:
            if one.role == "trainer" and one.step:
                steps[one.index] = max(one.step, steps.get(one.index, 0))
        cells = [api.ExchangeCell(**asdict(cell)) for cell in matrix(processes, known)]
        return api.Exchange(job_id=job.id, attempt=job.attempt, pservers=known, steps=steps, cells=cells)

    async def tables_of(self, job_id: str) -> tables.SparseTables:
        """Return the sparse tables of a job's newest attempt. Raises NotFound."""
        job = await self._jobs.get(job_id)
        servers = {one.stream: one for one in job.replicas if one.role == "pserver"}
        parts: list[tuple[int, TableSums]] = []
        for data in await self._recorder.newest(job_id, Kind.EXCHANGE):
            replica = servers.get(decode_header(data).stream)
            if replica is None:
                continue
            try:
                parts += [(replica.index, one) for one in tables_of(decode(data).body)]
            except PeerError as error:
                log.warning("tables not shown", job=job_id, stream=replica.stream, error=str(error))
        return tables.SparseTables(job_id=job.id, attempt=job.attempt, tables=[_table(one) for one in joined(parts)])


def _table(one: Table) -> tables.SparseTable:
    parts = [
        tables.TablePart(
            pserver=index, rows=part.rows, held_bytes=part.held_bytes, pulled=part.pulled, absent=part.absent,
            pushed=part.pushed,
        )
        for index, part in one.parts.items()
    ]  # fmt: skip
    hot = [tables.HotId(id=str(found.id), share=found.share, pserver=found.pserver) for found in one.hot]
    plain = {name: getattr(one, name) for name in tables.SparseTable.model_fields if name not in ("parts", "hot")}
    return tables.SparseTable(**plain, hot=hot, parts=parts)


def _in_order(endpoints: Mapping[int, str]) -> list[str]:
    """Return the endpoints of pserver 0, 1, …; none if one is missing: trainers' order counts then.

    Processes that a person starts by hand may register without an endpoint, or not at all.
    """
    found = [endpoints.get(index, "") for index in range(len(endpoints))]
    return found if all(found) else []


def _process_rows(replicas: Sequence[api.Replica], frames: Sequence[bytes]) -> list[ProcessRows]:
    by_stream = {replica.stream: replica for replica in replicas}
    processes = []
    for data in frames:
        stream = decode_header(data).stream
        replica = by_stream.get(stream)
        if replica is None:
            continue
        try:
            frame = decode(data)  # it was recorded undecoded
            peers, rows = rows_of(frame.body)
        except PeerError as error:
            log.warning("exchange not shown", job=replica.job_id, stream=stream, error=str(error))
            continue
        processes.append(ProcessRows(replica.role, replica.index, frame.step, rows, peers))
    return processes
