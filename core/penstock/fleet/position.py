"""Position of a process in a fleet's job, as role makers return it: its role, its number, and its peers.

`JobIdentity` reads the environment; a role maker requires more of it: a variable that is missing is a SpecError with
what is expected and an example. Source: role_maker.py (Fluid 1.8), spec 1.11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from penstock import identity
from penstock.errors import SpecError
from penstock.identity import JobIdentity, Variables, endpoints_problem


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


def from_environ(environ: Mapping[str, str] | None, reader: str, *, by_server_id: bool = False) -> Position:
    """Read the position of a process of a parameter-server job. `reader`: the role maker, for errors.

    `by_server_id`: PADDLE_PSERVER_ID numbers a server, else the place of POD_IP:PADDLE_PORT in the list of servers.
    Where Paddle's variables for role and number are not set, Penstock's own are read. Raises SpecError.
    """
    variables = Variables(environ, reader)
    for names in ((identity.SERVERS,), (identity.NUM_TRAINERS,), identity.ROLES):
        variables.require(*names)
    found = JobIdentity.from_environ(environ, reader=reader, with_servers=True, by_server_id=by_server_id)
    if found.role == "trainer":
        variables.require(identity.TRAINER_ID, identity.REPLICA_INDEX)
    else:
        variables.require(identity.POD_IP, identity.SERVER_ID, identity.REPLICA_INDEX)
    return of_identity(found)


def from_collective_environ(environ: Mapping[str, str] | None, reader: str) -> Position:
    """Read the position of a trainer in a job without servers. Raises SpecError."""
    variables = Variables(environ, reader)
    if variables.optional(identity.COLLECTIVE_ROLE) not in ("", "TRAINER"):
        raise variables.wrong(identity.COLLECTIVE_ROLE, "TRAINER: a collective job has no other role", "TRAINER")
    variables.require(identity.TRAINER_ENDPOINTS)
    variables.require(identity.CURRENT_ENDPOINT)
    found = JobIdentity.from_environ(environ, reader=reader)
    if found.role == "pserver":
        raise variables.wrong(variables.first(identity.ROLES), "a trainer's: a collective job has no other role")
    return Position(Role.WORKER, found.index, found.num_trainers, (), found.trainer_endpoints, collective=True)


def of_identity(found: JobIdentity) -> Position:
    """Return the position of a process of a job with servers."""
    if found.role == "pserver":
        return Position(Role.SERVER, found.index, found.num_trainers, found.server_endpoints)
    return Position(Role.WORKER, found.index, found.num_trainers, found.server_endpoints, found.trainer_endpoints)


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
