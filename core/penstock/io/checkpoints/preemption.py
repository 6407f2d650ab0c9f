"""A training's end by preemption: whether this process was asked to, its answer, and the exit.

The agent asks by a file (`penstock.protocol.preemption`). After each step the manager looks for it, which costs one
`stat`, and the team agrees on the step that all trainers save and end after (`Team.ends_after`). A process that no
agent started is never asked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock import identity
from penstock.errors import Unavailable
from penstock.identity import Variables
from penstock.protocol import preemption

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_pause = threading.Event()  # never set


class Preempted(SystemExit):
    """The job was preempted: a checkpoint of `step` is written, and this process has to end.

    Raised by `CheckpointManager.step` and `save` on the thread that calls them, and by `train_from_dataset`. It ends
    the process with exit status 75, after `finally` clauses and `with` blocks, unless the script catches it.
    """

    def __init__(self, step: int) -> None:
        super().__init__(preemption.STATUS)
        self.step = step


class PreemptionNotice:
    """The notice to this process. `path`: where it would lie; None: no agent asks."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @staticmethod
    def from_environ(environ: Mapping[str, str] | None = None) -> PreemptionNotice:
        """Return that of the replica that this process is, or belongs to."""
        variables = Variables(environ)
        socket = variables.optional(identity.SOCKET) if variables.has(identity.REPLICA_ID) else ""
        return PreemptionNotice(preemption.notice_path(socket) if socket else None)

    @property
    def is_given(self) -> bool:
        """Whether this process is asked to save and to end."""
        return self._path is not None and os.path.exists(self._path)

    def end(self, saved_step: Callable[[], int | None], own_step: int) -> Preempted:
        """Answer which step's checkpoint is written, once one is; return what is to be raised.

        `saved_step`: returns that step, None until then. `own_step`: how many steps this process has made. Raises
        Unavailable if none is written while the notice lasts. An answer that cannot be written is logged: the
        checkpoint is found without it.
        """
        step = self._wait(saved_step)
        if step is None:
            raise Unavailable(
                f"the checkpoint with this process's part, after {own_step} steps, was not written while the notice of "
                "the preemption lasted. The next attempt resumes from the one before. If trainer 0 has failed, its log "
                "says why; else checkpoint.preempt_grace_s has to hold two steps and a checkpoint",
                step=own_step,
            )
        try:
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(preemption.encode_answer(step))
        except OSError as error:
            _log.error("the agent does not learn that step %d was saved before the preemption: %s", step, error)
        _log.info("preempted: this process ends, with a checkpoint of step %d", step)
        return Preempted(step)

    def _wait(self, saved_step: Callable[[], int | None]) -> int | None:
        while (step := saved_step()) is None and self._lasts():
            _pause.wait(_POLL_S)
        return saved_step() if step is None else step  # the last one may have come with the end of the notice

    def _lasts(self) -> bool:
        try:
            found = preemption.decode(self._path.read_bytes()) if self._path is not None else None
        except FileNotFoundError:  # withdrawn: another process has failed
            return False
        return found is not None and time.clock_gettime(time.CLOCK_BOOTTIME) < found.until
