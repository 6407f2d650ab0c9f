"""The ranks of a collective job, which exchange messages about checkpoints through the store of their rendezvous.

All have the same values, so rank 0 writes them; each rank's text goes through the store, so that only rank 0 needs to
reach the folder. Ranks make each step together, one whose data has ended without rows: all count alike. Rank 0 decides
by time, and announces before a step that all save after it. A rank that has closed its manager hands in nothing
more, and its last text stands for it from then on.

A preemption is agreed on in the same way, without a message while there is none: a rank that has the notice says so
once, and looks after each step from then on which step is the last. When all have said so, rank 0 announces the next
step, before it begins it; no other rank can finish that one before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from penstock.distributed.trainer_group import TrainerGroup
from penstock.errors import Unavailable
from penstock.io.checkpoints.record import Collect, Kind
from penstock.io.checkpoints.team import Schedule, Team
from penstock.logger import warn_once

_log = logging.getLogger(__name__)
_POLL_S = 0.005
WAIT_S = 300.0
"""So long a rank may be behind another one when a checkpoint is made."""
_pause = threading.Event()  # never set
_numbers = count()  # of managers: every rank makes them in the same order


class RanksTeam(Team):
    """One for each manager. Raises Unavailable when a rank is lost."""

    kind: Kind = "collective"

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self.rank, self.num_ranks = group.rank, group.ranks.num_ranks
        self._store: Any = group.store(f"checkpoints/{next(_numbers)}")
        self._saves = 0  # handed in by this rank
        self._seen = 0  # of these, those of which it knows what came
        self._restores = 0
        self._is_ready = False  # this rank has said that it has the notice
        self._last_step: int | None = None  # of a preempted training, on rank 0

    def is_due(self, schedule: Schedule, steps: int) -> bool:
        if schedule.every_s is None:
            return schedule.by_steps(steps)
        announced = self._has(f"at/{steps}")
        if self.rank == 0 and not announced and schedule.by_time():
            self._set(f"at/{steps + 1}", "save")
        return announced or schedule.by_steps(steps)

    def ends_after(self, steps: int, *, is_asked: bool) -> bool:
        if not is_asked:
            return False
        if self.rank:
            if not self._is_ready:
                self._set(f"preempted/{self.rank}", "ready")
                self._is_ready = True
            if self._has("closed"):
                warn_once(_log, "rank 0 has closed its CheckpointManager: no rank saves for the preemption", self)
            return self._has(f"ends/{steps}")
        if self._last_step is None and self._all_are_ready():
            self._last_step = steps + 1
            self._set(f"ends/{self._last_step}", "save")
        return self._last_step == steps

    def _all_are_ready(self) -> bool:
        """Whether every other rank looks after each step for the last one, or has closed its manager."""
        return all(self._has(f"preempted/{r}") or self._has(f"last/{r}") for r in range(1, self.num_ranks))

    def hand_in(self, mine: str) -> Collect:
        number, self._saves = self._saves, self._saves + 1
        if self.rank:
            self._set(f"{number}/{self.rank}", mine)
            self._check_outcomes()
        return lambda: self._collect(number, mine)

    def _collect(self, number: int, mine: str) -> list[str]:
        others = range(1, self.num_ranks)
        self._wait(
            lambda: [r for r in others if not (self._has(f"{number}/{r}") or self._has(f"last/{r}"))],
            "has not handed in its part of the checkpoint: does it call step() after each step, as rank 0 does?",
        )
        found = [mine]
        for rank in others:
            key = f"{number}/{rank}"
            found.append(self._get(key if self._has(key) else f"last/{rank}"))
            self._store.delete_key(key)
        return found

    def outcome(self, error: str) -> None:
        self._set(f"outcome/{self._saves - 1}", error or "written")

    def _check_outcomes(self) -> None:
        """Raise Unavailable for a checkpoint that rank 0 could not write, once it has said so."""
        while self._seen < self._saves and self._has(f"outcome/{self._seen}"):
            said = self._get(f"outcome/{self._seen}")
            self._seen += 1
            if said != "written":
                raise Unavailable(f"{self._group.ranks.name(0)} could not write a checkpoint: {said}")

    def share(self, text: str) -> str:
        key, self._restores = f"restore/{self._restores}", self._restores + 1
        if self.rank == 0:
            self._set(key, text)
            return text
        self._wait(lambda: [] if self._has(key) else [0], "has not said what it restores")
        return self._get(key)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        self._group.broadcast(tensors)

    def close(self, last: str) -> None:
        if self.rank == 0:
            self._set("closed", "yes")
            return
        self._set(f"last/{self.rank}", last)
        self._wait(
            lambda: [] if self._has("closed") or self._has(f"outcome/{self._saves - 1}") or not self._saves else [0],
            "has not written the last checkpoint",
        )
        self._check_outcomes()

    # -- the store ---------------------------------------------------------------------------------

    def _wait(self, missing: Callable[[], list[int]], words: str) -> None:
        until = time.monotonic() + WAIT_S
        while ranks := missing():
            self._group.check()
            if time.monotonic() > until:
                names = ", ".join(self._group.ranks.name(rank) for rank in ranks)
                raise Unavailable(f"{names} {words} ({WAIT_S:g} s)", ranks=ranks)
            _pause.wait(_POLL_S)

    def _has(self, key: str) -> bool:
        return bool(self._guarded(lambda: self._store.check([key])))

    def _get(self, key: str) -> str:
        text: str = self._guarded(lambda: self._store.get(key)).decode()
        return text

    def _set(self, key: str, text: str) -> None:
        self._guarded(lambda: self._store.set(key, text))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except dist.DistError as error:
            raise self._group.why() or Unavailable(
                f"the store of {self._group.ranks.name(0)} does not answer: {str(error).splitlines()[0]}"
            ) from error
