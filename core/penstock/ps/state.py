"""State that the threads of a parameter server share, and its updates: merge, log, apply.

A *payload* is the bytes of a push, between the request that brings it and the update that uses it. A request's tensors
are valid only while its handler runs. In sync mode that is over long before the round is applied: they are copied, into
buffers that are used again, so that a step allocates nothing once the first ones have run. In the other modes, and with
a `step`, the handler waits for the update, which reads them where they are.

a merge   is the mean over the members of a round, in the order of trainers
a round   is checked, logged and applied under the locks of all blocks: a reader sees it whole or not at all. One that
          does not fit (a table is full) is refused before it leaves a record. If it cannot be applied for another
          reason, its record is taken out, and the server ends: a start goes on from the round before
a push    is checked, applied and logged under its block's lock: one that does not fit, or cannot be applied, is refused
          and leaves no record. Either way nothing is acknowledged before its record is written
a member  joins, leaves or is lost in the log before any request is answered
cores     little work stays on the calling thread: torch's threads spin when their part is done, each thread that calls
          operators has a set of them, and on one host it is the trainers' cores that they spin on
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from penstock.errors import Bug, PenstockError, SpecError
from penstock.native.channels import Block, Traffic
from penstock.native.intra_op import use_intra_op_threads_here
from penstock.protocol.frames import Work
from penstock.ps.counters import Counters
from penstock.ps.durability.wal import AppliedIndex, WriteAheadLog
from penstock.ps.prepared import PreparedSteps
from penstock.ps.rounds.machine import Membership
from penstock.ps.rounds.messages import (
    Applied,
    AppliedPush,
    Apply,
    Close,
    Event,
    FailedPush,
    FailedRound,
    Instruction,
    Join,
    Leave,
    Lost,
    Payload,
    Refuse,
)
from penstock.ps.settings import ServerSettings
from penstock.ps.staging import StagedPushes, Staging
from penstock.ps.storage import BlockLocks, Gradient, Storage, describe
from penstock.ps.wire import MAX_TENSORS, ROWS, VALUES, Message, Value, WireTensor, to_wire
from penstock.ps.work import ServerWork


class BufferPool:
    """Buffers of whole powers of two bytes; freed ones are retained. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.num_made = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of at least so many bytes."""
        size = 1 << max(6, (num_bytes - 1).bit_length())
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self.num_made += 1
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let a buffer be used again."""
        with self._lock:
            self._free[len(buffer)].append(buffer)


@dataclass(slots=True)
class HeldPush:
    """One push. `buffers`: what its gradient lies in, if it was copied."""

    gradient: Gradient
    buffers: list[torch.Tensor] = field(default_factory=list)


