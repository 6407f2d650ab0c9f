"""Carrying out what a round machine asks for: merge, log, apply, under the locks of the blocks concerned.

a round   is checked, logged and applied under the locks of all blocks: who reads sees it whole or not at all. One that
          does not fit (a table is full) is refused before it leaves a record. If it cannot be applied for another
          reason, its record is taken out, and the server ends: a start goes on from the round before
a push    is checked, applied and logged under its block's lock: one that does not fit, or cannot be applied, is refused
          and leaves no record. Either way nothing is acknowledged before its record is written.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from penstock.errors import Bug, PenstockError
from penstock.ps.blocks import BlockLocks, BlockSpec
from penstock.ps.cores import LARGE, use_cores_for
from penstock.ps.counters import Counters
from penstock.ps.ledger import Ledger
from penstock.ps.logbook import Logbook
from penstock.ps.merge import mean
from penstock.ps.messages import Applied, AppliedPush, Apply, Close, FailedPush, FailedRound
from penstock.ps.payloads import Payloads
from penstock.ps.storage import Gradient, Storage
from penstock.ps.tensors import to_wire
from penstock.ps.wire import ROWS, VALUES, Message, Value, WireTensor


class Updates:
    """Writes to one storage. Thread-safe; `pool` updates blocks at the same time."""

    def __init__(
        self, storage: Storage, specs: dict[str, BlockSpec], locks: BlockLocks, ledger: Ledger, log: Logbook,
        payloads: Payloads, counters: Counters, *, num_threads: int,
    ) -> None:  # fmt: skip
        self._storage, self._specs, self._locks = storage, specs, locks
        self._ledger, self._log, self._payloads, self._counters = ledger, log, payloads, counters
        self.staleness: Counter[int] = Counter()  # updates behind -> pushes
        self._staleness_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ps-update") if num_threads > 1 else None

    def carry_out(self, work: Close | Apply) -> Applied | FailedRound | AppliedPush | FailedPush:
        """Do it. What does not fit the storage is refused; any other error means that the server cannot go on."""
        return self._close(work) if isinstance(work, Close) else self._apply(work)

    def _close(self, work: Close) -> Applied | FailedRound:
        done: Applied | FailedRound = Applied(work.round)
        with self._locks.all():
            merged = self._merged(work)
            try:
                for block, gradient in merged.items():
                    self._check(block, gradient)
            except Bug:
                raise
            except PenstockError as error:
                done = FailedRound(work.round, str(error))
            else:
                self._log_and_apply(work, merged)
        for payloads in work.contributions.values():
            for payload in payloads:
                self._payloads.release(payload)
        return done

    def _log_and_apply(self, work: Close, merged: dict[str, Gradient]) -> None:
        tensors = _tensors(merged) if self._log.is_kept else []
        sequence = self._log.append(Message("round", {"round": work.round}, tensors)) if self._log.is_kept else -1
        try:
            self._storage.begin_round()
            self._each(lambda block: self._storage.update(block, merged[block]), merged, [merged.values()])
        except BaseException:
            if self._log.is_kept:  # every start would fail over it again
                self._log.drop(sequence)
            raise
        self._ledger.close_round(work.round)

    def _check(self, block: str, gradient: Gradient) -> None:
        self._storage.check(block, gradient)
        self._storage.check_room(block, gradient)

    def _merged(self, work: Close) -> dict[str, Gradient]:
        out: dict[str, Gradient] = {}
        contributed = {b: [self._payloads.gradient(p) for p in found] for b, found in work.contributions.items()}

        def merge(block: str) -> None:
            gradients = contributed[block]
            out[block] = mean(gradients, len(work.members), self._specs[block].shape)
            trainers = {g.trainer for g in gradients}
            for trainer in trainers:
                self._counters.add(f"trainer {trainer}", block, merges=1)

        self._each(merge, contributed, contributed.values())
        return {block: out[block] for block in work.contributions}

    def _apply(self, work: Apply) -> AppliedPush | FailedPush:
        gradient = self._payloads.gradient(work.payload)
        sender = work.sender
        use_cores_for(gradient.values.nbytes)
        try:
            with self._locks.of([work.block]):
                try:
                    self._storage.check_room(work.block, gradient)
                    self._storage.update(work.block, gradient)
                except Bug:
                    raise
                except PenstockError as error:
                    return FailedPush(work.payload, str(error))
                if self._log.is_kept:
                    self._log.append(_applied(work, gradient))
                self._ledger.apply(sender, work.round, work.block, gradient.rows)
        finally:
            self._payloads.release(work.payload)
        self._counters.add(f"trainer {sender.trainer}", work.block, staleness=work.staleness)
        with self._staleness_lock:
            self.staleness[work.staleness] += 1
        return AppliedPush(work.payload)

    def _each(self, do: Callable[[str], None], blocks: Iterable[str], gradients: Iterable[Iterable[Gradient]]) -> None:
        """Do it for all blocks, at the same time if they are large enough."""
        names = list(blocks)
        num_bytes = sum(g.values.nbytes for some in gradients for g in some)
        if self._pool is None or len(names) < 2 or num_bytes < LARGE:
            use_cores_for(num_bytes)
            for name in names:
                do(name)
            return
        for done in [self._pool.submit(do, name) for name in names]:
            done.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _tensors(merged: dict[str, Gradient]) -> list[WireTensor]:
    out = []
    for block, gradient in merged.items():
        out.append(to_wire(VALUES + block, gradient.values))
        if gradient.rows is not None:
            out.append(to_wire(ROWS + block, gradient.rows))
    return out


def _applied(work: Apply, gradient: Gradient) -> Message:
    sender = work.sender
    fields: dict[str, Value] = {
        "trainer": sender.trainer, "epoch": sender.epoch, "round": work.round, "block": work.block,
    }  # fmt: skip
    rows = [] if gradient.rows is None else [to_wire("rows", gradient.rows)]
    return Message("applied", fields, [*rows, to_wire("values", gradient.values)])
