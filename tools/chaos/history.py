"""What a control plane did in a run: its event log and rows, and what an observer outside of it saw.

`History` is plain data. `export` reads the part that the database has, `witness` the part that the processes of jobs
wrote themselves; `invariants.check` judges both. Times are seconds since 1970 on one machine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """One row of the event log, in the order of the log. `kind`: job, replica or node. `before`: None of a creation."""

    at: float
    kind: str
    subject: str
    job_id: str | None
    before: str | None
    after: str
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as its row has it at the end. `size`: replicas of an attempt; `window_s`: in which restarts count.

    `budgets`: of single classes of failures, how many restarts they may take, and in which window.
    """

    id: str
    state: str
    attempt: int
    epoch: int
    restarts: int
    max_restarts: int
    size: int
    why: str
    is_managed: bool = True
    window_s: float | None = None
    budgets: Mapping[str, tuple[int, float | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica as its row has it at the end. `amounts`: CPUs, GPUs, bytes of memory. `ports`: at which it listens."""

    id: str
    job_id: str
    attempt: int
    epoch: int
    role: str
    index: int
    node_id: str
    state: str
    amounts: tuple[int, int, int]
    ports: tuple[int, ...] = ()
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as its row has it at the end. `amounts`: CPUs, GPUs, bytes of memory."""

    id: str
    host: str
    state: str
    amounts: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """An attempt of a job."""

    job_id: str
    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """A process of a replica that ran: from its first sign of life to its last. `wrote`: lines that it had written."""

    replica_id: str
    pid: int
    began: float
    last: float
    wrote: int = 0


@dataclass(frozen=True, slots=True)
class LogSeen:
    """The log of a replica that the server holds. `numbers`: of its lines, in order; -1 of a line that is none.

    `is_over`: nothing more comes, so that all that its processes wrote has to be there.
    """

    replica_id: str
    numbers: tuple[int, ...]
    is_over: bool


@dataclass(frozen=True, slots=True)
class CheckpointSeen:
    """That a process saw a checkpoint committed, or restored one (`is_restored`), in the folder of its node."""

    job_id: str
    node_id: str
    at: float
    step: int
    is_complete: bool = True
    is_restored: bool = False


@dataclass(frozen=True, slots=True)
class SeriesSeen:
    """A series of an attempt: the steps that the server holds, those that were written, and rows counted as lost.

    `replica_id`: whose alone it is, if it is one's. `unsent`: the newest ones, which a process that was killed had no
    time to send.
    """

    job_id: str
    attempt: int
    stored: tuple[int, ...]
    written: tuple[int, ...]
    lost: int
    replica_id: str = ""
    unsent: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PointsSeen:
    """Points of a replica's series that a process has logged: when, and of which step.

    `last`: its last sign of life. `is_closed`: it closed its telemetry, and was not killed before.
    """

    replica_id: str
    points: tuple[tuple[float, int], ...]
    last: float
    is_closed: bool


@dataclass(frozen=True, slots=True)
class Outage:
    """That a part could not work from `begin` to `end`. `node_id`: whose agent or network; None: server or database."""

    node_id: str | None
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of the run, in seconds: the server's settings, and what a busy machine adds to each (`slack_s`)."""

    ttl_s: float = 15.0
    grace_s: float = 60.0
    stop_s: float = 35.0
    slack_s: float = 20.0


@dataclass(frozen=True, slots=True)
class History:
    """All of a run. `is_final`: everything was given time to end, so that what should come at last has to be there."""

    events: tuple[Event, ...] = ()
    jobs: tuple[JobRecord, ...] = ()
    replicas: tuple[ReplicaRecord, ...] = ()
    nodes: tuple[NodeRecord, ...] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    audited: frozenset[str] = frozenset()
    processes: tuple[ProcessSeen, ...] = ()
    logs: tuple[LogSeen, ...] = ()
    checkpoints: tuple[CheckpointSeen, ...] = ()
    series: tuple[SeriesSeen, ...] = ()
    outages: tuple[Outage, ...] = ()
    limits: Limits = field(default_factory=Limits)
    ended_at: float = 0.0
    is_final: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """A breach of an invariant. `invariant`: I1 … I12; `subject`: identifier of what breaks it."""

    invariant: str
    subject: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.what}"
