"""The environment that an agent gives to each process of a job, and that the library reads.

A process with none of these runs exactly the same, unwatched. A process that a person started with
`PENSTOCK_URL` and `PENSTOCK_TOKEN` set registers itself with the server as an *attached* job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
PS_TOKEN = "PENSTOCK_PS_TOKEN"
PS_STATE_DIR = "PENSTOCK_PS_STATE_DIR"
PS_LEASE_S = "PENSTOCK_PS_LEASE_S"
DEFAULT_PS_LEASE_S = 20.0

Role = Literal["trainer", "pserver"]
Mode = Literal["local", "pserver", "collective", "command"]


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
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(self.endpoints),
            "PADDLE_TRAINERS_NUM": str(self.num_trainers),
            "TRAINING_ROLE": role.upper(),
            "POD_IP": self.address,
            PS_TOKEN: self.token,
        }
        if role == "trainer":
            return {**found, "PADDLE_TRAINER_ID": str(index)}
        return {
            **found,
            "POD_IP": self.endpoints[index].rpartition(":")[0],  # Fluid's role makers look for POD_IP:PADDLE_PORT
            "PADDLE_PORT": str(self.port),
            "PADDLE_PSERVER_ID": str(index),
            "PADDLE_CURRENT_ENDPOINT": self.endpoints[index],
            PS_STATE_DIR: state_dir,
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
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_CURRENT_ENDPOINT": self.endpoints[rank],
            "PADDLE_TRAINERS_NUM": size,
            "PADDLE_NUM_TRAINERS": size,  # the manual's name for it
            "PADDLE_TRAINER_ENDPOINTS": ",".join(self.endpoints),
            "RANK": str(rank),
            "LOCAL_RANK": str(self.local_rank),
            "GROUP_RANK": str(self.node),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.num_local),
            "ROLE_NAME": "default",  # torchrun's own, where nobody says otherwise
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "TORCHELASTIC_RUN_ID": "none",  # by it scripts and libraries tell that ranks are started for them
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": host.removeprefix("[").removesuffix("]"),
            "MASTER_PORT": port,
        }
        return {**found, "FLAGS_selected_gpus": ",".join(map(str, self.gpus))} if self.gpus else found


def reserved(mode: Mode, *, gpus: int = 0) -> frozenset[str]:
    """Return the variables that an agent sets for a process of such a job, whatever else is asked for.

    `gpus`: of each trainer. Variables that an agent only sets where they are missing are not among them.
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