class Payloads:
    """Pushes by number. Thread-safe."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self._held: dict[Payload, HeldPush] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, gradient: Gradient, *, copied: bool) -> Payload:
        """Keep a push; return its number. `copied`: its bytes are gone when the request is answered."""
        held = self._copy(gradient) if copied else HeldPush(gradient)
        number = next(self._numbers)
        self._held[number] = held
        return number

    def _copy(self, gradient: Gradient) -> HeldPush:
        held = HeldPush(gradient)
        values, rows = (self._copied(t, held) for t in (gradient.values, gradient.rows))
        held.gradient = Gradient(values, rows, gradient.trainer)
        return held

    def _copied(self, tensor: torch.Tensor | None, held: HeldPush) -> torch.Tensor | None:
        if tensor is None:
            return None
        buffer = self.pool.take(tensor.nbytes)
        held.buffers.append(buffer)
        return buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def gradient(self, number: Payload) -> Gradient:
        """Return a push that is held."""
        return self._held[number].gradient

    def release(self, number: Payload) -> None:
        """Forget a push; its buffers are used again."""
        for buffer in self._held.pop(number).buffers:
            self.pool.give_back(buffer)


class ServerState:
    """What the parts of one server share, built once. Recovery restores `storage` and `applied`.

    `log`: counts only, until recovery has read the one before (`open_log`). `goes_on`: whether the values are
    from a state of its own, in which no checkpoint is named. `traffic`: of channels.
    """

    def __init__(self, settings: ServerSettings, storage: Storage) -> None:
        self.settings, self.storage = settings, storage
        self.specs = describe(storage)
        if settings.state_dir is not None and 2 * len(self.specs) > MAX_TENSORS:
            raise SpecError(f"a server that keeps a log has at most {MAX_TENSORS // 2} blocks, not {len(self.specs)}")
        self.traffic = Traffic(
            [Block(name, spec.dtype, list(spec.shape), is_table=spec.is_table) for name, spec in self.specs.items()]
        )
        self.work = ServerWork(self.traffic, list(self.specs))
        self.payloads, self.counters = Payloads(), Counters()
        self.applied = AppliedIndex(trainers=settings.fanin, keeps_changes=settings.mode == "geo")
        self.staging, self.staged_pushes = Staging(storage, self.applied), StagedPushes(storage)
        self.prepared = PreparedSteps(settings, storage, self.specs, self.traffic, self.applied)
        self.locks = BlockLocks(list(self.specs), held=self.prepared.held)
        self.log = WriteAheadLog(None)
        self.goes_on = self._is_torn = False

    def open_log(self, next_sequence: int) -> None:
        """Go on with the log of the settings' folder."""
        self.log = WriteAheadLog(self.settings.folder, next_sequence=next_sequence)
        self.prepared.log_to(self.log.file)

    @property
    def is_torn(self) -> bool:
        """Whether an update has failed half done, so that no snapshot may be taken."""
        return self._is_torn or self.prepared.failure is not None

    def tear(self) -> None:
        """An update has failed half done. Under the locks of what it updated."""
        self._is_torn = True

    @property
    def can_prepare(self) -> bool:
        """Whether native code may go on when the round machine is at rest. Held."""
        is_staged = self.staging.has_staged or self.staged_pushes.has_staged
        return not (is_staged or self._is_torn)


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
        self.state, num_threads = state, state.settings.num_threads
        self.staleness: Counter[int] = Counter()  # updates behind -> pushes
        self._staleness_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ps-update") if num_threads > 1 else None

    def execute(self, work: Close | Apply) -> Applied | FailedRound | AppliedPush | FailedPush:
        """Do it. What does not fit the storage is refused; any other error means that the server cannot go on."""
        return self._close(work) if isinstance(work, Close) else self._apply(work)

    def apply_all(self, pushes: Sequence[Apply]) -> list[AppliedPush | FailedPush]:
        """Apply the pushes of a step, of a block each. As `execute`, but for an update that fails after its checks:

        blocks that were updated at the same time cannot be taken back, so the server cannot go on, as with a round.
        """
        if len(pushes) == 1:
            return [self._apply(pushes[0])]
        state = self.state
        gradients = {push.block: state.payloads.gradient(push.payload) for push in pushes}
        out: dict[Payload, AppliedPush | FailedPush] = {}
        try:
            with state.locks.of(list(gradients)):
                for push in pushes:
                    try:
                        state.storage.check_room(push.block, gradients[push.block])
                    except Bug:
                        raise
                    except PenstockError as error:
                        out[push.payload] = FailedPush(push.payload, str(error))
                fits = [push for push in pushes if push.payload not in out]
                self._update_with_staged({push.block: gradients[push.block] for push in fits})
                for push in fits:
                    if state.log.is_kept:
                        state.log.append(_applied(push, gradients[push.block]))
                    state.applied.apply(push.sender, push.round, push.block, gradients[push.block].rows)
        finally:
            for push in pushes:
                state.payloads.release(push.payload)
        for push in fits:
            self._count(push)
        return [out.get(push.payload) or AppliedPush(push.payload) for push in pushes]

    def _update_with_staged(self, gradients: dict[str, Gradient]) -> None:
        """Apply pushes: those whose updates are staged by taking these."""
        use_cores_for(sum(gradient.values.nbytes for gradient in gradients.values()))
        try:
            rest = {b: g for b, g in gradients.items() if not self.state.staged_pushes.take(b, g)}
        except BaseException:
            self.state.tear()
            raise
        self._update(rest)

    def _update(self, gradients: dict[str, Gradient]) -> None:
        """Apply all, each to its block; large ones by threads that use all cores."""
        storage = self.state.storage
        try:
            if sum(g.values.nbytes for g in gradients.values()) < LARGE:
                use_cores_for(0)
                tables = [block for block in gradients if self.state.specs[block].is_table]
                for table in tables:
                    self._update_alone(table, gradients[table])
                if rest := {block: gradient for block, gradient in gradients.items() if block not in tables}:
                    with self.state.work.of_round(Work.UPDATE):
                        storage.update_all(rest)
            else:
                self._each(lambda block: self._update_alone(block, gradients[block]), gradients, [gradients.values()])
        except BaseException:
            self.state.tear()
            raise

    def _update_alone(self, block: str, gradient: Gradient) -> None:
        with self.state.work.of_block(Work.UPDATE, block):
            self.state.storage.update(block, gradient)

    def _count(self, push: Apply) -> None:
        self.state.counters.add(f"trainer {push.sender.trainer}", push.block, staleness=push.staleness)
        with self._staleness_lock:
            self.staleness[push.staleness] += 1

    def _close(self, work: Close) -> Applied | FailedRound:
        done: Applied | FailedRound = Applied(work.round)
        with self.state.locks.all():
            contributed = {
                b: [self.state.payloads.gradient(p) for p in found] for b, found in work.contributions.items()
            }
            staged = self.state.staging.fitting(work.round, contributed, work.members)
            with self.state.work.of_round(Work.MERGE):
                merged = self._merged(work, contributed, staged)
            try:
                for block, gradient in merged.items():
                    if len(contributed.get(block, ())) != 1:  # else it is a push, which was checked when it came
                        self.state.storage.check(block, gradient)
                    self.state.storage.check_room(block, gradient)
            except Bug:
                raise
            except PenstockError as error:
                done = FailedRound(work.round, str(error))
            else:
                self._log_and_apply(work, merged, list(staged))
            self.state.staging.drop()
        for payloads in work.contributions.values():
            for payload in payloads:
                self.state.payloads.release(payload)
        return done

    def _log_and_apply(self, work: Close, merged: dict[str, Gradient], staged: list[str]) -> None:
        sequence = -1
        if self.state.log.is_kept:
            with self.state.work.of_round(Work.LOG):
                sequence = self.state.log.append(Message("round", {"round": work.round}, _tensors(merged)))
        try:
            self.state.storage.begin_round()
            self.state.staging.take(staged)
            self._update({block: gradient for block, gradient in merged.items() if block not in staged})
        except BaseException:
            self.state.tear()
            if self.state.log.is_kept:  # every start would fail over it again
                self.state.log.drop(sequence)
            raise
        self.state.applied.close_round(work.round)

    def _merged(
        self, work: Close, contributed: dict[str, list[Gradient]], staged: dict[str, Gradient]
    ) -> dict[str, Gradient]:
        out = dict(staged)

        def merge(block: str) -> None:
            gradients = contributed[block]
            out[block] = mean(gradients, len(work.members), self.state.specs[block].shape)

        rest = {block: gradients for block, gradients in contributed.items() if block not in staged}
        self._each(merge, rest, rest.values())
        merges = {(f"trainer {g.trainer}", block) for block, gradients in contributed.items() for g in gradients}
        self.state.counters.add_merges(merges)
        return {block: out[block] for block in work.contributions}

    def _apply(self, work: Apply) -> AppliedPush | FailedPush:
        gradient = self.state.payloads.gradient(work.payload)
        sender = work.sender
        use_cores_for(gradient.values.nbytes)
        try:
            with self.state.locks.of([work.block]):
                try:
                    self.state.storage.check_room(work.block, gradient)
                    if not self.state.staged_pushes.take(work.block, gradient):
                        self._update_alone(work.block, gradient)
                except PenstockError as error:
                    if isinstance(error, Bug):
                        self.state.tear()
                        raise
                    return FailedPush(work.payload, str(error))
                except BaseException:
                    self.state.tear()
                    raise
                if self.state.log.is_kept:
                    self.state.log.append(_applied(work, gradient))
                self.state.applied.apply(sender, work.round, work.block, gradient.rows)
        finally:
            self.state.payloads.release(work.payload)
        self._count(work)
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

    def record(self, event: Event, instructions: list[Instruction], members: Membership, *, was_new: bool) -> None:
        """Log joins, leaves and losses. Under the dispatcher's lock."""
        state = self.state
        if isinstance(event, Join) and was_new and not members.is_new(event.sender):
            trainer = event.sender.trainer
            state.applied.changed.trainers.add(trainer)
            fields = {"trainer": trainer, "epoch": event.sender.epoch, "round": members.from_round(trainer)}
            state.log.append(Message("joined", fields))
        elif isinstance(event, Leave) and not _refuses(event, instructions):
            state.applied.leave(event.sender.trainer)
            state.log.append(Message("left", {"trainer": event.sender.trainer}))
        for one in instructions:
            if isinstance(one, Lost):
                state.log.append(Message("lost", {"trainer": one.trainer}))

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def _refuses(event: Leave, instructions: list[Instruction]) -> bool:
    return any(isinstance(one, Refuse) and one.ticket == event.ticket for one in instructions)


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
