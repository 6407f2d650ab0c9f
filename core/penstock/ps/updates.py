"""Execution of what a round machine asks for: merge, log, apply, under the locks of the blocks concerned.

a merge   is the mean over the members of a round, in the order of trainers
a round   is checked, logged and applied under the locks of all blocks: a reader sees it whole or not at all. One that
          does not fit (a table is full) is refused before it leaves a record. If it cannot be applied for another
          reason, its record is taken out, and the server ends: a start goes on from the round before
a push    is checked, applied and logged under its block's lock: one that does not fit, or cannot be applied, is refused
          and leaves no record. Either way nothing is acknowledged before its record is written
cores     little work stays on the calling thread: torch's threads spin when their part is done, each thread that calls
          operators has a set of them, and on one host it is the trainers' cores that they spin on
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from penstock.errors import Bug, PenstockError
from penstock.native.intra_op import use_intra_op_threads_here
from penstock.ps.rounds.messages import Applied, AppliedPush, Apply, Close, FailedPush, FailedRound
from penstock.ps.state import ServerState
from penstock.ps.storage import Gradient
from penstock.ps.wire import ROWS, VALUES, Message, Value, WireTensor, to_wire

LARGE = 8 << 20
"""Bytes from which handing work to other threads costs less than they save."""

_ALL = torch.get_num_threads()  # of the thread that imports this, whose number is still the default


def use_cores_for(num_bytes: int) -> None:
    """Let operators of the calling thread use one core for work on so many bytes, or as many as torch would if large.

    It stays so on this thread until the next call.
    """
    use_intra_op_threads_here(_ALL if num_bytes >= LARGE else 1)


def mean(gradients: Sequence[Gradient], num_members: int, shape: torch.Size) -> Gradient:
    """Merge one block's gradients. The first one's values may be written to, and may be what is returned.

    Rows are concatenated: one that several trainers touched is there several times, and the update sums it.
    """
    if all(g.rows is not None for g in gradients):
        return _mean_of_rows(gradients, num_members)
    dense = [g.values if g.rows is None else _spread_out(g, shape) for g in gradients]
    total: torch.Tensor = dense[0]
    for one in dense[1:]:
        total.add_(one)
    return Gradient(total.div_(num_members) if num_members > 1 else total)


def _mean_of_rows(gradients: Sequence[Gradient], num_members: int) -> Gradient:
    if len(gradients) == 1:
        (only,) = gradients
        return Gradient(only.values.div_(num_members) if num_members > 1 else only.values, only.rows)
    rows = torch.cat([g.rows for g in gradients if g.rows is not None])
    return Gradient(torch.cat([g.values for g in gradients]).div_(num_members), rows)


def _spread_out(gradient: Gradient, shape: torch.Size) -> torch.Tensor:
    rows: torch.Tensor | None = gradient.rows
    assert rows is not None
    return torch.zeros(shape, dtype=gradient.values.dtype).index_add_(0, rows, gradient.values)


class Updates:
    """Writes to one storage. Thread-safe; `pool` updates blocks at the same time."""

    def __init__(self, state: ServerState) -> None:
        self._state, num_threads = state, state.settings.num_threads
        self.staleness: Counter[int] = Counter()  # updates behind -> pushes
        self._staleness_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ps-update") if num_threads > 1 else None

    def execute(self, work: Close | Apply) -> Applied | FailedRound | AppliedPush | FailedPush:
        """Do it. What does not fit the storage is refused; any other error means that the server cannot go on."""
        return self._close(work) if isinstance(work, Close) else self._apply(work)

    def _close(self, work: Close) -> Applied | FailedRound:
        done: Applied | FailedRound = Applied(work.round)
        with self._state.locks.all():
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
                self._state.payloads.release(payload)
        return done

    def _log_and_apply(self, work: Close, merged: dict[str, Gradient]) -> None:
        tensors = _tensors(merged) if self._state.log.is_kept else []
        sequence = (
            self._state.log.append(Message("round", {"round": work.round}, tensors)) if self._state.log.is_kept else -1
        )
        try:
            self._state.storage.begin_round()
            self._each(lambda block: self._state.storage.update(block, merged[block]), merged, [merged.values()])
        except BaseException:
            if self._state.log.is_kept:  # every start would fail over it again
                self._state.log.drop(sequence)
            raise
        self._state.applied.close_round(work.round)

    def _check(self, block: str, gradient: Gradient) -> None:
        self._state.storage.check(block, gradient)
        self._state.storage.check_room(block, gradient)

    def _merged(self, work: Close) -> dict[str, Gradient]:
        out: dict[str, Gradient] = {}
        contributed = {b: [self._state.payloads.gradient(p) for p in found] for b, found in work.contributions.items()}

        def merge(block: str) -> None:
            gradients = contributed[block]
            out[block] = mean(gradients, len(work.members), self._state.specs[block].shape)
            trainers = {g.trainer for g in gradients}
            for trainer in trainers:
                self._state.counters.add(f"trainer {trainer}", block, merges=1)

        self._each(merge, contributed, contributed.values())
        return {block: out[block] for block in work.contributions}

    def _apply(self, work: Apply) -> AppliedPush | FailedPush:
        gradient = self._state.payloads.gradient(work.payload)
        sender = work.sender
        use_cores_for(gradient.values.nbytes)
        try:
            with self._state.locks.of([work.block]):
                try:
                    self._state.storage.check_room(work.block, gradient)
                    self._state.storage.update(work.block, gradient)
                except Bug:
                    raise
                except PenstockError as error:
                    return FailedPush(work.payload, str(error))
                if self._state.log.is_kept:
                    self._state.log.append(_applied(work, gradient))
                self._state.applied.apply(sender, work.round, work.block, gradient.rows)
        finally:
            self._state.payloads.release(work.payload)
        self._state.counters.add(f"trainer {sender.trainer}", work.block, staleness=work.staleness)
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
