"""JSON messages that arrive on websockets, as docs/protocol.md has them. A message that fits none is a PeerError.

Unknown fields are ignored here, so that an older server understands a newer agent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from penstock.errors import PeerError
from penstock.protocol.jobspec import Text
from penstock.protocol.states import ReplicaState

_Short = Annotated[Text, Field(max_length=255)]
_Epoch = Annotated[int, Field(ge=0, lt=1 << 31)]
_Pid = Annotated[int, Field(ge=0, lt=1 << 31)]
_Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RunningReplica(_Message):
    """A process that an agent has when it connects."""

    replica_id: _Short
    epoch: _Epoch
    state: ReplicaState
    pid: _Pid | None = None


class MachineFinding(_Message):
    """A warning or an error about an agent's machine, and what to do (docs/doctor.md)."""

    name: Annotated[Text, Field(max_length=64)]
    level: Literal["warning", "error"]
    detail: Annotated[Text, Field(max_length=500)]
    advice: Annotated[Text, Field(max_length=500)] = ""


class AgentHello(_Message):
    """First message of an agent."""

    type: Literal["hello"]
    version: Annotated[Text, Field(max_length=64)] = ""
    boot_id: Annotated[Text, Field(max_length=64)] = ""
    address: Annotated[Text, Field(max_length=255)] = ""
    ports: Annotated[list[Annotated[int, Field(ge=1, le=65535)]], Field(max_length=4096)] = Field(default_factory=list)
    replicas: list[RunningReplica] = Field(default_factory=list)
    findings: Annotated[list[MachineFinding], Field(max_length=64)] = Field(default_factory=list)


class AgentBeat(_Message):
    """The agent is alive."""

    type: Literal["beat"]
    cpu_percent: float = 0.0
    memory_used_bytes: int = 0


class ReplicaReport(_Message):
    """What became of a process."""

    type: Literal["replica"]
    replica_id: _Short
    epoch: _Epoch
    state: Literal["PREPARING", "RUNNING", "EXITED", "KILLED"]
    pid: _Pid | None = None
    exit_code: _Int32 | None = None
    signal: _Int32 | None = None
    detail: Text | None = None


class AgentLog(_Message):
    """Bytes of a replica's log at an offset."""

    type: Literal["log"]
    replica_id: _Short
    epoch: _Epoch
    offset: Annotated[int, Field(ge=0, lt=1 << 62)]
    text_b64: str


AgentMessage = Annotated[AgentHello | AgentBeat | ReplicaReport | AgentLog, Field(discriminator="type")]
AGENT: TypeAdapter[AgentMessage] = TypeAdapter(AgentMessage)


class Register(_Message):
    """First message of an attached process."""

    type: Literal["register"]
    job_name: Annotated[Text, Field(min_length=1, max_length=255)]
    role: Literal["trainer", "pserver"]
    index: Annotated[int, Field(ge=0, le=100_000)]
    host: _Short
    pid: _Pid
    endpoint: _Short | None = None


class AttachBeat(_Message):
    """The attached process is alive."""

    type: Literal["beat"]


AttachMessage = Annotated[Register | AttachBeat, Field(discriminator="type")]
ATTACH: TypeAdapter[AttachMessage] = TypeAdapter(AttachMessage)

Part = Literal["state", "metrics", "logs", "ops", "sync"]
ALL_PARTS: tuple[Part, ...] = ("state", "metrics", "logs", "ops", "sync")


class SubscribeJobs(_Message):
    """Follow the list of jobs and the nodes."""

    type: Literal["subscribe"]
    id: int
    topic: Literal["jobs"]


class SubscribeJob(_Message):
    """Follow one job."""

    type: Literal["subscribe"]
    id: int
    topic: Literal["job"]
    job_id: _Short
    parts: list[Part] = Field(default_factory=lambda: list(ALL_PARTS))
    log_offsets: dict[str, Annotated[int, Field(ge=0, lt=1 << 62)]] = Field(default_factory=dict)


class Unsubscribe(_Message):
    """Stop following."""

    type: Literal["unsubscribe"]
    id: int


class Credit(_Message):
    """How far the browser has painted."""

    type: Literal["credit"]
    rendered_seq: int = 0
    lag_ms: float = 0.0


Subscribe = Annotated[SubscribeJobs | SubscribeJob, Field(discriminator="topic")]
BrowserMessage = Annotated[Subscribe | Unsubscribe | Credit, Field(union_mode="left_to_right")]
BROWSER: TypeAdapter[BrowserMessage] = TypeAdapter(BrowserMessage)


def parse(adapter: TypeAdapter[Any], text: str) -> Any:
    """Parse one message. Raises PeerError that names the field."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise PeerError(f"message is not understood: {where}: {first['msg']}; it starts {text[:80]!r}") from error
