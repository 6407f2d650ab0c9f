"""Bodies of the API: times of a job's operators."""

from __future__ import annotations

from pydantic import Field

from penstock_server.schemas.api import Answer


class OperatorTime(Answer):
    """An operator of a graph, and how long it ran in the newest part of the recording."""

    op: int = Field(description="index in the graph document")
    name: str
    role: str = Field(description="forward, backward, optimize, communication, input, …")
    module: str
    count: int
    total_ns: int
    sampled: int = Field(description="runs in sampled steps, of which the percentiles are")
    p50_ns: int | None = Field(description="which half of the sampled runs do not exceed; null: none was sampled")
    p99_ns: int | None


class OperatorTimes(Answer):
    """Operators of the newest attempt that ran, of the trainer with the lowest number that trains."""

    job_id: str
    attempt: int
    trainer: int | None = Field(description="null: nothing of a graph that trains is recorded")
    graph: str | None
    operators: list[OperatorTime]
