"""Messages of the websocket of an attached process, both ways (docs/protocol.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictInt, TypeAdapter

from penstock.identity import Role
from penstock.protocol.jobspec import Text
from penstock.protocol.wire import Message, Pid, Short


class Register(Message):
    """First message of an attached process."""

    type: Literal["register"] = "register"
    job_name: Annotated[Text, Field(min_length=1, max_length=255)]
    role: Role
    index: Annotated[int, Field(ge=0, le=100_000)]
    host: Short
    pid: Pid
    endpoint: Short | None = None


class Heartbeat(Message):
    """Heartbeat of the process."""

    type: Literal["beat"] = "beat"


class Registered(Message):
    """First answer of the server: the process's replica, and its lease."""

    type: Literal["registered"] = "registered"
    job_id: str
    replica_id: str
    stream: int
    epoch: int
    lease_ttl_s: float


class Stored(Message):
    """Answer to a heartbeat: frames up to `stored_seq` of this connection are stored, -1 if none came."""

    type: Literal["beat"] = "beat"
    stored_seq: StrictInt


FromProcess = Register | Heartbeat
FROM_PROCESS: TypeAdapter[FromProcess] = TypeAdapter(Annotated[FromProcess, Field(discriminator="type")])
REGISTERED, STORED = TypeAdapter(Registered), TypeAdapter(Stored)
