"""Identity of a process in its job: role, number, peers and attempt, from the variables of agents and launchers.

Guarantees one answer: every consumer (collective groups, fleet's role makers, data sets, checkpoints, telemetry) reads
this module, and no other module reads these variables. The first family of `FAMILIES` that is set numbers the trainers,
so the variables of an outer launcher never mix with those of an inner one. MPI's variables are read only for
MPISymetricRoleMaker: Slurm sets them for processes that it has not started in parallel, too. A variable that is empty
is not set; one that is wrong is a SpecError with its name, its value and what was expected. No torch, no I/O.
Source: role_maker.py (Fluid 1.8), spec/fluid.md 1.11, 3.8 and 5. docs/environment.md has the tables for users.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import SpecError

Role = Literal["trainer", "pserver"]

# Penstock's: set by the agent for each replica. Within a replica a launcher may start several processes.
JOB_ID, JOB_NAME, REPLICA_ID = "PENSTOCK_JOB_ID", "PENSTOCK_JOB_NAME", "PENSTOCK_REPLICA_ID"
REPLICA_ROLE, REPLICA_INDEX = "PENSTOCK_ROLE", "PENSTOCK_INDEX"
EPOCH, STREAM, SOCKET = "PENSTOCK_EPOCH", "PENSTOCK_STREAM", "PENSTOCK_TELEMETRY_SOCKET"
OF_REPLICA = (JOB_ID, JOB_NAME, REPLICA_ID, REPLICA_ROLE, REPLICA_INDEX, EPOCH, STREAM, SOCKET)
# Fluid's and PaddleCloud's.
SERVERS, TRAINER_ENDPOINTS = "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS"
NUM_TRAINERS, MANUAL_NUM_TRAINERS = "PADDLE_TRAINERS_NUM", "PADDLE_NUM_TRAINERS"
TRAINER_ID, SERVER_ID, CURRENT_ENDPOINT = "PADDLE_TRAINER_ID", "PADDLE_PSERVER_ID", "PADDLE_CURRENT_ENDPOINT"
TRAINING_ROLE, COLLECTIVE_ROLE = "TRAINING_ROLE", "PADDLE_TRAINING_ROLE"
POD_IP, PORT = "POD_IP", "PADDLE_PORT"
# torchrun's.
RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
RESTART_COUNT, AGENT_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"

_LIST = "10.0.0.1:6174,10.0.0.2:6174"
EXPECTED: Mapping[str, tuple[str, str]] = {
    SERVERS: ("host:port of the parameter servers", _LIST),
    TRAINER_ENDPOINTS: ("host:port of all trainers", _LIST),
    CURRENT_ENDPOINT: ("this trainer's host:port", "10.0.0.1:6174"),
    **dict.fromkeys((NUM_TRAINERS, MANUAL_NUM_TRAINERS, WORLD_SIZE), ("the number of trainers", "2")),
    **dict.fromkeys((TRAINER_ID, RANK, REPLICA_INDEX), ("this trainer's number, from 0", "0")),
    SERVER_ID: ("this parameter server's number, from 0", "0"),
    TRAINING_ROLE: ("TRAINER or PSERVER", "TRAINER"),
    POD_IP: ("the host under which this server stands in the list of servers", "10.0.0.1"),
    PORT: ("the port on which this server listens", "6174"),
    MASTER_PORT: ("the port at which ranks meet", "29500"),
    EPOCH: ("the incarnation of this process", "1"),
}
"""What errors about a variable expect, with an example."""
_MOST = 2**63 - 1  # numbers travel in 64 bits
_MPI_PER_NODE = 2
_MPI_FIRST_PORT = 6174


@dataclass(frozen=True, slots=True)
class Family:
    """Variables that one kind of launcher sets together. It counts where all of `chosen_by` are set.

    `num`: the number of processes, `index`: the number of this one; the first that is set counts. `local`: the number
    of processes on this host.
    """

    launcher: str
    chosen_by: tuple[str, ...]
    num: tuple[str, ...]
    index: tuple[str, ...]
    local: str = ""


COLLECTIVE = Family(
    "Fluid, without servers", (TRAINER_ENDPOINTS,), (NUM_TRAINERS, MANUAL_NUM_TRAINERS),
    (TRAINER_ID, CURRENT_ENDPOINT, REPLICA_INDEX),
)  # fmt: skip
WITH_SERVERS = Family(
    "Fluid, with parameter servers", (SERVERS,), (NUM_TRAINERS, MANUAL_NUM_TRAINERS), (TRAINER_ID, REPLICA_INDEX)
)
TORCHRUN = Family("torchrun", (WORLD_SIZE, MASTER_ADDR), (WORLD_SIZE,), (RANK,))
BY_HAND = Family("by hand", (), (NUM_TRAINERS, MANUAL_NUM_TRAINERS, WORLD_SIZE), (TRAINER_ID, RANK, REPLICA_INDEX))
FAMILIES = (COLLECTIVE, WITH_SERVERS, TORCHRUN, BY_HAND)
"""The first one that is set numbers the trainers."""
ROLES = (TRAINING_ROLE, REPLICA_ROLE)
"""What gives the role, the first that is set."""
SERVER_NUMBERS = (f"{POD_IP}:{PORT}", SERVER_ID, REPLICA_INDEX)
"""What numbers a server, the first that is set; GeneralRoleMaker reads PADDLE_PSERVER_ID first, as Fluid's does."""

