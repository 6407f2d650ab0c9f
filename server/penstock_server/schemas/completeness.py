"""Bodies of the API: what became of a job's telemetry (`penstock.protocol.completeness`)."""

from __future__ import annotations

from pydantic import Field

from penstock.identity import Role
from penstock_server.schemas.api import Answer, Timestamp


class RowsGone(Answer):
    """Rows that are not shown, and why."""

    reason: str
    text: str = Field(description="the reason in words, to stand behind the number")
    rows: int


class CountedRows(Answer):
    """The rows of one kind: produced = shown + sampled_out + dropped + expired + pending + unexplained."""

    kind: str = Field(description="kind of frame: OP_EVENTS, OP_SUMS, SYNC, INPUT_EVENTS")
    produced: int
    shown: int = Field(description="in the recording")
    sampled_out: int = Field(description="of steps that were not sampled; in the sums")
    dropped: list[RowsGone]
    expired: list[RowsGone] = Field(description="recorded, and removed by retention since")
    pending: int = Field(description="not sent yet")
    unexplained: int = Field(description="produced and nowhere; below 0: shown and never produced. 0: all is well")


class ProcessCompleteness(Answer):
    """A process of the job, or one before it in its place."""

    replica_id: str
    role: Role
    index: int
    attempt: int
    stream: int = Field(description="of its telemetry frames")
    reported_at: Timestamp | None = Field(description="when the newest counts came; null: none ever did")
    unknown_since: Timestamp | None = Field(
        description="from then on more may have been produced, since the process was killed or is unreachable"
    )
    rows: list[CountedRows]


class TelemetryCompleteness(Answer):
    """What became of the telemetry of a job. Kinds without rows are left out."""

    job_id: str
    holds: bool = Field(description="nothing is unexplained")
    sentence: str = Field(description="the equation of the operator events, or of the first kind that has rows")
    notes: list[str] = Field(description="what does not hold, and what is unknown")
    rows: list[CountedRows]
    processes: list[ProcessCompleteness]
