"""What the REST API takes and gives. OpenAPI, and with it the TypeScript types, comes from here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, StrictBool

from penstock.identity import Role
from penstock.protocol.jobspec import JobSpec, Strict, SubmittedSpec, Text
from penstock.protocol.states import JobState, NodeState, ReplicaState


def iso(value: datetime) -> str:
    """Return ISO 8601 in UTC with microseconds."""
    return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Timestamp = Annotated[datetime, PlainSerializer(iso, return_type=str), Field(json_schema_extra={"format": "date-time"})]
T = TypeVar("T")


class Answer(BaseModel):
    """Base of what the server gives."""

    model_config = ConfigDict(frozen=True)


class Request(Strict):
    """Base of what the server takes."""


class Page(Answer, Generic[T]):
    """One page of a list. `next_page_token`: null on the last page."""

    items: list[T]
    next_page_token: str | None = None


class Progress(Answer):
    """Progress that a job reports."""

    done: float
    total: float
    unit: str = ""


class Replica(Answer):
    """One process of a job: trainer or pserver."""

    id: str
    job_id: str
    attempt: int
    epoch: int
    role: Role
    index: int
    state: ReplicaState
    node_id: str | None
    host: str
    pid: int | None
    endpoint: str | None
    exit_code: int | None
    signal: int | None
    reason: str
    stream: int
    started_at: Timestamp | None
    finished_at: Timestamp | None
    graph_hash: str | None


class Job(Answer):
    """A job, with the replicas of its current attempt."""

    id: str
    name: str
    kind: Literal["managed", "attached"]
    state: JobState
    reason: str
    reason_detail: str
    spec: JobSpec
    epoch: int
    attempt: int
    restarts: int = Field(description="processes and attempts that were started again so far")
    restarts_left: int = Field(description="of the job's restart.max_restarts, in its restart.window_s")
    restarts_left_by_class: dict[str, int] = Field(description="of the job's restart.budgets, by class")
    next_attempt_at: Timestamp | None = Field(description="before this a job that recovers is not placed again")
    created_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None
    progress: Progress | None
    eta_s: float | None
    latest: dict[str, float]
    lost: dict[str, int] = Field(
        description="telemetry that never came: whole frames (FRAMES), or rows that were dropped, by kind of frame"
    )
    why: str
    replicas: list[Replica]
    version: int


class Submission(Request):
    """A job to run."""

    spec: SubmittedSpec = Field(
        examples=[
            {"name": "digits", "entrypoint": ["python", "train.py"]},
            {
                "name": "clicks",
                "entrypoint": ["python", "train.py"],
                "mode": "pserver",
                "trainers": {"count": 2},
                "pservers": {"count": 2, "memory": "2GiB"},
            },
        ]
    )


class PlannedNode(Answer):
    """What a plan says of one node. `replicas`: of the job, that would go there."""

    id: str
    name: str
    state: NodeState
    replicas: int
    reason: str


class Plan(Answer):
    """What would become of a job that is submitted now."""

    would_start: bool
    why: str
    nodes: list[PlannedNode]


class ProjectTerms(Request):
    """What a project may use. `max_…`: of what its replicas hold at once; null without a limit."""

    share: Annotated[float, Field(ge=0.001, le=1000, description="among projects that wait: how much is its due")] = 1.0
    max_cpus: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    max_gpus: Annotated[int | None, Field(ge=0, le=10_000_000)] = None
    max_jobs: Annotated[int | None, Field(ge=0, le=10_000_000)] = None


class Project(Answer):
    """A project: its terms, what its replicas hold now, and how many of its jobs run and wait."""

    name: str
    share: float
    max_cpus: int | None
    max_gpus: int | None
    max_jobs: int | None
    cpus_used: int
    gpus_used: int
    memory_used_bytes: int
    jobs: int
    waiting: int
    etag: str = Field(description="for If-Match of a change: a change in between is then refused with 412")


class Event(Answer):
    """One change of state."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    id: str
    at: Timestamp
    kind: Literal["job", "replica", "node"]
    subject: str
    from_: str | None = Field(alias="from")
    to: str
    reason: str
    detail: str


class LogChunk(Answer):
    """A piece of a replica's log, by byte offset. `eof`: the replica ended and this reaches its end."""

    replica_id: str
    offset: int
    next_offset: int
    text: str
    eof: bool


class Series(Answer):
    """Points of one series, by time."""

    step: list[int]
    time_ns: list[int]
    value: list[float]


class Metrics(Answer):
    """Series by name."""

    series: dict[str, Series]


