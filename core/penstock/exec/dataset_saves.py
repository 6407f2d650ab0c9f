"""Checkpoints of a pass over a data set: taken between the steps of all Hogwild threads.

A thread is *at work* from taking a batch until that is used. When a checkpoint is due, the thread that has found out
waits until no other is at work, and none begins, while the training's tensors are copied: what the position of the
reader says is what the parameters have learned from, each batch once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from penstock.errors import SpecError
from penstock.program.program import Program


class Checkpoints(Protocol):
    """`fluid.io.CheckpointManager`, as a pass sees it."""

    @property
    def program(self) -> Program: ...

    @property
    def num_steps(self) -> int: ...

    def advance(self) -> bool: ...

    def save(self, *, position: Any = None) -> None: ...

    def data_ended(self, *, position: Any) -> None: ...

    def pass_ended(self, *, position: Any = None) -> None: ...


class Saves:
    """The checkpoints of one pass; `manager` None: there are none. Thread-safe."""

    def __init__(self, manager: Checkpoints | None, program: Program, position: Callable[[], Any]) -> None:
        """Raises SpecError for a manager of another program."""
        if manager is not None and manager.program is not program:
            raise SpecError(
                "train_from_dataset is given a CheckpointManager of another program than it trains; make it of the same"
            )
        self._manager, self._position = manager, position
        self._turn = threading.Condition()
        self._at_work, self._saving, self._saved_at = 0, False, -1

    def begin(self) -> None:
        """Go to work: before a batch is taken."""
        if self._manager is None:
            return
        with self._turn:
            self._turn.wait_for(lambda: not self._saving)
            self._at_work += 1

    def end(self, *, trained: bool) -> None:
        """Be at work no more. `trained`: on a batch; it is counted, and saved if that is due, which may raise."""
        if self._manager is None:
            return
        with self._turn:
            self._at_work -= 1
            self._turn.notify_all()
            if trained and self._manager.advance():
                self._save(self._manager)

    def _save(self, manager: Checkpoints) -> None:
        """Save when nobody is at work, unless another thread has just done so. The lock is held."""
        self._turn.wait_for(lambda: not self._saving)
        if self._saved_at == manager.num_steps:
            return
        self._saving = True
        try:
            self._turn.wait_for(lambda: not self._at_work)
            self._saved_at = manager.num_steps
            manager.save(position=self._position())
        finally:
            self._saving = False
            self._turn.notify_all()

    def data_ended(self) -> None:
        """There is no more data here; other trainers may have some, in whose steps this one takes part without rows."""
        if self._manager is not None:
            self._manager.data_ended(position=self._position())

    def ended(self, position: Any) -> None:
        """The pass is over; `position`: of the reader, between it and the next one."""
        if self._manager is not None:
            self._manager.pass_ended(position=position)
