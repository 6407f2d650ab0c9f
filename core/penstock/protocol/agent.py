"""Messages of the agent's websocket, both ways (docs/protocol.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from penstock.identity import Role
from penstock.protocol import jobspec, recording
from penstock.protocol.clocks import ClockOffset
from penstock.protocol.contract import CollectiveJob, PserverJob
from penstock.protocol.jobspec import Text, storable
from penstock.protocol.states import ReplicaState
from penstock.protocol.wire import Epoch, Int32, Message, Offset, Pid, Short

MAX_FINDINGS, MAX_FINDING_TEXT = 64, 500
MAX_PROCESSES, MAX_THREADS, MAX_FRAMES, MAX_STACK_TEXT = 8, 128, 100, 500
ReportedState = Literal["PREPARING", "RUNNING", "EXITED", "KILLED"]
_Label = Annotated[Text, Field(max_length=64)]
_FindingText = Annotated[Text, Field(max_length=MAX_FINDING_TEXT)]
_StackText = Annotated[Text, Field(max_length=MAX_STACK_TEXT)]
_FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]

# Agent to server


class RunningReplica(Message):
    """A process that an agent has when it connects."""

    replica_id: Short
    epoch: Epoch
    state: ReplicaState
    pid: Pid | None = None


class MachineFinding(Message):
    """A warning or an error about an agent's machine, and what to do (docs/doctor.md)."""

    name: _Label
    level: Literal["warning", "error"]
    detail: _FindingText
    advice: _FindingText = ""


class PilotTerms(Message):
    """Of an agent that another scheduler runs for a while. `once`: it takes one job. `leaving`: why it drains, or ''.

    `seconds_left`: for which it runs jobs, None without a limit.
    """

    once: bool = False
    seconds_left: Annotated[float, Field(ge=0)] | None = None
    leaving: Short = ""


class Hello(Message):
    """First message of an agent: what runs there, how the node is reached, which ports are free.

    `pilot`: None of an agent that stays.
    """

    type: Literal["hello"] = "hello"
    version: _Label = ""
    boot_id: _Label = ""
    replicas: list[RunningReplica] = Field(default_factory=list)
    address: Short = ""
    ports: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], Field(max_length=4096)] = Field(default_factory=list)
    findings: Annotated[list[MachineFinding], Field(max_length=MAX_FINDINGS)] = Field(default_factory=list)
    pilot: PilotTerms | None = None
    instance: _Label = Field("", description="of this run of the agent: two of one node are a copy of its identity")
    takes_stacks: bool = Field(default=False, description="it answers a `stack`; an older agent would hang up")
    labels: jobspec.Labels | None = Field(None, description="of the node; None: an older agent, which sends none")
    records: bool = Field(default=False, description="it takes a `record`; an older agent would hang up")


class DiskSpace(Message):
    """The file system of an agent's state folder: where logs, snapshots and spooled frames are."""

    free_bytes: Annotated[int, Field(ge=0, lt=1 << 62)]
    total_bytes: Annotated[int, Field(ge=0, lt=1 << 62)]


class Heartbeat(Message):
    """Heartbeat of an agent. `leaving`: why a pilot drains; nothing is placed there once this is answered.

    `ends_in_s`: of a pilot that was asked to leave: when it stops what runs there, None before.
    `clock`: of the node against the server's, as the heartbeats before show. `disk`: None if it cannot be read.
    """

    type: Literal["beat"] = "beat"
    cpu_percent: float = 0.0
    memory_used_bytes: int = 0
    leaving: Short = ""
    ends_in_s: Annotated[float, Field(ge=0)] | None = None
    clock: ClockOffset | None = None
    disk: DiskSpace | None = None


class ReplicaReport(Message):
    """State of a replica. `pid`: of its entrypoint."""

    type: Literal["replica"] = "replica"
    replica_id: Short
    epoch: Epoch
    state: ReportedState
    pid: Pid | None = None
    exit_code: Int32 | None = None
    signal: Int32 | None = None
    detail: Text | None = None

    @property
    def terminal(self) -> bool:
        """True when the replica has ended and all its processes are gone."""
        return self.state in ("EXITED", "KILLED")


class LogBytes(Message):
    """Bytes of a replica's log at an offset."""

    type: Literal["log"] = "log"
    replica_id: Short
    epoch: Epoch
    offset: Offset
    text_b64: str


class StackFrame(Message):
    """A Python function that is being called. `line`: the one that it is at; 0: unknown."""

    name: _StackText = ""
    file: _StackText = ""
    line: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class StackThread(Message):
    """A thread and its frames, the innermost first. `active`: it uses a processor."""

    name: _StackText = ""
    os_thread_id: Pid | None = None
    active: bool = False
    owns_gil: bool = False
    frames: Annotated[list[StackFrame], Field(max_length=MAX_FRAMES)] = Field(default_factory=list)


class StackProcess(Message):
    """A Python process of a replica. `error`: why there are no threads, and what to do."""

    pid: Pid
    command: _StackText = ""
    threads: Annotated[list[StackThread], Field(max_length=MAX_THREADS)] = Field(default_factory=list)
    error: _StackText = ""


