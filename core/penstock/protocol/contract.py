"""The environment that an agent gives to each process of a job, and that the library reads.

A process with none of these runs exactly the same, unwatched. A process that a person started with
`PENSTOCK_URL` and `PENSTOCK_TOKEN` set registers itself with the server as an *attached* job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

JOB_ID = "PENSTOCK_JOB_ID"
JOB_NAME = "PENSTOCK_JOB_NAME"
REPLICA_ID = "PENSTOCK_REPLICA_ID"
ROLE = "PENSTOCK_ROLE"
INDEX = "PENSTOCK_INDEX"
EPOCH = "PENSTOCK_EPOCH"
STREAM = "PENSTOCK_STREAM"
SOCKET = "PENSTOCK_TELEMETRY_SOCKET"
URL = "PENSTOCK_URL"
TOKEN = "PENSTOCK_TOKEN"

Role = Literal["trainer", "pserver"]


@dataclass(frozen=True, slots=True)
class Managed:
    """A process that an agent started. `socket`: path of the agent's Unix socket for telemetry."""

    job_id: str
    job_name: str
    replica_id: str
    role: Role
    index: int
    epoch: int
    stream: int
    socket: str

    def environ(self) -> dict[str, str]:
        """Return the variables to put into the process's environment."""
        return {
            JOB_ID: self.job_id,
            JOB_NAME: self.job_name,
            REPLICA_ID: self.replica_id,
            ROLE: self.role,
            INDEX: str(self.index),
            EPOCH: str(self.epoch),
            STREAM: str(self.stream),
            SOCKET: self.socket,
        }


@dataclass(frozen=True, slots=True)
class Attached:
    """A process that a person started. `url`: the server's base URL; `token`: a bearer token."""

    url: str
    token: str
    job_name: str
    role: Role
    index: int


@dataclass(frozen=True, slots=True)
class Unwatched:
    """A process that nobody watches."""


def from_environ(environ: Mapping[str, str], *, default_name: str = "attached") -> Managed | Attached | Unwatched:
    """Read the contract. An agent's variables win over a person's. Raises ValueError on a number that is none."""
    if environ.get(SOCKET) and environ.get(REPLICA_ID):
        return Managed(
            job_id=environ.get(JOB_ID, ""),
            job_name=environ.get(JOB_NAME, ""),
            replica_id=environ[REPLICA_ID],
            role=_role(environ.get(ROLE, "trainer")),
            index=int(environ.get(INDEX, "0")),
            epoch=int(environ.get(EPOCH, "1")),
            stream=int(environ.get(STREAM, "0")),
            socket=environ[SOCKET],
        )
    if environ.get(URL) and environ.get(TOKEN):
        return Attached(
            url=environ[URL].rstrip("/"),
            token=environ[TOKEN],
            job_name=environ.get(JOB_NAME) or default_name,
            role=_role(environ.get(ROLE, "trainer")),
            index=int(environ.get(INDEX, "0")),
        )
    return Unwatched()


def _role(text: str) -> Role:
    if text == "trainer":
        return "trainer"
    if text == "pserver":
        return "pserver"
    raise ValueError(f"{ROLE} is {text!r}; expected 'trainer' or 'pserver'")
