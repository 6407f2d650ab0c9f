"""Rows of the control plane. `version` guards every update of a row that has states: a stale write fails.

`state` of jobs, replicas and nodes is written by `services.transitions` and nothing else. Operator
events are never rows: they lie in segment files. Identifiers are UUIDv7 text, so they sort by age.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, LargeBinary, String, Text, UniqueConstraint
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class Utc(TypeDecorator[datetime]):
    """A time in UTC. SQLite keeps no zone, so it is taken off and put back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"time {value!r} has no zone")
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Root of the rows."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        datetime: Utc(),
        dict[str, Any]: JSON(),
        list[str]: JSON(),
        list[int]: JSON(),
        list[dict[str, str]]: JSON(),
        str: String(255),
    }


_ID = String(36)


class JobRow(Base):
    """A job. `epoch` fences: the newest number that was given to a process of it, 0 before the first attempt.

    `attempt`: number of the latest attempt, 0 before the first. A trainer that is started again within an attempt gets
    a new epoch too, so epochs run ahead of attempts. `next_attempt_at`: before this a job that recovers is not placed.
    `restarted_at`: the restarts that count in the job's `restart.window_s` (`services.budget`); none without a window.
    `restarts_by_class`: those that were taken from `restart.budgets`; `restarts` has them, too. `ends_by`: when the
    attempt has taken the job's `max_duration_s`, or the wait for one its `max_wait_s`, by the wall clock; or None.
    `lost`: telemetry that never came, whole frames ("FRAMES") or rows by kind of frame.
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_state_id", "state", "id"),
        Index("ix_jobs_state_project_priority_id", "state", "project", "priority", "id"),
        Index("ix_jobs_name_id", "name", "id", postgresql_ops={"name": "varchar_pattern_ops"}),  # for LIKE 'start%'
        Index("ix_jobs_project_id", "project", "id"),
    )
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str]
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    project: Mapped[str] = mapped_column(String(63), default="default", server_default="default")
    priority: Mapped[int] = mapped_column(default=0, server_default="0")
    reason: Mapped[str] = mapped_column(String(32), default="")
    reason_detail: Mapped[str] = mapped_column(Text, default="")
    why: Mapped[str] = mapped_column(Text, default="")
    spec: Mapped[dict[str, Any]]
    epoch: Mapped[int] = mapped_column(default=0)
    attempt: Mapped[int] = mapped_column(default=0)
    restarts: Mapped[int] = mapped_column(default=0)
    restarted_at: Mapped[list[str]] = mapped_column(default=list, server_default="[]")
    restarts_by_class: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    next_attempt_at: Mapped[datetime | None]
    ends_by: Mapped[datetime | None]
    created_at: Mapped[datetime]
    state_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    eta_s: Mapped[float | None]
    latest: Mapped[dict[str, Any]] = mapped_column(default=dict)
    lost: Mapped[dict[str, Any]] = mapped_column(default=dict)
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - a ClassVar would clash with the base class


class ProjectRow(Base):
    """A project with a share or quotas of its own (`fairness.Terms`); others need no row."""

    __tablename__ = "projects"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    share: Mapped[float]
    max_cpus: Mapped[int | None]
    max_gpus: Mapped[int | None]
    max_jobs: Mapped[int | None]


class AttemptRow(Base):
    """One try of a job; a retry is a new row with a higher epoch. `secret`: what its processes show each other."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("job_id", "epoch", name="uq_attempts_job_id_epoch"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"))
    number: Mapped[int]
    epoch: Mapped[int]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    reason: Mapped[str] = mapped_column(String(32), default="")
    secret: Mapped[str] = mapped_column(String(64), default="")


class NodeRow(Base):
    """A machine whose agent joined. `wanted`: what an administrator asked for ('run', 'cordon', 'drain').

    `drain_by`: when what still runs there is preempted, by the wall clock; None if a drain waits for it. `reason`,
    `reason_detail`: for which its state is as it is.
    `address`: how other nodes reach it, as its agent reports; '' if it does not. `ports`: those that pservers may get.
    `findings`: warnings and errors about the machine, from when its agent connected last (`MachineFinding`). `labels`:
    as of then, by key.
    """

    __tablename__ = "nodes"
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str] = mapped_column(index=True)
    host: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    wanted: Mapped[str] = mapped_column(String(8), default="run")
    drain_by: Mapped[datetime | None]
    reason: Mapped[str] = mapped_column(String(32), default="", server_default="")
    reason_detail: Mapped[str] = mapped_column(Text, default="", server_default="")
    cpus: Mapped[int]
    gpus: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    agent_version: Mapped[str] = mapped_column(String(64), default="")
    boot_id: Mapped[str] = mapped_column(String(64), default="")
    address: Mapped[str] = mapped_column(default="")
    ports: Mapped[list[int]] = mapped_column(default=list)
    findings: Mapped[list[dict[str, str]]] = mapped_column(default=list)
    labels: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    joined_at: Mapped[datetime]
    state_at: Mapped[datetime]
    last_seen_at: Mapped[datetime | None]
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - a ClassVar would clash with the base class


