"""A training's end by preemption: whether this process was asked to, its answer, and the exit.

The agent asks by a file (`penstock.protocol.preemption`). After each step the manager looks for it, which costs one
`stat`, and the team agrees on the step that all trainers save and end after (`Team.ends_after`). A process that no
agent started is never asked.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from penstock import identity
from penstock.identity import Variables
from penstock.protocol import preemption

_log = logging.getLogger(__name__)


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

    def end(self, step: int) -> Preempted:
        """Answer that a checkpoint of a step is written; return what is to be raised.

        An answer that cannot be written is logged: the checkpoint is found without it.
        """
        try:
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(preemption.encode_answer(step))
        except OSError as error:
            _log.error("the agent does not learn that step %d was saved before the preemption: %s", step, error)
        _log.info("preempted: this process ends after step %d, whose checkpoint is written", step)
        return Preempted(step)
