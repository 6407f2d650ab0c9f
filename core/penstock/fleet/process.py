"""What every fleet knows of its process: its role, its number, its peers, and its part of a list of files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import SpecError
from penstock.fleet.order import OrderError
from penstock.fleet.position import Position
from penstock.fleet.roles import RoleMakerBase
from penstock.fleet.strategy import StrategyTypeError


class FleetProcess:
    """One process of a job. `init` of a fleet sets its role maker."""

    def __init__(self) -> None:
        self._role_maker: RoleMakerBase | None = None

    @property
    def _role(self) -> RoleMakerBase:
        if self._role_maker is None:
            raise OrderError("fleet does not know yet which process this is; call fleet.init(role) first")
        return self._role_maker

    @property
    def _position(self) -> Position:
        return self._role.position

    def is_worker(self) -> bool:
        """Whether this process trains."""
        return self._role.is_worker()

    def is_server(self) -> bool:
        """Whether this process keeps parameters."""
        return self._role.is_server()

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0."""
        return self._role.is_first_worker()

    def worker_index(self) -> int:
        """Return this worker's number."""
        return self._role.worker_index()

    def worker_num(self) -> int:
        """Return the number of workers."""
        return self._role.worker_num()

    def server_index(self) -> int:
        """Return this server's number."""
        return self._role.server_index()

    def server_num(self) -> int:
        """Return the number of servers."""
        return self._role.server_num()

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the workers' endpoints; empty where workers have none."""
        found = self._role.get_trainer_endpoints()
        return ",".join(found) if to_string else found

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the servers' endpoints."""
        found = self._role.get_pserver_endpoints()
        return ",".join(found) if to_string else found

    def split_files(self, files: Sequence[str]) -> list[str]:
        """Return this worker's part of a list of files: contiguous, the remainder to the first workers."""
        return split_files(files, self.worker_index(), self.worker_num())


def role_maker_of(given: object, default: Callable[[], RoleMakerBase]) -> RoleMakerBase:
    """Return the role maker that `init` was given, or `default()`. Raises StrategyTypeError."""
    if given is not None and not isinstance(given, RoleMakerBase):
        raise StrategyTypeError(
            f"fleet.init is given {given!r}; expected a role maker, such as PaddleCloudRoleMaker()", got=given
        )
    return default() if given is None else given


def check_optimizer(given: object) -> None:
    """Raise StrategyTypeError for what a fleet can't distribute: all that has no `minimize`."""
    if not callable(getattr(given, "minimize", None)):
        raise StrategyTypeError(
            f"distributed_optimizer is given {given!r}; expected an optimizer: fluid.optimizer.SGD(0.01)", got=given
        )


def split_files(files: Sequence[str], index: int, num_workers: int) -> list[str]:
    """Return the files of worker `index`: contiguous, in order, one more for the first workers where they do not fit.

    Every file goes to exactly one worker: 5 files for 2 workers are [a, b, c] and [d, e]; 2 for 3 are [a], [b] and [].
    """
    if isinstance(files, str) or not all(isinstance(file, str) for file in files):
        raise SpecError(f"split_files takes a list of file names; got {files!r}", got=files)
    each, more = divmod(len(files), num_workers)
    first = index * each + min(index, more)
    return list(files[first : first + each + (index < more)])
