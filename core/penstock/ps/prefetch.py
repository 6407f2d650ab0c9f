"""Prefetch of parameters and rows: reads that are sent before the operators that need them run.

rows of tables   of the next step's ids are looked up in the background while this step runs
blocks           of a sync step come with one message: what a step reads is learned from the step before. The barrier
                 asks for all of it, or if that is not possible the first read after it. Nothing stale can be read:
                 within a round parameters do not change, a block is taken once, and the barrier drops what is left
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from penstock.errors import PeerError
from penstock.ps.counters import count_no_waits_here
from penstock.ps.server_link import ServerLink
from penstock.ps.transport.local import Answered
from penstock.ps.wire import WireTensor

Tensor = torch.Tensor
MAX_WAITING = 64  # lookups that were not taken; the oldest is dropped


@dataclass(frozen=True, slots=True)
class _Prefetched:
    table: str
    ids: Tensor
    rows: Future[Tensor]


class Prefetcher:
    """Lookups in the background, each taken once, by a lookup of the same ids of the same table. Thread-safe.

    `changed` is called with the number that wait to be taken, whenever it changes.
    """

    def __init__(self, changed: Callable[[int], None] = lambda num: None) -> None:
        self._changed = changed
        self._lock = threading.Lock()
        self._waiting: list[_Prefetched] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ps-prefetch", initializer=count_no_waits_here)

    def start(self, table: str, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> None:
        """Run `look_up(ids)` in the background. `ids` are copied."""
        own = ids.clone()
        waiting = _Prefetched(table, own, self._thread.submit(look_up, own))
        with self._lock:
            self._waiting.append(waiting)
            forgotten = self._waiting[:-MAX_WAITING]
            self._waiting = self._waiting[-MAX_WAITING:]
            self._changed(len(self._waiting))
        for old in forgotten:
            old.rows.cancel()

    def take(self, table: str, ids: Tensor) -> Future[Tensor] | None:
        """Return the rows of these ids, which may be on their way; None: there is no such lookup."""
        with self._lock:
            if not self._waiting:
                return None
            found = next((w for w in self._waiting if w.table == table and torch.equal(w.ids, ids)), None)
            if found is None:
                return None
            self._waiting.remove(found)
            self._changed(len(self._waiting))
        # One that has not begun would wait for others that do not matter here.
        return None if found.rows.cancel() else found.rows

    def forget(self) -> None:
        """Drop all: a later read of these ids looks them up."""
        with self._lock:
            forgotten, self._waiting = self._waiting, []
            self._changed(0)
        for old in forgotten:
            old.rows.cancel()

    def close(self) -> None:
        """Forget all, and end."""
        self.forget()
        self._thread.shutdown(wait=False, cancel_futures=True)


Use = Callable[[Sequence[WireTensor]], None]


class StepRead:
    """Reads from one server. Thread-safe. `learns`: sync mode; else each read is a message of its own."""

    def __init__(self, link: ServerLink, *, learns: bool) -> None:
        self._link, self._learns = link, learns
        self._lock = threading.Lock()
        self._asked: dict[str, None] = {}  # in this step, in order
        self._usual: dict[str, None] = {}  # in the step before
        self._kept: _Kept | None = None

    def read(self, blocks: Sequence[str], use: Use) -> None:
        """Call `use` with the tensors of `blocks`, in order; they are valid until it returns."""
        if not self._learns:
            with self._link.pull(blocks) as answer:
                use(_checked(answer.tensors, blocks, self._link.endpoint))
            return
        with self._lock:
            first = not self._asked
            self._asked |= dict.fromkeys(blocks)
            if first and self._kept is None and self._usual.keys() >= set(blocks):
                usual = list(self._usual)
                self._keep(self._link.pull(usual), usual)
            kept = self._kept
            found = None if kept is None else kept.take(blocks)
        if kept is None or found is None:
            with self._link.pull(blocks) as answer:
                use(_checked(answer.tensors, blocks, self._link.endpoint))
            return
        try:
            use(found)
        finally:
            with self._lock:
                kept.give_back()

    def _keep(self, answered: Answered, blocks: Sequence[str]) -> None:
        tensors = _checked(answered.message.tensors, blocks, self._link.endpoint)
        self._kept = _Kept(answered, dict(zip(blocks, tensors, strict=True)))

    def barrier(self) -> None:
        """End the round, and the step's reads; where one message can do it, read for the next step."""
        self.end_step()
        with self._lock:
            usual = list(self._usual)
        answered = self._link.barrier(usual)
        if answered is None:
            return
        with self._lock:
            if self._kept is None:
                self._keep(answered, usual)
            else:  # another thread has not waited for the barrier, and reads
                answered.release()

    def end_step(self) -> None:
        """Forget what was not taken; the next step reads what this one has, all at once."""
        with self._lock:
            if self._asked:
                self._asked, self._usual = {}, self._asked
            kept, self._kept = self._kept, None
            if kept is not None:
                kept.drop()


class _Kept:
    """An answer of which blocks are taken one by one. Guarded by its owner's lock."""

    def __init__(self, answered: Answered, left: dict[str, WireTensor]) -> None:
        self._answered, self._left, self._num_users = answered, left, 0

    def take(self, blocks: Sequence[str]) -> list[WireTensor] | None:
        """Return the blocks' tensors, valid until `give_back`; None if one was taken already."""
        if not self._left.keys() >= set(blocks):
            return None
        self._num_users += 1
        return [self._left.pop(block) for block in blocks]

    def give_back(self) -> None:
        """What one `take` returned is used no more."""
        self._num_users -= 1
        self._release_if_done()

    def drop(self) -> None:
        """Nothing more is taken."""
        self._left.clear()
        self._release_if_done()

    def _release_if_done(self) -> None:
        if not self._num_users and not self._left:
            self._answered.release()


def _checked(tensors: Sequence[WireTensor], blocks: Sequence[str], endpoint: str) -> Sequence[WireTensor]:
    if len(tensors) != len(blocks):
        raise PeerError(f"{endpoint} answers with {len(tensors)} tensors for {len(blocks)} blocks")
    return tensors
