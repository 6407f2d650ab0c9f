"""The trainers of a job with parameter servers. ServersPart write what they keep, each its part; trainer 0 the rest.

A checkpoint begins with a meeting of all trainers that are left, at which trainer 0 gets their texts. In sync mode they
stand between the same two rounds then, and no server begins the next one before trainer 0 pushes to it: the servers'
parts are of one step. When it is due follows from the number of the round, which a trainer that was started again
shares with the others. In other modes trainers have no common step: after the meeting all wait for the servers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from penstock.errors import SpecError
from penstock.io.checkpoints.record import Kind
from penstock.io.checkpoints.schedule import Schedule
from penstock.io.checkpoints.teams import Collect
from penstock.io.manifest import ServersPart
from penstock.program.program import Program
from penstock.ps.client import TrainerClient
from penstock.ps.communicator import descriptor_of
from penstock.ps.opening import opened_client

FOLDER = "servers"


class TrainersTeam:
    """One for each manager. Raises Unavailable, PeerError."""

    kind: Kind = "pserver"

    def __init__(self, program: Program) -> None:
        self._descriptor = descriptor_of(program)
        self.rank, self.num_ranks = self._descriptor.trainer, self._descriptor.num_trainers
        self._is_sync = self._descriptor.mode == "sync"

    @property
    def _client(self) -> TrainerClient:
        return opened_client(str(self._descriptor))

    def is_due(self, schedule: Schedule, steps: int) -> bool:
        if schedule.every_s is not None and self.num_ranks > 1:
            raise SpecError(
                f"every_s={schedule.every_s:g} with {self.num_ranks} trainers and parameter servers: trainers agree on "
                "when to save by counting; use every_steps",
                got=schedule.every_s,
            )
        return schedule.by_steps(self._client.links[0].round if self._is_sync else steps) or schedule.by_time()

    def hand_in(self, mine: str) -> Collect:
        texts = self._gathered(mine.encode())
        return lambda: texts

    def _gathered(self, mine: bytes) -> list[str]:
        """Return what every trainer brings to a meeting; nothing of those that have left."""
        if self.num_ranks == 1:
            return [mine.decode()]
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64)
        sizes[self.rank] = len(mine)
        sizes = self._met(sizes)
        texts = torch.zeros(self.num_ranks, -(-int(sizes.max()) // 8), dtype=torch.int64)
        texts[self.rank].view(torch.uint8)[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = self._met(texts).view(torch.uint8)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(found, sizes.tolist(), strict=True)]

    def _met(self, mine: torch.Tensor) -> torch.Tensor:
        total = self._client.meet(mine)
        return mine if total is None else total.reshape(mine.shape)

    def save_servers(self, work: Callable[[], Path]) -> ServersPart | None:
        try:
            if self.rank == 0:
                self._client.save(str((work() / FOLDER).absolute()))
        finally:
            if not self._is_sync and self.num_ranks > 1:
                self._client.meet(None)
        return ServersPart(FOLDER, len(self._descriptor.endpoints))

    def outcome(self, error: str) -> None:
        return

    def share(self, text: str) -> str:
        return text

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        return

    def close(self, last: str) -> None:
        return
