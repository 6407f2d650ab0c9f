"""Prefetch of a pass: the next batch is taken while the one before is trained on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock import telemetry
from penstock.dataset.dataset_base import Run
from penstock.native import _feed
from penstock.native.intra_op import use_intra_op_threads_here
from penstock.protocol.frames import Work
from penstock.telemetry.input import InputTrace


class RunAhead(Run):
    """A pass whose next batch is taken on a thread of its own, and shown to `see`, while the one before is trained on.

    One that is waited for already is not shown, as its step begins now. One thread trains. What `run` or `see` raises
    is raised by `take`.
    """

    def __init__(self, run: Run, see: Callable[[_feed.Batch], None]) -> None:
        self.slots, self._run, self._see = run.slots, run, see
        self._changed = threading.Condition()
        self._next: _feed.Batch | None = None
        self._error: BaseException | None = None
        self._ended = self._closed = self._is_late = False
        self._thread = threading.Thread(target=self._take_all, name="penstock-batch-ahead", daemon=True)
        self._thread.start()

    def take(self) -> _feed.Batch | None:
        with self._changed:
            self._is_late = self._next is None
            self._changed.wait_for(lambda: self._next is not None or self._ended)
            self._is_late = False
            batch, self._next = self._next, None
            self._changed.notify_all()
            if batch is None and self._error is not None:
                raise self._error
            return batch

    def used(self, batch: _feed.Batch) -> None:
        self._run.used(batch)

    def fraction(self) -> float | None:
        return self._run.fraction()

    def stop(self) -> None:
        self._run.stop()

    def close(self) -> None:
        """End the thread; the pass that it takes from is closed by its opener."""
        self.stop()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _take_all(self) -> None:
        use_intra_op_threads_here(1)  # more would spin beside a step that has all cores
        trace = telemetry.input_trace() if self._run.gathers else None
        lanes = [] if trace is None else trace.claim(1)
        try:
            while (batch := self._taken(trace, lanes)) is not None:
                if not self._is_late:
                    self._see(batch)
                if not self._hand_over(batch):
                    break
        except Exception as error:  # noqa: BLE001 - the thread's boundary: `take` raises it
            self._error = error
        finally:
            if trace is not None:
                trace.release(lanes)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _taken(self, trace: InputTrace | None, lanes: Sequence[int]) -> _feed.Batch | None:
        begin_ns = time.time_ns()
        batch = self._run.take()
        if trace is not None:
            trace.add(Work.BATCH, lanes[0], begin_ns, time.time_ns())
        return batch

    def _hand_over(self, batch: _feed.Batch) -> bool:
        """Return once the batch was taken, as the next one is one step ahead then; False if it will not be."""
        with self._changed:
            self._next = batch
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._next is None or self._closed)
            return not self._closed
