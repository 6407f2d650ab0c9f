"""JSON messages of the agent's websocket (docs/protocol.md). Unknown fields of the server are ignored, so that an
older agent can talk to a newer server; a message that lacks a field or has the wrong type raises `PeerError`. Only an
unreadable replica among the desired ones does not: the others must not wait for it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from penstock.errors import PeerError
from penstock.machine.findings import Finding
from penstock.protocol.contract import Role
from penstock.protocol.jobspec import Text

MOST_FINDINGS, MOST_TEXT = 64, 500
ReplicaReportState = Literal["PREPARING", "RUNNING", "EXITED", "KILLED"]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


ReplicaId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # becomes the name of a folder


class PserverJob(_Message):
    """What a process of a job with parameter servers is told besides. `port`: a pserver's own."""

    endpoints: list[Text]
    num_trainers: int
    token: Text = Field(repr=False)
    address: Text
    port: int | None = None


class CollectiveJob(_Message):
    """What a rank of a collective job is told besides. `ports`: at which it listens."""

    endpoints: list[Text]
    master: Text
    local_rank: int
    num_local: int
    node: int
    gpus: list[int] = Field(default_factory=list)
    ports: list[int] = Field(default_factory=list)


class Checkpoint(_Message):
    """How often a job writes checkpoints, and how many of the latest it keeps."""

    every_steps: int = Field(ge=1)
    keep: int = Field(ge=1)


class Desired(_Message):
    """One replica that the server wants here. `snapshot`: SHA-256 of the tar.gz in which it runs."""

    replica_id: ReplicaId
    job_id: Text
    job_name: Text
    role: Role
    index: int
    epoch: int
    stream: int
    entrypoint: list[Text] = Field(min_length=1)
    env: dict[Text, Text] = Field(default_factory=dict)
    snapshot: str | None = None
    cpus: int = 1
    stop_grace_s: float = 5.0
    attempt: int = 1
    pserver_job: PserverJob | None = None
    collective_job: CollectiveJob | None = None
    checkpoint: Checkpoint | None = None

    @model_validator(mode="after")
    def _endpoint(self) -> Desired:
        told = self.collective_job or (self.pserver_job if self.role == "pserver" else None)
        if told is not None and not 0 <= self.index < len(told.endpoints):
            raise ValueError(f"{self.role} {self.index} is none of the {len(told.endpoints)} endpoints of its job")
        return self

    @property
    def ports(self) -> list[int]:
        """At which this replica listens."""
        if self.collective_job is not None:
            return self.collective_job.ports
        return [self.pserver_job.port] if self.pserver_job is not None and self.pserver_job.port is not None else []


class Welcome(_Message):
    """First message of the server. `log_offsets`: bytes of each replica's log that the server holds."""

    type: Literal["welcome"]
    node_id: str
    lease_ttl_s: float = Field(gt=0)
    grace_s: float = Field(ge=0)
    log_offsets: dict[str, int] = Field(default_factory=dict)


class LeaseRenewed(_Message):
    """Answers a beat: from the moment of that beat the node has a lease of `ttl_s`."""

    type: Literal["lease"]
    ttl_s: float = Field(gt=0)


class Refused(_Message):
    """A replica that the server wants here and that this agent cannot read, and why."""

    replica_id: ReplicaId
    epoch: int
    detail: str = ""


class DesiredSet(_Message):
    """The whole set of replicas that this node should run, and of those the ones that it cannot.

    `keep_state`: jobs that go on, whose pservers' state is kept; None: an older server, which does not say.
    """

    type: Literal["desired"]
    replicas: list[Desired]
    refused: list[Refused] = Field(default_factory=list)
    keep_state: list[str] | None = None


class LogAck(_Message):
    """The server holds this replica's log up to `log_offset`."""

    type: Literal["ack"]
    replica_id: str
    log_offset: int


FromServer = Welcome | LeaseRenewed | DesiredSet | LogAck
_FROM_SERVER: TypeAdapter[FromServer] = TypeAdapter(Annotated[FromServer, Field(discriminator="type")])


