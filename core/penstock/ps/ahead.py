"""Rows that are looked up before the step that needs them, while the step before it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from penstock.ps.counters import nobody_waits_here

Tensor = torch.Tensor
MAX_WAITING = 64  # lookups that nobody has taken; the oldest is forgotten


@dataclass(frozen=True, slots=True)
class _Waiting:
    table: str
    ids: Tensor
    rows: Future[Tensor]


class Ahead:
    """Lookups in the background, each taken once, by who asks for the same ids of the same table. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ps-ahead", initializer=nobody_waits_here)

    def start(self, table: str, ids: Tensor, look_up: Callable[[Tensor], Tensor], *, keep: bool) -> None:
        """Run `look_up(ids)` in the background. `ids` are copied. `keep`: for somebody to take."""
        own = ids.clone()
        waiting = _Waiting(table, own, self._thread.submit(look_up, own))
        with self._lock:
            self._waiting += [waiting] if keep else []
            forgotten = self._waiting[:-MAX_WAITING]
            self._waiting = self._waiting[-MAX_WAITING:]
        for old in forgotten:
            old.rows.cancel()

    def take(self, table: str, ids: Tensor) -> Future[Tensor] | None:
        """Return the rows of these ids, which may be on their way; None: nobody looks them up."""
        with self._lock:
            if not self._waiting:
                return None
            found = next((w for w in self._waiting if w.table == table and torch.equal(w.ids, ids)), None)
            if found is None:
                return None
            self._waiting.remove(found)
        # One that has not begun would wait for others that do not matter here.
        return None if found.rows.cancel() else found.rows

    def forget(self) -> None:
        """Forget all: whoever asks for these ids later looks them up."""
        with self._lock:
            forgotten, self._waiting = self._waiting, []
        for old in forgotten:
            old.rows.cancel()

    def close(self) -> None:
        """Forget all, and end."""
        self.forget()
        self._thread.shutdown(wait=False, cancel_futures=True)
