"""What became of a job's telemetry: counts of its streams and what its recording has, added up. Reads only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from penstock.protocol.completeness import (
    COUNTED,
    EARLIER,
    REASONS,
    Account,
    StreamCounts,
    account,
    sentence,
    sum_of,
    unknown_since_ms,
)
from penstock.protocol.states import TERMINAL_REPLICA, ReplicaState
from penstock_server.schemas.completeness import CountedRows, ProcessCompleteness, RowsGone, TelemetryCompleteness
from penstock_server.services.jobs import Jobs
from penstock_server.streams.counts import Counts, of_stream
from penstock_server.streams.recorder import Recorder
from penstock_server.streams.removed import RowsByStream
from penstock_server.tables import ReplicaRow

_ENDED = {state.value for state in TERMINAL_REPLICA}


class Completeness:
    """Answers for one job at a time. Cost: O(streams), and a pass over the recording of a job that has ended."""

    def __init__(self, jobs: Jobs, recorder: Recorder, counts: Counts) -> None:
        self._jobs, self._recorder, self._counts = jobs, recorder, counts

    async def of(self, job_id: str) -> TelemetryCompleteness:
        """Return what became of a job's telemetry. Raises NotFound."""
        await self._jobs.get(job_id)
        replicas = await self._jobs.streams(job_id)
        counts = await self._counts.of_job(job_id)
        recorded, removed = await self._recorder.rows(job_id)
        continued = _continued(counts)
        accounts: list[Account] = []
        processes: list[ProcessCompleteness] = []
        for replica in replicas:
            mine = counts.get(replica.stream) or StreamCounts()
            found = _accounts(mine, replica, recorded, removed, continued.get(replica.stream, frozenset()))
            if found or mine.reports:
                accounts += found
                processes.append(_process(replica, mine, found))
        rows = [sum_of(kind.name, same) for kind in COUNTED if (same := [a for a in accounts if a.kind == kind.name])]
        return TelemetryCompleteness(
            job_id=job_id,
            holds=not any(one.unexplained for one in accounts),
            sentence=sentence(rows[0]) if rows else "",
            notes=_notes(processes),
            rows=[_counted(one) for one in rows],
            processes=processes,
        )


def _continued(counts: Mapping[int, StreamCounts]) -> dict[int, frozenset[str]]:
    """Return the processes that have a newer stream, by their older ones."""
    newest = {process: stream for stream, one in sorted(counts.items()) for process in one.reports}
    return {
        stream: frozenset(name for name in one.reports if name != EARLIER and newest[name] != stream)
        for stream, one in counts.items()
    }


def _accounts(
    counts: StreamCounts,
    replica: ReplicaRow,
    recorded: RowsByStream,
    removed: RowsByStream,
    continued: frozenset[str],
) -> list[Account]:
    stream, has_ended = replica.stream, replica.state in _ENDED
    rows, gone = of_stream(recorded, stream), of_stream(removed, stream)
    found = [account(counts, kind.name, rows, gone, ended=has_ended, continued=continued) for kind in COUNTED]
    return [one for one in found if one != Account(one.kind)]


def _process(replica: ReplicaRow, counts: StreamCounts, accounts: Sequence[Account]) -> ProcessCompleteness:
    is_gone = replica.state in _ENDED or replica.state == ReplicaState.UNKNOWN
    since = _time(unknown_since_ms(counts, ended=is_gone))
    if not counts.reports:  # an older process, or one whose counts were never stored
        since = replica.started_at or replica.created_at
    reported = [one.at_ms for one in counts.reports.values() if one.number >= 0]
    return ProcessCompleteness(
        replica_id=replica.id, role=replica.role, index=replica.index, attempt=replica.attempt,
        stream=replica.stream,
        reported_at=_time(max(reported, default=None)), unknown_since=since, rows=[_counted(one) for one in accounts],
    )  # fmt: skip


def _time(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC)


def _counted(one: Account) -> CountedRows:
    return CountedRows(
        kind=one.kind, produced=one.produced, shown=one.shown, sampled_out=one.sampled_out,
        dropped=_gone(one.dropped), expired=_gone(one.expired), pending=one.pending, unexplained=one.unexplained,
    )  # fmt: skip


def _gone(rows: Mapping[str, int]) -> list[RowsGone]:
    largest = sorted(rows.items(), key=lambda item: (-item[1], item[0]))
    return [RowsGone(reason=reason, text=REASONS.get(reason, reason), rows=count) for reason, count in largest]


def _notes(processes: Sequence[ProcessCompleteness]) -> list[str]:
    notes = []
    for one in processes:
        name = f"{one.role} {one.index} of attempt {one.attempt}"
        for rows in one.rows:
            if rows.unexplained > 0:
                notes.append(f"{name}: {rows.unexplained:,} rows of {rows.kind} are unaccounted for")
            elif rows.unexplained < 0:
                notes.append(f"{name}: {-rows.unexplained:,} rows of {rows.kind} are shown and were never counted")
        if one.unknown_since is not None:
            why = "its counts ended then" if one.reported_at is not None else "it has reported no counts"
            notes.append(f"{name}: unknown since {one.unknown_since:%H:%M:%S} UTC, as {why}")
    return notes
