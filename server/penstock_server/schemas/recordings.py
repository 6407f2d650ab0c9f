"""A recording in full, as the REST API answers it."""

from __future__ import annotations

from pydantic import Field

from penstock.identity import Role
from penstock_server.schemas.api import Answer, Timestamp


class RecordedProcess(Answer):
    """A running process of the job, and whether its agent was asked."""

    replica_id: str
    role: Role
    index: int
    error: str = Field(description="why it does not record in full, and what to do; empty if it was asked to")


class FullRecording(Answer):
    """For these seconds every step is sent whole, as far as its process, agent and server keep up: gaps are counted."""

    job_id: str
    asked_at: Timestamp
    seconds: int
    processes: list[RecordedProcess]
