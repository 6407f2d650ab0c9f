"""The environment that an agent gives to each process of a job, and that the library reads.

A process with none of these runs exactly the same, unwatched. A process that a person started with
`PENSTOCK_URL` and `PENSTOCK_TOKEN` set registers itself with the server as an *attached* job.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Literal

from penstock import identity
from penstock.errors import SpecError
from penstock.identity import JobIdentity, Role, Variables
from penstock.settings import PS_STATE_DIR, PS_TOKEN, SELECTED_GPUS, TOKEN, URL

_log = logging.getLogger(__name__)

Mode = Literal["local", "pserver", "collective", "command"]

MAX_LEFT_BYTES = 16 << 20
"""Of what processes of a replica leave at `left_path`."""


def left_path(socket: str | Path) -> Path:
    """Return the file beside a telemetry socket in which processes that end without an agent leave their last frames.

    The agent makes it and reads it, as it reads its socket: length-prefixed frames.
    """
    return Path(socket).with_suffix(".left")


@dataclass(frozen=True, slots=True)
class Managed:
    """A process that an agent started. `socket`: path of the agent's Unix socket for telemetry.

    Fields are in the order of `identity.OF_REPLICA`.
    """

    job_id: str
    job_name: str
    replica_id: str
    role: Role
    index: int
    epoch: int
    stream: int
    socket: str

    @property
    def left(self) -> Path:
        """Where the process leaves what it has not sent when it ends without an agent; see `left_path`."""
        return left_path(self.socket)

    def environ(self) -> dict[str, str]:
        """Return the variables to put into the process's environment."""
        return dict(zip(identity.OF_REPLICA, map(str, astuple(self)), strict=True))


@dataclass(frozen=True, slots=True)
class PserverJob:
    """Place of a process in a job with parameter servers, under the names that Fluid scripts read.

    `endpoints`: of pserver 0, 1, …. `address`: of this process's node, as its peers reach it. `token`: a secret of the
    attempt, which opens the servers' ports. `port`: a pserver's own.
    """

    endpoints: tuple[str, ...]
    num_trainers: int
    address: str
    token: str = field(repr=False)
    port: int | None = None

    def environ(self, role: Role, index: int, *, state_dir: str = "") -> dict[str, str]:
        """Return the variables to put into the process's environment. `state_dir`: a pserver's own."""
        found = {
            identity.SERVERS: ",".join(self.endpoints),
            identity.NUM_TRAINERS: str(self.num_trainers),
            identity.TRAINING_ROLE: role.upper(),
            identity.POD_IP: self.address,
            PS_TOKEN.name: self.token,
        }
        if role == "trainer":
            return {**found, identity.TRAINER_ID: str(index)}
        return {
            **found,
            identity.POD_IP: self.endpoints[index].rpartition(":")[0],  # Fluid's role makers read POD_IP:PADDLE_PORT
            identity.PORT: str(self.port),
            identity.SERVER_ID: str(index),
            identity.CURRENT_ENDPOINT: self.endpoints[index],
            PS_STATE_DIR.name: state_dir,
        }


@dataclass(frozen=True, slots=True)
class CollectiveJob:
    """Place of a rank in a collective job, under the names that scripts for Fluid and for torchrun read.

    `endpoints`: of rank 0, 1, …. `master`: host:port at which `torch.distributed` meets. `local_rank`, `num_local`:
    among the ranks of its node; `node`: that node's number. `gpus`: the rank's own, counted among those that it sees.
    `ports`: at which the rank listens.
    """

    endpoints: tuple[str, ...]
    master: str
    local_rank: int
    num_local: int
    node: int
    gpus: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()

    def environ(self, rank: int) -> dict[str, str]:
        """Return the variables to put into the process's environment."""
        host, _, port = self.master.rpartition(":")
        size = str(len(self.endpoints))
        found = {
            identity.TRAINER_ID: str(rank),
            identity.CURRENT_ENDPOINT: self.endpoints[rank],
            identity.NUM_TRAINERS: size,
            identity.MANUAL_NUM_TRAINERS: size,
            identity.TRAINER_ENDPOINTS: ",".join(self.endpoints),
            identity.RANK: str(rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node),
            identity.WORLD_SIZE: size,
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "ROLE_NAME": "default",  # torchrun's own default
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": "none",  # by it scripts and libraries know that ranks are started for them
            identity.RESTART_COUNT: "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            identity.MASTER_ADDR: host.removeprefix("[").removesuffix("]"),
            identity.MASTER_PORT: port,
        }
        return {**found, SELECTED_GPUS.name: ",".join(map(str, self.gpus))} if self.gpus else found


def reserved(mode: Mode, *, gpus: int = 0) -> frozenset[str]:
    """Return the variables that an agent sets for a process of such a job, whatever else is asked for.

    `gpus`: of each trainer. Variables that an agent only sets where they are absent are not among them.
    """
    names = set(Managed("", "", "", "trainer", 0, 1, 0, "").environ())
    if mode == "pserver":
        job = PserverJob(("127.0.0.1:1",), 1, "127.0.0.1", "", port=1)
        names |= job.environ("trainer", 0).keys() | job.environ("pserver", 0).keys()
    if mode == "collective":
        rank = CollectiveJob(("127.0.0.1:1",), "127.0.0.1:2", 0, 1, 0, gpus=tuple(range(gpus)))
        names |= rank.environ(0).keys()
    return frozenset(names)


@dataclass(frozen=True, slots=True)
class Attached:
    """A process that a person started. `url`: the server's base URL; `token`: a bearer token."""

    url: str
    token: str
    job_name: str
    role: Role
    index: int


@dataclass(frozen=True, slots=True)
class UnwatchedProcess:
    """A process that is not watched."""


def from_environ(
    environ: Mapping[str, str] | None = None, *, default_name: str = "attached"
) -> Managed | Attached | UnwatchedProcess:
    """Read the contract from `environ`, by default the process's environment. Raises SpecError.

    An agent's variables win over a user's. A managed process has the number of its replica, which may run a launcher;
    an attached one that of PENSTOCK_ROLE and PENSTOCK_INDEX, else of its `JobIdentity`.
    """
    variables = Variables(environ)
    name = variables.optional(identity.JOB_NAME)
    if variables.has(identity.SOCKET) and variables.has(identity.REPLICA_ID):
        return Managed(
            variables.optional(identity.JOB_ID), name, variables.optional(identity.REPLICA_ID),
            variables.role((identity.REPLICA_ROLE,)), variables.number(identity.REPLICA_INDEX, default=0),
            variables.number(identity.EPOCH, default=1), variables.number(identity.STREAM, default=0),
            variables.optional(identity.SOCKET),
        )  # fmt: skip
    url, token = URL.read(environ), TOKEN.read(environ)
    if url and token:
        return Attached(url.rstrip("/"), token, name or default_name, *_attached_as(variables))
    return UnwatchedProcess()


def _attached_as(variables: Variables) -> tuple[Role, int]:
    """Return role and index of an attached process. Variables of launchers that are wrong cost it no telemetry."""
    role = variables.role((identity.REPLICA_ROLE,)) if variables.has(identity.REPLICA_ROLE) else None
    index = variables.number(identity.REPLICA_INDEX) if variables.has(identity.REPLICA_INDEX) else None
    if role is not None and index is not None:
        return role, index
    try:
        found = JobIdentity.from_environ(variables.environ)
    except SpecError as error:
        found = JobIdentity()
        _log.warning("%s. Telemetry continues as %s %d.", error, role or found.role, index or found.index)
    if index is None:
        index = found.index if role in (None, found.role) else 0
    return role or found.role, index