class ReplicaRow(Base):
    """One process of one attempt: trainer or pserver. `stream` stands for it in telemetry frames.

    `meeting_port`: besides its own, where the first rank of a collective job lets `torch.distributed` meet.
    Of several with one role and index in one attempt the newest counts: the others were replaced by it.
    """

    __tablename__ = "replicas"
    __table_args__ = (
        Index("ix_replicas_job_id_attempt", "job_id", "attempt"),
        Index("ix_replicas_node_id_state", "node_id", "state"),
        Index("ix_replicas_state_job_id", "state", "job_id"),
    )
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt_id: Mapped[str] = mapped_column(_ID, ForeignKey("attempts.id", ondelete="CASCADE"))
    epoch: Mapped[int]
    attempt: Mapped[int]
    role: Mapped[str] = mapped_column(String(16))
    index: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    node_id: Mapped[str | None] = mapped_column(_ID, ForeignKey("nodes.id"))
    host: Mapped[str] = mapped_column(default="")
    pid: Mapped[int | None]
    endpoint: Mapped[str | None]
    port: Mapped[int | None]
    meeting_port: Mapped[int | None]
    exit_code: Mapped[int | None]
    signal: Mapped[int | None]
    reason: Mapped[str] = mapped_column(Text, default="")
    stream: Mapped[int] = mapped_column(BigInteger, unique=True)
    cpus: Mapped[int] = mapped_column(default=0)
    gpus: Mapped[int] = mapped_column(default=0)
    memory_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    created_at: Mapped[datetime]
    state_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    graph_hash: Mapped[str | None] = mapped_column(String(64))
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - a ClassVar would clash with the base class