class ExchangeCell(Answer):
    """What a trainer and a pserver exchanged of one block since the attempt began. Block '': what belongs to none."""

    trainer: int
    pserver: int
    block: str
    calls: int
    sent_bytes: int
    received_bytes: int
    wait_ns: int
    retries: int
    staleness: int
    merges: int = Field(description="gradients that the trainer merged into others before sending")
    joined: int = Field(description="gradients that the pserver joined with others into one update")


class Exchange(Answer):
    """The exchange between the trainers and the pservers of a job. `pservers`: their endpoints, by index."""

    job_id: str
    attempt: int
    pservers: list[str]
    steps: dict[int, int] = Field(description="newest step of each trainer that has any")
    cells: list[ExchangeCell]


class Finding(Answer):
    """One cause of the time that a step takes."""

    cause: str = Field(
        description="server, servers, table, link, way, trainer, input, exchange, idle, … or healthy, stalled"
    )
    sentence: str
    share: float = Field(description="of the time from the beginning of a step to that of the next")
    ms: float = Field(description="of each step")
    place: str = Field(description="a process, a parameter or an operator; '' if none")
    tab: str = Field(description="the dashboard's view of the evidence")
    op: int | None = Field(description="operator of `graph`")
    graph: str | None
    query: dict[str, str] = Field(description="of the view's address: metric, table, pin, step")


class Diagnosis(Answer):
    """Why a job is as fast as it is: findings, the largest first; none before a step was reported."""

    job_id: str
    attempt: int
    over: bool = Field(description="the job has ended: these are its last steps")
    findings: list[Finding]


class AdvisedSetting(Answer):
    """What a step is predicted to take under one setting. `env`: the variables that ask a job for it."""

    name: str
    num_threads: int = Field(description="0: four a replica, as many at once as there are replicas")
    cpu_num: int = Field(description="replicas of the program")
    reduce_strategy: Literal["AllReduce", "Reduce"]
    bucket_mb: float = Field(description="FLAGS_fuse_parameter_memory_size; 0: one bucket")
    workers: int = Field(description="operators that run at once")
    intra_op_threads: int = Field(description="threads of each operator")
    step_ms: float
    samples_per_s: float
    busy: float = Field(description="share of the workers' time in operators")
    busy_ms: list[float] = Field(description="of a step, by worker")
    path: list[str] = Field(description="operators that bound the step, the longest first")
    current: bool
    reason: str
    env: dict[str, str]


class AdvisedCluster(Answer):
    """What a job is predicted to do with other servers and trainers, in another mode, over another link."""

    name: str
    pservers: int
    trainers: int
    mode: Literal["sync", "half_async", "async", "geo"]
    link_gbit: float | None = Field(
        description="Gbit/s of each host's link, of the current setting an estimate; null: one host"
    )
    shares_cores: bool = Field(description="all replicas share the cores of one host")
    step_ms: float = Field(description="from the beginning of a trainer's step to that of the next")
    wait_ms: float = Field(description="of it, for links, servers and other trainers")
    rows: int = Field(description="of a step, all trainers")
    samples_per_s: float = Field(description="of all trainers")
    current: bool
    can_run: bool = Field(description="a job's specification can ask for it; mode and link are not part of one")
    reason: str


class Advice(Answer):
    """Settings of a job ranked by their predicted step time, simulated from its recorded steps; the fastest first."""

    job_id: str
    attempt: int
    graph: str = Field(description="hash of the graph that was simulated")
    sampled_steps: int = Field(description="whole steps that the operators' times are medians of")
    cores: int
    step_ms: float = Field(description="measured, under the current setting")
    options: list[AdvisedSetting]
    left_out: list[str] = Field(description="names of settings whose graph is too large for the server to simulate")
    clusters: list[AdvisedCluster] = Field(description="of a job with parameter servers; most samples/s first")
    clusters_note: str = Field(description="what these predictions rest on, or why there are none; '' without servers")


class GraphUse(Answer):
    """That a replica of a job used a graph."""

    hash: str
    program: str
    first_seen_at: Timestamp
    replica_id: str


class Items(Answer, Generic[T]):
    """A list that is never paged."""

    items: list[T]


class NodeFinding(Answer):
    """A warning or an error about a node's machine, and what to do; `penstock doctor` prints all on the machine."""

    name: str
    level: Literal["warning", "error"]
    detail: str
    advice: str


class NodeClock(Answer):
    """How far a node's wall clock is ahead of the server's, right within ± `error_ms`."""

    offset_ms: float
    error_ms: float