MPI_FAMILIES = tuple(
    Family(launcher, (rank,), (size,), (rank,), local)
    for launcher, rank, size, local in (
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPICH, Intel MPI, Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    )
)
VARIABLES = frozenset(EXPECTED).union(
    (*OF_REPLICA, COLLECTIVE_ROLE, RESTART_COUNT, AGENT_STORE),
    *((*f.chosen_by, *f.num, *f.index) for f in (*FAMILIES, *MPI_FAMILIES)),
    (f.local for f in MPI_FAMILIES),
)
"""Every variable that this module reads, or that the agent sets for a replica."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The job and the start of a process. `job`, `epoch`: of the control plane; '' and None without one.

    `attempt`: torchrun's count of restarts under the same meeting.
    """

    job: str = ""
    epoch: int | None = None
    attempt: str = "0"

    @staticmethod
    def from_environ(environ: Mapping[str, str] | None = None) -> Incarnation:
        """Return the incarnation in `environ`, by default the process's environment. Raises SpecError."""
        variables = Variables(environ)
        return Incarnation(
            variables.optional(JOB_ID),
            variables.number(EPOCH) if variables.has(EPOCH) else None,
            variables.optional(RESTART_COUNT) or "0",
        )


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """One process of a job. `index`: among the processes of its role, from 0.

    `meeting`: host and port where trainers without servers meet; '' if no variable has it. `is_served`: a process
    besides them listens there (torchrun's agent).
    """

    role: Role = "trainer"
    index: int = 0
    num_trainers: int = 1
    trainer_endpoints: tuple[str, ...] = ()
    server_endpoints: tuple[str, ...] = ()
    meeting: str = ""
    is_served: bool = False

    @staticmethod
    def from_environ(
        environ: Mapping[str, str] | None = None, *, reader: str = "", with_servers: bool = False,
        by_server_id: bool = False,
    ) -> JobIdentity:  # fmt: skip
        """Return the identity in `environ`, by default the process's environment. Raises SpecError.

        `reader`: the prefix of errors. `with_servers`: the list of servers, if set, wins over that of trainers, which
        is then only passed on. `by_server_id`: PADDLE_PSERVER_ID wins over POD_IP:PADDLE_PORT.
        """
        variables = Variables(environ, reader)
        servers = variables.endpoints(SERVERS) if variables.has(SERVERS) else ()
        if variables.role(ROLES) == "trainer":
            return _trainer(variables, WITH_SERVERS if with_servers and servers else _family(variables), servers)
        index = _server_index(variables, servers, by_server_id=by_server_id)
        return JobIdentity("pserver", index, num_trainers(variables.environ), (), servers)

    @staticmethod
    def of_meeting(environ: Mapping[str, str] | None = None) -> JobIdentity | None:
        """Return the identity of a trainer that meets others without servers; None if no launcher has set where.

        Its role is not read. Raises SpecError.
        """
        variables = Variables(environ)
        family = _family(variables)
        return _trainer(variables, family, ()) if family in (COLLECTIVE, TORCHRUN) else None

    @staticmethod
    def from_mpi(environ: Mapping[str, str] | None = None, *, reader: str = "") -> JobIdentity:
        """Return the identity of a process of an MPI launcher: even ranks are servers, odd ones trainers.

        Servers listen at PADDLE_PSERVERS_IP_PORT_LIST; on one host from PADDLE_PORT (6174) on. Raises SpecError.
        """
        variables = Variables(environ, reader)
        family = next((f for f in MPI_FAMILIES if all(map(variables.has, f.chosen_by))), None)
        if family is None:
            names = [f.index[0] for f in MPI_FAMILIES]
            raise SpecError(
                f"{variables.prefix}this process was not started by an MPI launcher: none of {', '.join(names)} is "
                "set. Start it with mpirun -np 4 python SCRIPT; or use PaddleCloudRoleMaker and "
                "penstock.distributed.launch_ps",
                pointer=names[0],
            )
        rank, size = variables.number(family.index[0]), variables.number(family.num[0], least=_MPI_PER_NODE)
        if size % _MPI_PER_NODE or rank >= size:
            raise variables.wrong(family.num[0], "an even number of processes: a server and a trainer each", "4")
        servers = _mpi_servers(variables, size, family.local)
        role: Role = "trainer" if rank % _MPI_PER_NODE else "pserver"
        return JobIdentity(role, rank // _MPI_PER_NODE, size // _MPI_PER_NODE, (), servers)


def num_trainers(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of trainers in `environ`, whatever it has about this process. Raises SpecError."""
    variables = Variables(environ)
    family = _family(variables)
    name = variables.first(family.num)
    if name:
        return variables.number(name, least=1)
    return len(variables.endpoints(TRAINER_ENDPOINTS)) if family is COLLECTIVE else 1


class Variables:
    """Reader of environment variables. Every method raises SpecError naming the variable; `reader` is its prefix."""

    def __init__(self, environ: Mapping[str, str] | None = None, reader: str = "") -> None:
        self.environ = os.environ if environ is None else environ
        self.prefix = f"{reader}: " if reader else ""

    def has(self, name: str) -> bool:
        """Whether a variable is set, and not empty."""
        return bool(self.optional(name))

    def optional(self, name: str) -> str:
        """Return a variable; '' if it is not set."""
        return self.environ.get(name, "").strip()

    def first(self, names: Sequence[str]) -> str:
        """Return the first name that is set; '' if none is."""
        return next(filter(self.has, names), "")

    def require(self, *names: str) -> str:
        """Return the first of `names` that is set. The error is about the first one."""
        name = self.first(names)
        if not name:
            raise self.wrong(names[0])
        return name

    def number(self, name: str, *, least: int = 0, default: int | None = None) -> int:
        """Return a whole number of at least `least`; `default` where the variable is not set."""
        if default is not None and not self.has(name):
            return default
        text = self.optional(self.require(name))
        if not text.isdecimal() or not least <= int(text) <= _MOST:
            expected = EXPECTED.get(name, ("a number of processes",))[0]
            raise self.wrong(name, f"{expected}: a whole number of at least {least}")
        return int(text)

    def role(self, names: Sequence[str]) -> Role:
        """Return the role in the first of `names` that is set, in Fluid's words or Penstock's; by default trainer."""
        name = self.first(names)
        known: tuple[Role, ...] = ("trainer", "pserver")
        words = {role if name == REPLICA_ROLE else role.upper(): role for role in known}
        text = self.optional(name)
        if text and text not in words:
            raise self.wrong(name, " or ".join(words), next(iter(words)))
        return words.get(text, "trainer")

    def endpoints(self, name: str) -> tuple[str, ...]:
        """Return a list of host:port with commas between them."""
        found = tuple(part.strip() for part in self.optional(self.require(name)).split(","))
        if problem := endpoints_problem(found):
            raise self.wrong(name, f"{EXPECTED[name][0]}, with commas between them ({problem})")
        return found

    def wrong(self, name: str, expected: str = "", example: str = "") -> SpecError:
        """Return the error about a variable; by default that it is not as EXPECTED."""
        usual, usual_example = EXPECTED.get(name, ("a number of processes", "4"))
        expected, got = expected or usual, self.environ.get(name)
        found = "not set" if got is None else repr(got)
        text = f"the environment variable {name} is {found}; expected {expected}, for example"
        text = f"{self.prefix}{text} {name}={example or usual_example}"
        return SpecError(text, pointer=name, got=got, expected=expected)


def checked_endpoints(text: str, what: str) -> tuple[str, ...]:
    """Return the endpoints of an argument, "ip:port,ip:port". Raises SpecError; `what`: its beginning."""
    found = tuple(part.strip() for part in text.split(","))
    if problem := endpoints_problem(found):
        raise SpecError(f"{what}: {problem}; expected ip:port,ip:port", got=text)
    return found


def endpoints_problem(endpoints: Sequence[str]) -> str:
    """Describe what is wrong with a list of endpoints; '' if nothing is."""
    for endpoint in endpoints:
        host, colon, port = endpoint.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536) or " " in endpoint:
            return f"{endpoint!r} is no host:port with a port from 1 to 65535"
    twice = sorted({e for e in endpoints if list(endpoints).count(e) > 1})
    return f"{twice[0]!r} is listed twice" if twice else ""


def _family(variables: Variables) -> Family:
    return next(f for f in FAMILIES if all(map(variables.has, f.chosen_by)))


def _trainer(variables: Variables, family: Family, servers: tuple[str, ...]) -> JobIdentity:
    listed = variables.endpoints(TRAINER_ENDPOINTS) if variables.has(TRAINER_ENDPOINTS) else ()
    members = listed if family is COLLECTIVE else ()
    num = _num_trainers(variables, family, members)
    index = _trainer_index(variables, family, num, members)
    if family is not TORCHRUN:
        return JobIdentity("trainer", index, num or 1, listed, servers, members[0] if members else "")
    meeting = f"{variables.optional(MASTER_ADDR)}:{variables.number(MASTER_PORT, least=1)}"
    is_served = variables.optional(AGENT_STORE) == "True"
    return JobIdentity("trainer", index, num or 1, meeting=meeting, is_served=is_served)


def _num_trainers(variables: Variables, family: Family, listed: Sequence[str]) -> int | None:
    """Return the number of trainers; None if no variable has it."""
    name = variables.first(family.num)
    if not name:
        return len(listed) or None
    num = variables.number(name, least=1)
    if listed and num != len(listed):
        raise variables.wrong(name, f"{len(listed)}, as {TRAINER_ENDPOINTS} has {len(listed)}")
    return num


def _trainer_index(variables: Variables, family: Family, num: int | None, listed: tuple[str, ...]) -> int:
    current = variables.optional(CURRENT_ENDPOINT) if listed else ""
    if current and current not in listed:
        raise variables.wrong(CURRENT_ENDPOINT, f"one of {TRAINER_ENDPOINTS}={','.join(listed)}", listed[0])
    name = variables.first(family.index)
    if name == CURRENT_ENDPOINT:
        return listed.index(current)
    if not name and (family is BY_HAND or family is WITH_SERVERS):
        return 0
    index = variables.number(name or family.index[0])
    if name == TRAINER_ID and current and listed.index(current) != index:
        expected = f"entry {index} ({TRAINER_ID}) of {TRAINER_ENDPOINTS}={','.join(listed)}"
        raise variables.wrong(CURRENT_ENDPOINT, expected)
    reason = variables.first(family.num) or TRAINER_ENDPOINTS
    is_of_num = family is not BY_HAND or ((name == RANK) == (reason == WORLD_SIZE) and name != REPLICA_INDEX)
    if num is not None and index >= num and is_of_num:
        raise variables.wrong(name, f"a number from 0 to {num - 1}, as {reason} is {variables.optional(reason)}")
    return index


def _server_index(variables: Variables, servers: Sequence[str], *, by_server_id: bool) -> int:
    names = (SERVER_ID, POD_IP, REPLICA_INDEX) if by_server_id else (POD_IP, SERVER_ID, REPLICA_INDEX)
    name = variables.first(names)
    if not name or (name == POD_IP and not servers):
        return 0
    if name != POD_IP:
        index = variables.number(name)
        if servers and index >= len(servers):
            raise variables.wrong(name, f"a number from 0 to {len(servers) - 1}, as {SERVERS} has {len(servers)}")
        return index
    endpoint = f"{variables.optional(POD_IP)}:{variables.optional(variables.require(PORT))}"
    if endpoint not in servers:
        expected = f"a host that with {PORT} ({endpoint}) stands in {SERVERS}={','.join(servers)}"
        raise variables.wrong(POD_IP, expected, servers[0].rpartition(":")[0])
    return list(servers).index(endpoint)


def _mpi_servers(variables: Variables, size: int, local_name: str) -> tuple[str, ...]:
    count = size // _MPI_PER_NODE
    if variables.has(SERVERS):
        servers = variables.endpoints(SERVERS)
        if len(servers) != count:
            raise variables.wrong(SERVERS, f"{count} servers, one for each two of the {size} processes")
        return servers
    if variables.number(local_name, default=0) != size:
        expected = f"host:port of {count} parameter servers, because the {size} processes are on several hosts"
        raise variables.wrong(SERVERS, expected)
    first = variables.number(PORT, least=1, default=_MPI_FIRST_PORT)
    return tuple(f"127.0.0.1:{first + place}" for place in range(count))
