"""Where a process stands in a job of parameter servers: its role, its number, and who else there is.

Read from the environment that a launcher, a cluster or the control plane sets. A variable that is missing or wrong is a
SpecError that names it, what was found, what is expected, and an example; nothing is guessed. Pure: the environment
comes as a mapping. Source: role_maker.py (Fluid 1.8), spec 1.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.errors import SpecError
from penstock.program.endpoints import endpoints_problem
from penstock.protocol import contract

SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
NUM_TRAINERS = "PADDLE_TRAINERS_NUM"
TRAINER_ID = "PADDLE_TRAINER_ID"
TRAINER_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
CURRENT_ENDPOINT = "PADDLE_CURRENT_ENDPOINT"
COLLECTIVE_ROLE = "PADDLE_TRAINING_ROLE"
ROLE = "TRAINING_ROLE"
SERVER_ID = "PADDLE_PSERVER_ID"
POD_IP = "POD_IP"
PORT = "PADDLE_PORT"


class Role(IntEnum):
    """What a process does: it trains, or it keeps parameters."""

    WORKER = 1
    SERVER = 2


@dataclass(frozen=True, slots=True)
class Position:
    """One process of a job. `index`: among the processes of its role, from 0. `collective`: a job without servers."""

    role: Role
    index: int
    num_workers: int
    server_endpoints: tuple[str, ...] = ()
    worker_endpoints: tuple[str, ...] = ()
    collective: bool = False


def from_environ(environ: Mapping[str, str], reader: str, *, by_server_id: bool = False) -> Position:
    """Read the position of a process of a parameter-server job. `reader`: who asks, for errors.

    `by_server_id`: a server's number is PADDLE_PSERVER_ID if that is set, else the place of POD_IP:PADDLE_PORT in the
    list of servers. Where Paddle's variables for role and number are not set, Penstock's own (PENSTOCK_ROLE,
    PENSTOCK_INDEX) are read. Raises SpecError.
    """
    variables = Variables(environ, reader)
    servers = variables.endpoints(SERVERS, "the parameter servers")
    num_workers = variables.number(NUM_TRAINERS, "the number of trainers", least=1, example="2")
    if _role(variables) == Role.SERVER:
        return Position(Role.SERVER, _server_index(variables, servers, by_server_id), num_workers, servers)
    name = TRAINER_ID if TRAINER_ID in environ or contract.INDEX not in environ else contract.INDEX
    index = variables.number(name, "this trainer's number, from 0", example="0")
    if index >= num_workers:
        raise variables.wrong(name, f"a number from 0 to {num_workers - 1}, as {NUM_TRAINERS} is {num_workers}", "0")
    return Position(Role.WORKER, index, num_workers, servers, _listed(variables))


def from_collective_environ(environ: Mapping[str, str], reader: str) -> Position:
    """Read the position of a trainer in a job without servers. Raises SpecError."""
    variables = Variables(environ, reader)
    if environ.get(COLLECTIVE_ROLE, "TRAINER") != "TRAINER":
        raise variables.wrong(COLLECTIVE_ROLE, "TRAINER: a collective job has no other role", "TRAINER")
    workers = variables.endpoints(TRAINER_ENDPOINTS, "all trainers")
    current = variables.text(CURRENT_ENDPOINT, "this trainer's host:port", workers[0])
    index = variables.number(TRAINER_ID, "this trainer's number, from 0", default=0)
    if current not in workers or workers.index(current) != index:
        raise variables.wrong(
            CURRENT_ENDPOINT,
            f"entry {index} ({TRAINER_ID}) of {TRAINER_ENDPOINTS}={','.join(workers)}",
            workers[min(index, len(workers) - 1)],
        )
    return Position(Role.WORKER, index, len(workers), (), workers, collective=True)


def checked(position: Position, reader: str) -> Position:
    """Return a position that a user has put together. Raises SpecError for one that cannot be."""
    for kind, endpoints in (
        ("server_endpoints", position.server_endpoints),
        ("worker_endpoints", position.worker_endpoints),
    ):
        problem = endpoints_problem(endpoints)
        if problem:
            raise SpecError(f"{reader}: {kind} is {list(endpoints)}: {problem}", pointer=kind, got=list(endpoints))
    if not position.collective and not position.server_endpoints:
        raise SpecError(
            f"{reader}: server_endpoints is empty; expected the parameter servers, e.g. ['127.0.0.1:6174']",
            pointer="server_endpoints",
        )
    for name, number in (("worker_num", position.num_workers), ("current_id", position.index)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise SpecError(f"{reader}: {name} is {number!r}; expected a whole number", pointer=name, got=number)
    if position.num_workers < 1:
        raise SpecError(f"{reader}: worker_num is {position.num_workers}; expected at least 1", pointer="worker_num")
    count = len(position.server_endpoints) if position.role == Role.SERVER else position.num_workers
    if not 0 <= position.index < count:
        kind = "servers" if position.role == Role.SERVER else "workers"
        raise SpecError(
            f"{reader}: current_id is {position.index}, but there are {count} {kind}; expected 0 to {count - 1}",
            pointer="current_id",
            got=position.index,
        )
    return position


class Variables:
    """Reads environment variables for `reader`. Every method raises SpecError naming the variable."""

    def __init__(self, environ: Mapping[str, str], reader: str) -> None:
        self.environ = environ
        self.reader = reader

    def text(self, name: str, expected: str, example: str) -> str:
        """Return a variable that has to be set."""
        if not self.environ.get(name, "").strip():
            raise self.wrong(name, expected, example)
        return self.environ[name].strip()

    def number(
        self, name: str, expected: str, *, least: int = 0, example: str = "0", default: int | None = None
    ) -> int:
        """Return a whole number of at least `least`."""
        if default is not None and name not in self.environ:
            return default
        text = self.text(name, expected, example)
        if not text.isdecimal() or int(text) < least:
            raise self.wrong(name, f"{expected}: a whole number of at least {least}", example)
        return int(text)

    def endpoints(self, name: str, whose: str) -> tuple[str, ...]:
        """Return a list of host:port with commas between them."""
        example = "10.0.0.1:6174,10.0.0.2:6174"
        found = tuple(part.strip() for part in self.text(name, f"host:port of {whose}", example).split(","))
        problem = endpoints_problem(found)
        if problem:
            raise self.wrong(name, f"host:port of {whose}, with commas between them ({problem})", example)
        return found

    def wrong(self, name: str, expected: str, example: str) -> SpecError:
        """Return the error about a variable."""
        value = self.environ.get(name)
        found = "not set" if value is None else repr(value)
        return SpecError(
            f"{self.reader}: the environment variable {name} is {found}; expected {expected}, for example "
            f"{name}={example}",
            pointer=name,
            got=value,
            expected=expected,
        )


def _role(variables: Variables) -> Role:
    ours = {"trainer": "TRAINER", "pserver": "PSERVER"}.get(variables.environ.get(contract.ROLE, ""))
    text = variables.environ.get(ROLE) or ours
    if text not in ("TRAINER", "PSERVER"):
        raise variables.wrong(ROLE, "TRAINER or PSERVER", "TRAINER")
    return Role.SERVER if text == "PSERVER" else Role.WORKER


def _server_index(variables: Variables, servers: Sequence[str], by_server_id: bool) -> int:
    environ = variables.environ
    numbered = [SERVER_ID] if by_server_id and SERVER_ID in environ else []
    if not numbered and POD_IP not in environ and contract.INDEX in environ:
        numbered = [contract.INDEX]
    for name in numbered:
        index = variables.number(name, "this parameter server's number, from 0")
        if index >= len(servers):
            raise variables.wrong(name, f"a number from 0 to {len(servers) - 1}, as {SERVERS} has {len(servers)}", "0")
        return index
    host, _, port = servers[0].rpartition(":")
    endpoint = ":".join(
        (
            variables.text(POD_IP, "the host under which this server stands in the list of servers", host),
            variables.text(PORT, "the port on which this server listens", port),
        )
    )
    if endpoint not in servers:
        raise variables.wrong(
            POD_IP, f"a host that with {PORT} ({endpoint}) stands in {SERVERS}={','.join(servers)}", host
        )
    return list(servers).index(endpoint)


def _listed(variables: Variables) -> tuple[str, ...]:
    return variables.endpoints(TRAINER_ENDPOINTS, "all trainers") if variables.environ.get(TRAINER_ENDPOINTS) else ()