class StackAnswer(Message):
    """The Python stacks that `StackOrder` asked for. `error`: why there are none, and what to do."""

    type: Literal["stack"] = "stack"
    request_id: Short
    processes: Annotated[list[StackProcess], Field(max_length=MAX_PROCESSES)] = Field(default_factory=list)
    error: _StackText = ""
    skip: Annotated[int, Field(ge=0, lt=1 << 31)] = Field(0, description="of the order; 0 from an agent that cannot")
    num_left: Annotated[int, Field(ge=0, lt=1 << 31)] = Field(0, description="processes behind those that are here")


FromAgent = Hello | Heartbeat | ReplicaReport | LogBytes | StackAnswer
FROM_AGENT: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="type")])

# Server to agent


class Welcome(Message):
    """First message of the server. `log_offsets`: bytes of each replica's log that the server holds."""

    type: Literal["welcome"] = "welcome"
    node_id: str
    lease_ttl_s: float = Field(gt=0)
    grace_s: float = Field(ge=0)
    log_offsets: dict[str, int] = Field(default_factory=dict)


class LeaseRenewed(Message):
    """Answer to a heartbeat: from the moment of that heartbeat the node has a lease of `ttl_s`.

    `stored`: what came before the heartbeat is stored; if not, a later answer confirms it. `received_ns`,
    `answered_ns`: when the heartbeat came and this was written, in Unix nanoseconds; 0 from an older server.
    """

    type: Literal["lease"] = "lease"
    ttl_s: float = Field(gt=0)
    stored: bool = True
    received_ns: Offset = 0
    answered_ns: Offset = 0


class CheckpointOrder(jobspec.Checkpoint):
    """`checkpoint` of a job's description."""

    model_config = ConfigDict(extra="ignore")


class LimitsOrder(Message):
    """Limits of a replica: see `penstock.process.cell.Limits`."""

    memory_bytes: int | None = None
    processes: int | None = None
    open_files: int | None = None
    cpus: float | None = None


class Desired(Message):
    """One replica that the server wants on the node. `snapshot`: SHA-256 of the tar.gz in which it runs."""

    replica_id: _FolderName
    job_id: Text
    job_name: Text
    role: Role
    index: int
    epoch: Epoch
    attempt: int = 1
    stream: int
    entrypoint: list[Text] = Field(min_length=1)
    env: dict[Text, Text] = Field(default_factory=dict)
    snapshot: str | None = None
    cpus: int = 1
    stop_grace_s: float = 5.0
    on_disconnect: jobspec.OnDisconnect = "continue"
    checkpoint: CheckpointOrder | None = None
    limits: LimitsOrder | None = None
    pserver_job: PserverJob | None = None
    collective_job: CollectiveJob | None = None

    @model_validator(mode="after")
    def _group(self) -> Desired:
        group = self.collective_job or self.pserver_job
        if group is None:
            return self
        for text in (*group.endpoints, *((group.token, group.address) if self.pserver_job is group else ())):
            storable(text)
        has_endpoint = self.collective_job is not None or self.role == "pserver"
        if has_endpoint and not 0 <= self.index < len(group.endpoints):
            raise ValueError(f"{self.role} {self.index} is none of the {len(group.endpoints)} endpoints of its job")
        return self

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports on which this replica listens."""
        if self.collective_job is not None:
            return self.collective_job.ports
        return (self.pserver_job.port,) if self.pserver_job is not None and self.pserver_job.port is not None else ()


class Refused(Message):
    """A replica that the server wants on the node and whose order the agent cannot read, and why."""

    replica_id: _FolderName
    epoch: Epoch
    detail: str = ""


class Preemption(Message):
    """Why a replica is preempted, and the seconds that it has to save at a step boundary (`protocol.preemption`)."""

    why: Text = ""
    grace_s: float = Field(ge=0)


class DesiredSet(Message):
    """The whole set of replicas that a node should run.

    `keep_state`: jobs that go on, whose pservers' state is retained; None: an older server, which does not send it.
    `preempted`: by id, replicas that are not wanted any more and are asked to save first; an older agent stops them.
    `refused`: set by the agent that reads the message.
    """

    type: Literal["desired"] = "desired"
    replicas: list[Desired]
    refused: list[Refused] = Field(default_factory=list)
    keep_state: list[str] | None = None
    preempted: dict[str, Preemption] = Field(default_factory=dict)


class LogAck(Message):
    """The server holds this replica's log up to `log_offset`. `full`: it takes no more of it."""

    type: Literal["ack"] = "ack"
    replica_id: str
    log_offset: int
    full: bool = False


class StackOrder(Message):
    """Asks for the Python stacks of a replica's processes, after `skip` of them. Only if the agent `takes_stacks`."""

    type: Literal["stack"] = "stack"
    request_id: Short
    replica_id: Short
    skip: Annotated[int, Field(ge=0, lt=1 << 31)] = 0


class RecordOrder(Message):
    """Asks to have a replica's processes send every step whole for some seconds. Only if the agent `records`."""

    type: Literal["record"] = "record"
    replica_id: Short
    seconds: Annotated[int, Field(ge=1, le=recording.MAX_S)]


FromServer = Welcome | LeaseRenewed | DesiredSet | LogAck | StackOrder | RecordOrder
FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(Annotated[FromServer, Field(discriminator="type")])