def parse(text: str) -> FromServer:
    """Read one message of the server. Raises PeerError that names the field.

    Not by `validate_json`: that refuses the whole text for half a surrogate pair in one replica's argument.
    """
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and fields.get("type") == "desired" and isinstance(fields.get("replicas"), list):
            return _desired_set(fields["replicas"], fields.get("keep_state"))
        return _FROM_SERVER.validate_python(fields)
    except ValidationError as error:
        raise PeerError(f"the server sent a message that the agent cannot read: {_words(error)}") from error
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the server sent a message that is no JSON: {error}") from error


def _desired_set(orders: list[Any], keep_state: Any) -> DesiredSet:
    """Part what can be read from what cannot. Raises ValidationError for an order without a readable id and epoch."""
    readable: list[Desired] = []
    refused: list[Refused] = []
    for order in orders:
        try:
            readable.append(Desired.model_validate(order))
        except ValidationError as error:
            detail = f"this node cannot read its order: {_words(error)}"
            refused.append(Refused.model_validate(order).model_copy(update={"detail": detail}))
    fields = {"type": "desired", "replicas": readable, "refused": refused, "keep_state": keep_state}
    return DesiredSet.model_validate(fields)


def stub(order: Refused) -> Desired:
    """Return what stands for an order that cannot be read: enough to report the replica, never to run it."""
    return Desired(
        replica_id=order.replica_id, job_id="", job_name="", role="trainer", index=0, epoch=order.epoch, stream=0,
        entrypoint=["(unreadable)"],
    )  # fmt: skip


def _words(error: ValidationError) -> str:
    first = error.errors()[0]
    place = "/".join(str(part) for part in first["loc"])
    what = first["msg"].removeprefix("Value error, ")
    return (f"{place}: {what}" if place else what).encode("utf-8", "replace").decode("utf-8")


class Report(_Message):
    """What the agent says about one replica. `pid` is the entrypoint's."""

    replica_id: str
    epoch: int
    state: ReplicaReportState
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""

    @property
    def terminal(self) -> bool:
        """True when the replica has ended and all its processes are gone."""
        return self.state in ("EXITED", "KILLED")


def hello(
    *,
    version: str,
    boot_id: str,
    reports: list[Report],
    address: str = "",
    ports: Sequence[int] = (),
    findings: Sequence[Finding] = (),
) -> str:
    """Return the agent's first message: what runs here, how the node is reached, which ports pservers may get.

    `findings`: those about the machine that are not ok; long texts are cut to what the server takes.
    """
    replicas = [report.model_dump(include={"replica_id", "epoch", "state", "pid"}) for report in reports]
    fields = {"type": "hello", "version": version, "boot_id": boot_id, "replicas": replicas}
    found = [{name: _sendable(text) for name, text in asdict(one).items()} for one in findings[:MOST_FINDINGS]]
    return json.dumps({**fields, "address": address, "ports": list(ports), "findings": found})


def _sendable(text: str) -> str:
    """Return text that the server takes: paths may hold bytes that are no text, and a refused hello costs the node."""
    return text[:MOST_TEXT].encode("utf-8", "replace").decode("utf-8").replace("\0", "?")


def beat(*, cpu_percent: float, memory_used_bytes: int) -> str:
    """Return a beat."""
    return json.dumps({"type": "beat", "cpu_percent": cpu_percent, "memory_used_bytes": memory_used_bytes})


def report(value: Report) -> str:
    """Return the message for a replica's state."""
    return json.dumps({"type": "replica", **value.model_dump()})


def log(*, replica_id: str, epoch: int, offset: int, chunk: bytes) -> str:
    """Return a piece of a replica's log."""
    text = base64.b64encode(chunk).decode("ascii")
    return json.dumps({"type": "log", "replica_id": replica_id, "epoch": epoch, "offset": offset, "text_b64": text})