class TokenRow(Base):
    """A secret that opens something; only its keyed hash is kept. `kind`: user, node, join, login, session.

    `projects`: the role in each project that it is for; None: its scopes hold in all. `made_by`: of a login code and a
    session, the token that asked for it, with which they end.
    """

    __tablename__ = "tokens"
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    name: Mapped[str]
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    scopes: Mapped[list[str]]
    projects: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    made_by: Mapped[str | None] = mapped_column(_ID)
    node_id: Mapped[str | None] = mapped_column(_ID, ForeignKey("nodes.id"))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    used_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class EventRow(Base):
    """One change of state, written in the same transaction as the change."""

    __tablename__ = "events"
    __table_args__ = (Index("ix_events_job_id_id", "job_id", "id"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    at: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(_ID, index=True)
    job_id: Mapped[str | None] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"))
    from_state: Mapped[str | None] = mapped_column(String(16))
    to_state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(64), default="")
    detail: Mapped[str] = mapped_column(Text, default="")


class AuditRow(Base):
    """A request that changed something, written with the change; or `count` refused ones of one peer.

    `route`: the template of the path; `subject`: identifier of what was changed or made; `token_id`: kept also when the
    token is gone, so it is no foreign key.
    """

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_at_id", "at", "id"), Index("ix_audit_subject_at_id", "subject", "at", "id"))
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    at: Mapped[datetime]
    token_id: Mapped[str | None] = mapped_column(_ID)
    token_name: Mapped[str] = mapped_column(Text)
    peer: Mapped[str] = mapped_column(String(64))
    method: Mapped[str] = mapped_column(String(16))
    route: Mapped[str] = mapped_column(String(255))
    subject: Mapped[str] = mapped_column(Text)
    status: Mapped[int]
    request_id: Mapped[str] = mapped_column(String(64))
    count: Mapped[int]


class SeriesRow(Base):
    """A series of one attempt of a job. `first_step`: its lowest step, from which on it replaces earlier attempts'."""

    __tablename__ = "series"
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    series: Mapped[str] = mapped_column(String(128), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_step: Mapped[int] = mapped_column(BigInteger)


class MetricRow(Base):
    """One point of a series. The whole key makes a repeated insert harmless."""

    __tablename__ = "metric_points"
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    series: Mapped[str] = mapped_column(String(128), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    time_ns: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    value: Mapped[float]


class TierRow(Base):
    """The lowest and the highest point of a series within `TIERS[level]` of time: a long series in few rows.

    `bucket`: number of the interval since 1970. Both points are written again and again as points come; the same
    points in any order, any number of times, make the same row.
    """

    __tablename__ = "metric_tiers"
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    series: Mapped[str] = mapped_column(String(128), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    bucket: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    low_time_ns: Mapped[int] = mapped_column(BigInteger)
    low_step: Mapped[int] = mapped_column(BigInteger)
    low: Mapped[float]
    high_time_ns: Mapped[int] = mapped_column(BigInteger)
    high_step: Mapped[int] = mapped_column(BigInteger)
    high: Mapped[float]


class MediaRow(Base):
    """A table or a histogram that a job logged. `number`: of its name, from 1; `content`: JSON, deflated.

    `size_bytes`: of the JSON; `stored_bytes`: of `content`. The unique columns make a repeated insert harmless.
    """

    __tablename__ = "media"
    __table_args__ = (UniqueConstraint("job_id", "name", "attempt", "step", "time_ns"),)
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(128))
    attempt: Mapped[int]
    step: Mapped[int] = mapped_column(BigInteger)
    time_ns: Mapped[int] = mapped_column(BigInteger)
    number: Mapped[int]
    type: Mapped[str] = mapped_column(String(16))
    size_bytes: Mapped[int]
    stored_bytes: Mapped[int]
    content: Mapped[bytes] = mapped_column(LargeBinary)


class GraphRow(Base):
    """A graph document; immutable, addressed by its hash."""

    __tablename__ = "graphs"
    hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    program: Mapped[str] = mapped_column(Text)
    document: Mapped[str] = mapped_column(Text)
    first_seen_at: Mapped[datetime]


class JobGraphRow(Base):
    """That a replica of a job used a graph."""

    __tablename__ = "job_graphs"
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    replica_id: Mapped[str] = mapped_column(_ID, ForeignKey("replicas.id", ondelete="CASCADE"), primary_key=True)
    hash: Mapped[str] = mapped_column(String(64), ForeignKey("graphs.hash"), primary_key=True)
    first_seen_at: Mapped[datetime]


class SnapshotRow(Base):
    """An uploaded workdir; its bytes lie in `state_dir/snapshots`."""

    __tablename__ = "snapshots"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]


class IdempotencyRow(Base):
    """What a write with an `Idempotency-Key` made, for 24 hours."""

    __tablename__ = "idempotency_keys"
    token_id: Mapped[str] = mapped_column(_ID, primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[datetime]


class StreamCountsRow(Base):
    """What became of the telemetry of one stream. `counts`: `StreamCounts.fields` of `protocol.completeness`, as JSON.

    Text, since many are written at once, as the driver takes them (`bulk`).
    """

    __tablename__ = "stream_counts"
    stream: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(_ID, ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    counts: Mapped[str] = mapped_column(Text)


class CounterRow(Base):
    """A number that only grows, such as the last stream given out."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


class WebhookRow(Base):
    """Where changes of jobs' states are posted to. `failures`: in a row; `secret`: what deliveries are signed with.

    `next_at`: before this nothing is sent; `disabled_at`: since when nothing is, and nothing recorded; `reason`: why.
    """

    __tablename__ = "webhooks"
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[str]]
    project: Mapped[str | None] = mapped_column(String(63))
    secret: Mapped[str]
    created_at: Mapped[datetime]
    failures: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    reason: Mapped[str] = mapped_column(Text, default="")


class WebhookDeliveryRow(Base):
    """The outbox: what a webhook is to receive, from the transaction that made it; and, for a while, what it has."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_webhook_id_delivered_at_id", "webhook_id", "delivered_at", "id"),
        Index("ix_webhook_deliveries_webhook_id_id", "webhook_id", "id"),
    )
    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    webhook_id: Mapped[str] = mapped_column(_ID, ForeignKey("webhooks.id", ondelete="CASCADE"))
    type: Mapped[str] = mapped_column(String(32))
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(index=True)
    attempts: Mapped[int] = mapped_column(default=0)
    delivered_at: Mapped[datetime | None]
    status: Mapped[int | None]
    error: Mapped[str] = mapped_column(Text, default="")
