"""The trainers of a job, as a data set needs them: this one's rank, and an all-gather of whole numbers.

A fleet with parameter servers and the group of a collective job are such; `peers_of` finds them.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.distributed.collective import this_process
from penstock.errors import SpecError
from penstock.identity import num_trainers

if TYPE_CHECKING:  # loads torch.distributed, which one trainer does without
    from penstock.distributed.trainer_group import TrainerGroup


class Peers(Protocol):
    """All trainers. Calls are made by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """The number of this trainer."""

    @property
    def num(self) -> int:
        """How many there are, at least 2."""

    def name(self, rank: int) -> str:
        """Name a trainer for an error."""

    def towards(self) -> tuple[str, int]:
        """Return an endpoint of the job: the address that leads there is one where the others reach this trainer."""

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Return what each gave, by rank: equally many whole numbers of 64 bits, at most 60. Raises Unavailable."""

    def check(self) -> None:
        """Raise Unavailable if a trainer is known to be lost."""


class FleetPeers:
    """The workers of a fleet, which exchange numbers through the parameter servers."""

    def __init__(self, fleet: Any) -> None:
        self._fleet = fleet
        self.rank, self.num = int(fleet.worker_index()), int(fleet.worker_num())

    def name(self, rank: int) -> str:
        return f"worker {rank}"

    def towards(self) -> tuple[str, int]:
        host, _, port = self._fleet.server_endpoints()[0].rpartition(":")
        return host, int(port)

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        places = np.zeros((self.num, len(mine)), np.int64)
        places[self.rank] = mine
        total = np.zeros_like(places)
        self._fleet.all_reduce_worker(places, total)  # each place is one worker's
        return [[int(number) for number in row] for row in total]

    def check(self) -> None:
        """A lost worker is noticed when workers meet."""


class GroupPeers:
    """The trainers of a collective job; calls are made between steps."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self.rank, self.num = group.ranks.rank, group.ranks.num_ranks

    def name(self, rank: int) -> str:
        return self._group.ranks.name(rank)

    def towards(self) -> tuple[str, int]:
        host, _, port = self._group.ranks.meeting.rpartition(":")
        return host, int(port)

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        return self._group.numbers(list(mine))

    def check(self) -> None:
        self._group.check()


def peers_of(fleet: Any, what: str) -> Peers | None:
    """Return the trainers of a fleet, or (None) of the collective job; None: this process is alone.

    Raises SpecError if a launcher's variables name more, but it is not known how to reach them.
    """
    if fleet is not None:
        return FleetPeers(fleet) if int(fleet.worker_num()) > 1 else None
    if this_process.group is None and (num := num_trainers()) > 1:
        raise SpecError(
            f"{what}: the launcher has started {num} trainers, but they have not met. Run the startup program before, "
            f"or give {what} the fleet",
            got=num,
        )
    return None if this_process.group is None else GroupPeers(this_process.group)


def own_address(towards: tuple[str, int]) -> str:
    """Return the address of this host from which an endpoint is reached; nothing is sent. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
