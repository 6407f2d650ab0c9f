"""The thread of the checkpoint writer: one job at a time; an error is logged at once, and raised by the next call.

Each job has its own thread, which is not a daemon: a process that ends waits until its last checkpoint is written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import torch

_log = logging.getLogger(__name__)
_SIGNAL_S = 0.5  # longest delay of a signal's handler


class Staging:
    """Copies of a training's tensors, which a writer may read while the training goes on.

    Memory is kept from one checkpoint to the next: a copy into new memory is several times slower. Not thread-safe;
    copies are valid until the next `copy`.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous copies in the processor's memory, by name."""
        before, self._memory = self._memory, {}
        for name, tensor in tensors.items():
            room = before.get(name)
            if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                room = torch.empty(tensor.shape, dtype=tensor.dtype)
            room.copy_(tensor.detach())
            self._memory[name] = room
        return dict(self._memory)


class WriterThread:
    """Owner: the training thread; `run` alone is the job's thread's."""

    def __init__(self) -> None:
        # Not the thread itself: Python takes one for ended when Ctrl-C has interrupted a `join` of it.
        self._ended: threading.Event | None = None
        self._error: Exception | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return self._ended is not None and not self._ended.is_set()

    def join(self) -> float:
        """Wait until no job runs; return for how many seconds that was."""
        begin = time.perf_counter()
        # With a limit: a signal that comes just before the main thread sleeps, or to another thread, does not wake it.
        while self._ended is not None and not self._ended.wait(_SIGNAL_S):
            pass
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Wait until no job runs. Raises what the job raised."""
        self.join()
        self.check()

    def check(self) -> None:
        """Raise, once, what a job has raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def start(self, job: Callable[[], object], name: str) -> None:
        """Begin a job; the one before has been waited for. `name`: of what is done, for errors.

        Raises RuntimeError if the system gives no thread.
        """
        ended = threading.Event()

        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: the next call raises it
                _log.error("%s has failed: %s", name, error)
                self._error = error
            finally:
                ended.set()

        self._ended = ended
        try:
            threading.Thread(target=run, name="penstock-checkpoint").start()
        except RuntimeError:
            ended.set()
            raise
