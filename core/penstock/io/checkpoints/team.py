"""When a checkpoint is due, and the processes that make it together: here one alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.errors import SpecError
from penstock.io.checkpoints.record import Collect, Kind
from penstock.io.saves.manifest import ServersPart
from penstock.ps.settings import Copy


class Schedule:
    """Due every so many steps, and when so many seconds have passed since the last one.

    `every_steps`, `every_s`: None for never. The time begins when it is made.
    """

    def __init__(
        self, every_steps: int | None, every_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if every_steps is not None and (isinstance(every_steps, bool) or every_steps != int(every_steps)):
            raise SpecError(f"every_steps is {every_steps!r}; expected a whole number", got=every_steps)
        for name, value in (("every_steps", every_steps), ("every_s", every_s)):
            if value is not None and not value > 0:
                raise SpecError(f"{name} is {value!r}; expected a number above 0, or None for never", got=value)
        self.every_steps, self.every_s = every_steps, every_s
        self._clock = clock
        self._last = clock()

    def by_steps(self, steps: int) -> bool:
        """Whether one is due after so many steps."""
        return self.every_steps is not None and steps > 0 and steps % self.every_steps == 0

    def by_time(self) -> bool:
        """Whether enough time has passed."""
        return self.every_s is not None and self._clock() - self._last >= self.every_s

    def saved(self) -> None:
        """One has just been begun."""
        self._last = self._clock()


class Team:
    """One process, and the base of several. Called on the training thread, but for `outcome` and a `Collect`.

    Each rank hands in its own state, a text; the first one writes them, and the values that all have.
    """

    kind: Kind = "local"
    rank: int = 0
    num_ranks: int = 1

    @property
    def writes(self) -> bool:
        """Whether this rank writes the checkpoint for all."""
        return self.rank == 0

    def is_due(self, schedule: Schedule, steps: int) -> bool:
        """Whether all ranks save now, after `steps` steps of this one; all come to the same answer."""
        return schedule.by_steps(steps) or schedule.by_time()

    def ends_after(self, steps: int, *, is_asked: bool) -> bool:
        """Whether all ranks save and end now, after `steps` steps of this one, since they are preempted.

        `is_asked`: whether this rank has the notice. All come to the same answer; False until every rank has it.
        """
        return is_asked

    def flush(self) -> None:
        """Bring to its servers what this rank has trained, before the last checkpoint of a preempted training."""

    def hand_in(self, mine: str) -> Collect:
        """Give this rank's text for the next checkpoint. Raises what the first rank has met since the last call."""
        return lambda: [mine]

    def save_servers(self, work: Callable[[], Path]) -> ServersPart | None:
        """Have servers write their part into the unfinished folder that `work` makes, on rank 0. After `hand_in`."""
        return None

    def outcome(self, error: str) -> None:
        """Send the others the outcome of the checkpoint: '' if it was written. First rank."""

    def restores(self, copy: Copy) -> None:
        """Announce what this rank is about to restore. Raises OtherCheckpoint if servers began from another one."""

    def share(self, text: str) -> str:
        """Return the first rank's text, on every rank."""
        return text

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Give every rank the tensors of the first one."""

    def saved_step(self, mine: str, step: int) -> int | None:
        """Return the step of the checkpoint that has this rank's text, once it is closed; None: of none so far.

        `mine`: what this rank has handed in, after `step` steps of its own.
        """
        return step

    def close(self, last: str) -> None:
        """End, with this rank's last text. Waits until what it has handed in is written, and raises if it is not."""
