"""The trainers of a collective job, as data sets need them (`penstock.dataset.peers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class GroupPeers:
    """A group's trainers. `group`: what `collective.form` has made; calls are made between steps."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.num = int(group.ranks.rank), int(group.ranks.num_ranks)
        self.name: Callable[[int], str] = group.ranks.name

    def towards(self) -> tuple[str, int]:
        """Return where the trainers have met."""
        host, _, port = self._group.ranks.meeting.rpartition(":")
        return host, int(port)

    def gather(self, mine: Sequence[int]) -> list[list[int]]:
        """Return what each gave. Raises Unavailable, SpecError."""
        found: list[list[int]] = self._group.numbers(list(mine))
        return found

    def check(self) -> None:
        """Raise Unavailable if one is lost."""
        self._group.check()