class Node(Answer):
    """A machine whose agent joined. `address`: at which other nodes reach it; `replicas`: on it now.

    `findings`: as of when its agent connected last. `clock`: None until its agent has had two heartbeats answered.
    `reason`, `reason_detail`: why its state is as it is.
    """

    id: str
    name: str
    host: str
    address: str
    state: NodeState
    reason: str
    reason_detail: str
    drain_by: Timestamp | None = Field(description="while it drains: when what still runs there is preempted")
    drain_left_s: float | None = Field(description="seconds until then, when this was answered")
    cpus: int
    gpus: int
    memory_bytes: int
    cpus_used: int
    replicas: int
    last_seen_at: Timestamp | None
    version: str
    findings: list[NodeFinding]
    labels: dict[str, str] = Field(description="by key, as of when its agent connected last")
    etag: str = Field(description="for If-Match of a change: a change in between is then refused with 412")
    clock: NodeClock | None


class NodeDrain(Request):
    """How a node is drained."""

    deadline_s: Annotated[float | None, Field(ge=0, le=366 * 86400)] = Field(
        None, description="seconds after which what still runs there is preempted; null: it is waited for"
    )


PilotState = Literal["PENDING", "RUNNING", "ENDING"]


class PilotReport(Request):
    """One pilot, as the scheduler that runs it describes it. `name`: of the node that it joins as."""

    name: Annotated[Text, Field(min_length=1, max_length=255)]
    state: PilotState
    reason: Annotated[Text, Field(max_length=1000)] = ""


class PilotReports(Request):
    """All pilots of a cluster."""

    pilots: Annotated[list[PilotReport], Field(max_length=1000)]


class Pilot(Answer):
    """An agent that `penstock cluster` asked another scheduler for."""

    cluster: str
    name: str
    state: PilotState
    reason: str


class NodeJoin(Request):
    """What an agent reports of its machine when it joins."""

    join_token: Text
    name: Annotated[Text, Field(min_length=1, max_length=255)]
    host: Annotated[Text, Field(min_length=1, max_length=255)]
    cpus: Annotated[int, Field(ge=1, le=65536)]
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    memory_bytes: Annotated[int, Field(ge=1, le=1 << 52)]
    version: Annotated[Text, Field(max_length=64)] = ""
    pilot: StrictBool = Field(False, description="a former pilot of this name, on any host, has the same node")


class NodeJoined(Answer):
    """A node's identity. The token is shown once."""

    node_id: str
    node_token: str


class AuditEntry(Answer):
    """A request that changed something, or `count` refused ones of one peer (429: wrong tokens beyond the limit)."""

    model_config = ConfigDict(
        frozen=True,
        json_schema_extra={
            "examples": [
                {
                    "id": "019b76da-a800-7000-8000-000000000001",
                    "at": "2026-01-01T00:00:00.000000Z",
                    "token_id": "019b76da-a800-7000-8000-000000000002",
                    "token_name": "admin",
                    "peer": "127.0.0.1",
                    "method": "POST",
                    "route": "/api/v1/jobs/{job_id}:cancel",
                    "subject": "019b76da-a800-7000-8000-000000000003",
                    "status": 202,
                    "request_id": "019b76da-a800-7000-8000-000000000004",
                    "count": 1,
                }
            ]
        },
    )

    id: str
    at: Timestamp
    token_id: str | None = Field(description="of the token or session that asked; null if there was none")
    token_name: str
    peer: str = Field(description="address that the request came from; '' for those of many")
    method: str
    route: str = Field(description="template of the path")
    subject: str = Field(description="identifier of what was changed or made: a job, a token, a node, a project, …")
    status: int
    request_id: str
    count: int


class JoinTokenRequest(Request):
    """How long a join token stays valid, and for how many nodes: one, or any number (the pilots of a cluster)."""

    expires_in_s: Annotated[float, Field(gt=0, le=30 * 86400)] = 300.0
    reusable: StrictBool = False


class OneTimeToken(Answer):
    """A join token. `id`: by which it is revoked."""

    id: str
    token: str
    expires_at: Timestamp


class LoginCode(Answer):
    """A code that opens a browser session, once."""

    code: str
    expires_at: Timestamp


class SessionRequest(Request):
    """A login code to be turned into a session."""

    code: Text


class Snapshot(Answer):
    """An uploaded workdir."""

    sha256: str
    size_bytes: int


class Health(Answer):
    """That the server lives."""

    status: Literal["ok"] = "ok"
    detail: dict[str, Any] = Field(default_factory=dict)
