"""Fluid's role makers: each finds out in `generate_role` which process of the job this one is.

A role maker that has not been asked yet generates its role at the first question; the environment is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import SpecError
from penstock.fleet.position import Position, Role, checked, from_collective_environ, from_environ, of_identity
from penstock.identity import JobIdentity

__all__ = [
    "GeneralRoleMaker",
    "MPISymetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleMakerBase",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
]


class RoleMakerBase:
    """What all role makers answer. A role maker of your own defines `find`."""

    def __init__(self) -> None:
        self._position: Position | None = None

    def find(self) -> Position:
        """Return the position of this process. Raises SpecError."""
        raise NotImplementedError(f"{type(self).__name__} has to define find() -> Position")

    def generate_role(self) -> None:
        """Find the position, unless it is known."""
        self._position = self._position or self.find()

    @property
    def position(self) -> Position:
        """The position of this process in the job."""
        self.generate_role()
        if self._position is None:
            raise SpecError(f"{type(self).__name__}.generate_role has found no position")
        return self._position

    def is_worker(self) -> bool:
        """Whether this process trains."""
        return self.position.role == Role.WORKER

    def is_server(self) -> bool:
        """Whether this process keeps parameters."""
        return self.position.role == Role.SERVER

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0."""
        return self.is_worker() and self.position.index == 0

    def worker_num(self) -> int:
        """Return the number of workers."""
        return self.position.num_workers

    def server_num(self) -> int:
        """Return the number of servers."""
        return len(self.position.server_endpoints)

    def worker_index(self) -> int:
        """Return this worker's number. Raises SpecError on a server."""
        return self._index(Role.WORKER, "worker_index")

    def server_index(self) -> int:
        """Return this server's number. Raises SpecError on a worker."""
        return self._index(Role.SERVER, "server_index")

    def role_id(self) -> int:
        """Return the number of this process in its role."""
        return self.position.index

    def get_trainer_endpoints(self) -> list[str]:
        """Return the workers' endpoints; empty where workers have none."""
        return list(self.position.worker_endpoints)

    def get_pserver_endpoints(self) -> list[str]:
        """Return the servers' endpoints."""
        return list(self.position.server_endpoints)

    def to_string(self) -> str:
        """Describe the position in one line."""
        p = self.position
        return (
            f"role: {p.role.name}, current_id: {p.index}, worker_num: {p.num_workers}, "
            f"worker_endpoints: {list(p.worker_endpoints)}, server_endpoints: {list(p.server_endpoints)}"
        )

    def _index(self, role: Role, question: str) -> int:
        if self.position.role != role:
            raise SpecError(
                f"{question}() is asked of a {self.position.role.name.lower()} (number {self.position.index}); "
                f"ask is_{role.name.lower()}() first"
            )
        return self.position.index


class _OfEnvironment(RoleMakerBase):
    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._environ = environ


class PaddleCloudRoleMaker(_OfEnvironment):
    """The role stands in the environment, as `launch_ps`, PaddleCloud and Penstock's control plane set it.

    `environ`: read instead of the process's environment.
    """

    def __init__(self, is_collective: bool = False, *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(environ=environ)
        self._is_collective = is_collective

    def find(self) -> Position:
        """Read the environment. Raises SpecError naming the variable."""
        read = from_collective_environ if self._is_collective else from_environ
        return read(self._environ, type(self).__name__)


class GeneralRoleMaker(_OfEnvironment):
    """As PaddleCloudRoleMaker, but a server may give its number (PADDLE_PSERVER_ID) instead of its endpoint.

    Fluid's other arguments configure its gloo rendezvous, which is not needed here; they are refused by name.
    """

    def find(self) -> Position:
        """Read the environment. Raises SpecError naming the variable."""
        return from_environ(self._environ, type(self).__name__, by_server_id=True)


class MPISymetricRoleMaker(_OfEnvironment):
    """A server and a worker for each two ranks of an MPI launcher. (Fluid's spelling.)"""

    def find(self) -> Position:
        """Read the launcher's environment. Raises SpecError."""
        return of_identity(JobIdentity.from_mpi(self._environ, reader=type(self).__name__))


class UserDefinedRoleMaker(RoleMakerBase):
    """The caller states everything. Raises SpecError for what cannot be."""

    def __init__(
        self,
        current_id: int = 0,
        role: Role = Role.WORKER,
        worker_num: int = 0,
        server_endpoints: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(role, Role):
            raise SpecError(f"UserDefinedRoleMaker: role is {role!r}; expected Role.WORKER or Role.SERVER", got=role)
        said = Position(role, current_id, worker_num, _strings("server_endpoints", server_endpoints))
        self._position = checked(said, type(self).__name__)

    def find(self) -> Position:
        """Return what the caller said."""
        return self.position


class UserDefinedCollectiveRoleMaker(RoleMakerBase):
    """The caller states everything, for a job without servers. Raises SpecError for what cannot be."""

    def __init__(self, current_id: int = 0, worker_endpoints: Sequence[str] | None = None) -> None:
        super().__init__()
        workers = _strings("worker_endpoints", worker_endpoints)
        said = Position(Role.WORKER, current_id, len(workers), (), workers, collective=True)
        self._position = checked(said, type(self).__name__)

    def find(self) -> Position:
        """Return what the caller said."""
        return self.position


def _strings(name: str, given: Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    if isinstance(given, str) or not all(isinstance(item, str) for item in given):
        raise SpecError(f"{name} is {given!r}; expected a list of 'host:port'", pointer=name, got=given)
    return tuple(given)
