"""Persistence of a server: snapshots taken while it serves, and recovery from the newest one and the log after it.

the cut   with the locks of all blocks: everything but tables is copied, the log begins another file. Updates wait for
          the copies, not for the disk
tables    part by part, each under the locks of the tables: in between they are updated. A part names the record of
          the log that is the first that it does not hold
a copy    (`save`) has no log to make parts equal, so updates wait until the last part is copied. With `begin_save` only
          for that: what was copied is written while the server serves, and `finish_save` waits for it
recovery  applies records through the same calls as before, so the result is the same to the bit. Of a record that a
          part of a table holds, the part's rows are left out: a row that is in no such part was made, or last changed,
          after that part was taken, or lies in a part that was taken at the cut
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from penstock.errors import PeerError, SpecError
from penstock.ps.dispatcher import Dispatcher
from penstock.ps.durability.server_snapshots import (
    AtStep,
    Cut,
    Item,
    ServerSnapshot,
    SnapshotWriter,
    keep_newest,
    newest,
    snapshot_path,
    snapshots,
    tidy,
)
from penstock.ps.durability.wal import AppliedIndex, LogRecord, log_files, recover, with_record
from penstock.ps.rounds.machine import Roster
from penstock.ps.rounds.messages import TrainerIncarnation
from penstock.ps.state import ServerState
from penstock.ps.storage import Gradient, Storage
from penstock.ps.wire import ROWS, VALUES, Message, Origin, from_wire

_OF = re.compile(r"(\d+)-of-(\d+)")


_AT_ONCE = 64 << 20
LOG_BYTES = 2 << 30
"""What is logged before a snapshot is taken ahead of its time: some 10 s of a busy server, which a start repeats."""


def _num_bytes(item: Item) -> int:
    return sum(tensor.nbytes for tensor in item.tensors.values())


def _size_of(snapshot: Path) -> int:
    return sum(path.stat().st_size for path in snapshot.iterdir())


class _OutOfOrder(Exception):
    """A storage gives something else after a part of a table: it has to be read in one go."""


class _Save:
    """A copy that is being made by a thread of its own."""

    def __init__(self, target: Path, write: Callable[[Callable[[], None]], object]) -> None:
        self.target, self._write = target, write
        self._is_cut = threading.Event()
        self._error: PeerError | None = None
        self._thread = threading.Thread(target=self._run, name="ps-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write(self._is_cut.set)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: `wait_for_cut` and `finish` raise it
            self._error = PeerError(f"{self.target} cannot be saved: {error}")
        finally:
            self._is_cut.set()

    def wait_for_cut(self) -> None:
        """Return when updates need not wait any more. Raises PeerError if it has failed until then."""
        self._is_cut.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Return when it is written. Raises PeerError if it is not."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Snapshotter:
    """Takes snapshots of one server. Thread-safe: one at a time. `at_step`: see `SnapshotWriter`."""

    def __init__(self, state: ServerState, dispatcher: Dispatcher) -> None:
        self._state, self._dispatcher, settings = state, dispatcher, state.settings
        self._tables = [name for name, spec in state.specs.items() if spec.is_table]
        self._one = threading.Lock()
        found = snapshots(settings.folder) if settings.folder is not None else []
        self._last = found[-1][0] if found else -1  # position of the newest snapshot
        self._num_bytes = _size_of(found[-1][1]) if found else 0  # and its size
        self.at_step: AtStep = lambda step: None
        self._beginning = threading.Lock()
        self._saving: _Save | None = None  # the newest
        self._tokens = {settings.restored.token}  # of checkpoints that its values were those of; a few bytes for each

    def take(self, *, is_finished: bool = False) -> None:
        """Take a snapshot, unless nothing was logged since the last; remove what it makes needless.

        Raises OSError: nothing is lost then, the log continues from the snapshot before.
        """
        folder = self._state.settings.folder
        if folder is None:
            return
        with self._one:
            if self._state.log.next_sequence == self._last:
                return
            sequence = self._write(lambda s: snapshot_path(folder, s), in_one_go=False, is_finished=is_finished)
            self._last, self._num_bytes = sequence, _size_of(snapshot_path(folder, sequence))
            self._state.log.forget_before(keep_newest(folder))

    @property
    def is_due(self) -> bool:
        """Whether so much was logged since the last snapshot that a recovery would take long, and the disk fill up."""
        return self._state.log.num_bytes(self._last) > max(LOG_BYTES, 2 * self._num_bytes)

    def write_at(self, folder: Path) -> None:
        """Take the snapshot of a server that has ended, into another folder than its own. Raises OSError, PeerError."""
        with self._one:
            self._attempt(
                lambda s: snapshot_path(folder, s), lambda: None,
                in_one_go=True, is_finished=False, most_bytes=_AT_ONCE,
            )  # fmt: skip

    def save(self, path: str) -> None:
        """Write a copy into a folder that a trainer names. Raises PeerError where that is not allowed or fails."""
        target = self._allowed(path) / self._state.settings.name
        try:
            with self._one:
                self._write(lambda _: target, in_one_go=True, is_finished=False)
        except OSError as error:
            raise PeerError(f"{target} cannot be saved: {error}") from error

    def begin_save(self, path: str) -> None:
        """Copy what `save` writes, and return; it is written beside. Again for the same path: the same copy, since a
        request may come twice. Another path makes another copy.

        Raises PeerError where that is not allowed, or has failed so far.
        """
        target = self._allowed(path) / self._state.settings.name
        with self._beginning:
            saving = self._saving
            if saving is None or saving.target != target:
                saving = self._saving = _Save(target, lambda at_cut: self._copy(target, at_cut))
                self._tokens.add(target.parent.name)
        saving.wait_for_cut()

    def _copy(self, target: Path, at_cut: Callable[[], None]) -> None:
        with self._one:
            self._write(lambda _: target, in_one_go=True, is_finished=False, at_cut=at_cut)

    def finish_save(self, path: str) -> None:
        """Return when what `begin_save` has begun is written. Raises PeerError if it is not, or was not begun."""
        target = self._allowed(path) / self._state.settings.name
        saving = self._saving
        if saving is None or saving.target != target:
            raise PeerError(f"{target} is not being saved here: was this server started again since?")
        saving.finish()

    def origin(self, token: str) -> Origin:
        """Return whether the values of the checkpoint with this token are, or were, this server's."""
        with self._dispatcher.frozen():
            epochs = self._dispatcher.machine.members.roster().newest
        began = (
            f"its own state in {self._state.settings.folder}"
            if self._state.goes_on
            else str(self._state.settings.restored)
        )
        with self._beginning:
            return Origin(self._state.goes_on or token in self._tokens, began, epochs)

    def _allowed(self, path: str) -> Path:
        roots = [p for p in (self._state.settings.state_dir, *self._state.settings.save_dirs) if p is not None]
        if not roots:
            raise PeerError("this server saves nowhere: PENSTOCK_PS_STATE_DIR and PENSTOCK_PS_SAVE_DIRS are not set")
        if "\0" in path:
            raise PeerError("a path has a null character in it")
        found = (roots[0] / path).resolve()  # what is linked to lies where the link leads
        inside = any(found.is_relative_to(root.resolve()) for root in roots)
        own = self._state.settings.state_dir
        among_states = own is not None and self._is_a_state(found, own.resolve())
        if not inside or among_states:
            where = ", ".join(str(r) for r in roots)
            raise PeerError(f"{path!r} is not a folder to save into; expected one below {where}, not a server's own")
        return found

    @staticmethod
    def _is_a_state(found: Path, state_dir: Path) -> bool:
        """Whether this is `state_dir` itself, or within a server's folder (`0`, `0-of-2`)."""
        if found == state_dir:
            return True
        return found.is_relative_to(state_dir) and found.relative_to(state_dir).parts[0][0].isdigit()

    def _write(
        self, path_at: Callable[[int], Path], *, in_one_go: bool, is_finished: bool,
        at_cut: Callable[[], None] = lambda: None,
    ) -> int:  # fmt: skip
        try:
            return self._attempt(path_at, at_cut, in_one_go=in_one_go, is_finished=is_finished)
        except _OutOfOrder:
            return self._attempt(path_at, at_cut, in_one_go=True, is_finished=is_finished)

    def _attempt(
        self, path_at: Callable[[int], Path], at_cut: Callable[[], None], *, in_one_go: bool, is_finished: bool,
        most_bytes: int | None = None,
    ) -> int:  # fmt: skip
        """`most_bytes`: items are written when their copies come to so much, while updates wait; None: at the end."""
        copied: list[Item] = []
        with ExitStack() as locks:
            locks.enter_context(self._state.locks.all())
            cut, changed = self._cut(is_finished=is_finished)
            writer = SnapshotWriter(path_at(cut.sequence), at_step=self.at_step)
            try:
                stream = self._state.storage.state()
                for name, tensors in stream:
                    item = Item(name, tensors, cut.sequence)
                    if in_one_go and item.is_part:
                        writer.add([item])  # a table may be larger than what memory is left
                        continue
                    copied.append(item)
                    if item.is_part:
                        break
                    if most_bytes is not None and sum(map(_num_bytes, copied)) >= most_bytes:
                        writer.add(copied)
                        copied.clear()
                locks.close()
                at_cut()
                parts = copied[-1:] if copied and copied[-1].is_part else []
                writer.add(copied[: len(copied) - len(parts)])
                for item in chain(parts, () if in_one_go else self._parts(stream)):
                    writer.add([item])
                writer.finish(cut, changed)
            except BaseException:
                writer.abandon()
                raise
        return cut.sequence

    def _cut(self, *, is_finished: bool) -> tuple[Cut, dict[tuple[str, int], object]]:
        """Return what a restart needs beside the storage. All blocks are locked."""
        state, settings = self._state, self._state.settings
        if state.is_torn:
            raise PeerError("an update has failed half done, so there is no whole state to write")
        with self._dispatcher.frozen():
            roster = self._dispatcher.machine.members.roster()
            if is_finished:
                roster = Roster(roster.newest)
            cut = Cut(
                job=settings.job, index=settings.index, mode=settings.mode, blocks=list(state.specs),
                sequence=state.log.rotate(), round=state.applied.round, applied=dict(state.applied.applied),
                roster=roster, is_finished=is_finished,
            )  # fmt: skip
            return cut, dict(state.applied.changed.state())

    def _parts(self, stream: Iterator[tuple[str, dict[str, object]]]) -> Iterator[Item]:
        while True:
            with self._state.locks.of(self._tables):
                found = next(stream, None)
                at = self._state.log.next_sequence
            if found is None:
                return
            item = Item(found[0], found[1], at)  # type: ignore[arg-type]  # tensors; Storage knows no torch
            if not item.is_part:
                raise _OutOfOrder
            yield item


@dataclass(slots=True)
class Recovered:
    """The point from which a server continues. `num_records`: of the log, that were applied again."""

    next_sequence: int = 0
    roster: Roster = field(default_factory=Roster)
    num_records: int = 0
    is_finished: bool = False


def has_state(folder: Path) -> bool:
    """Whether a server that starts in this folder continues from a state in it."""
    return bool(snapshots(folder) or log_files(folder))


def recover_server(
    folder: Path, storage: Storage, applied: AppliedIndex, *, job: str, blocks: Sequence[str]
) -> Recovered:
    """Bring storage and index to where this folder's server was killed. Raises PeerError, SpecError."""
    tidy(folder)
    snapshot = newest(folder)
    if snapshot is None:
        if log_files(folder) and log_files(folder)[0][0] > 0:
            raise PeerError(f"{folder} has a log that goes on from a snapshot, but no snapshot")
        return _replay(folder, storage, applied, Recovered(), _Newer())
    cut = snapshot.cut
    if cut.job != job or cut.blocks != list(blocks):
        raise SpecError(
            f"{folder} has the state of job {cut.job!r} with the blocks {', '.join(cut.blocks) or 'none'}; this is job "
            f"{job!r} with the blocks {', '.join(blocks) or 'none'}. Give this job another PENSTOCK_PS_STATE_DIR"
        )
    newer = _Newer()
    for item in snapshot.items():
        storage.restore(item.name, item.tensors)
        if item.at > cut.sequence and item.is_part:
            newer.add(item.name.rpartition("@")[0], item.at, item.tensors["ids"])
    applied.round, applied.applied = cut.round, dict(cut.applied)
    applied.changed.restore(snapshot.changed)
    begin = Recovered(cut.sequence, cut.roster, is_finished=cut.is_finished)
    return _replay(folder, storage, applied, begin, newer)


def restore_from(folders: Sequence[Path], storage: Storage) -> list[ServerSnapshot]:
    """Restore what is here of the snapshots of all servers that a job had, into another number of them.

    Raises PeerError if one of them has no whole snapshot, or applied updates after it: the log of a block cannot be
    applied to another cut of it. Servers that end in order leave no such log.
    """
    found = []
    for folder in folders:
        snapshot = newest(folder)
        if snapshot is None:
            raise PeerError(f"{folder} has no snapshot")
        late = sum(r.message.kind in {"round", "applied"} for r in recover(folder, since=snapshot.cut.sequence))
        if late:
            raise PeerError(
                f"{folder} has {late} updates after its last snapshot. They can be applied only by as many servers as "
                "there were: start those once more and let them end, or remove the log to lose these updates"
            )
        found.append(snapshot)
    for snapshot in found:
        for item in snapshot.items():
            storage.restore(item.name, item.tensors)
    return found


def other_state(folder: Path) -> list[Path]:
    """Return the folders that another number of servers of the same job left, if they are what to go on from.

    `folder`: this server's, `<index>-of-<number>`. Raises PeerError if it has a state that is older than theirs.
    """
    sets: dict[int, dict[int, Path]] = {}
    for path in folder.parent.iterdir() if folder.parent.is_dir() else ():
        match = _OF.fullmatch(path.name)
        if match and path.name.partition("-")[2] != folder.name.partition("-")[2] and snapshots(path):
            sets.setdefault(int(match[2]), {})[int(match[1])] = path
    whole = [list(paths.values()) for num, paths in sets.items() if len(paths) == num]
    if not whole:
        return []
    last = max(whole, key=_written_at)
    if not has_state(folder):
        return last
    if _written_at(last) > _written_at([folder]):
        raise PeerError(f"{folder} is older than what {len(last)} servers left in {folder.parent}: remove one of them")
    return []


def _written_at(folders: Sequence[Path]) -> float:
    return max((p.stat().st_mtime for f in folders for _, p in snapshots(f)), default=float("inf"))


class _Newer:
    """Which rows of which tables hold records after the cut."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)

    def add(self, table: str, at: int, ids: torch.Tensor) -> None:
        """Note a part. Its ids are sorted once: each record after the cut looks its rows up in them."""
        if len(ids):
            self._parts[table].append((at, torch.sort(ids).values))

    def without(self, block: str, gradient: Gradient, sequence: int) -> Gradient:
        """Leave out the rows that hold record `sequence` already."""
        if gradient.rows is None:
            return gradient
        for at, ids in self._parts.get(block, []):
            if sequence < at:
                found = torch.searchsorted(ids, gradient.rows).clamp_(max=len(ids) - 1)
                fresh = ids[found] != gradient.rows
                gradient = Gradient(gradient.values[fresh], gradient.rows[fresh], gradient.trainer)
        return gradient


def _replay(folder: Path, storage: Storage, applied: AppliedIndex, at: Recovered, newer: _Newer) -> Recovered:
    for record in recover(folder, since=at.next_sequence):
        _again(record, storage, applied, at, newer)
        at.next_sequence = record.sequence + 1
    return at


def _again(record: LogRecord, storage: Storage, applied: AppliedIndex, at: Recovered, newer: _Newer) -> None:
    message, fields = record.message, record.message.fields
    if message.kind == "round":
        storage.begin_round()
        for block, gradient in round_of(message).items():
            storage.update(block, newer.without(block, gradient, record.sequence))
        applied.close_round(int(fields["round"]))
        at.num_records += 1
    elif message.kind == "applied":
        sender, block = TrainerIncarnation(int(fields["trainer"]), int(fields["epoch"])), str(fields["block"])
        named = {t.name: from_wire(t) for t in message.tensors}
        whole = Gradient(named["values"], named.get("rows"), sender.trainer)
        storage.update(block, newer.without(block, whole, record.sequence))
        applied.apply(sender, int(fields["round"]), block, whole.rows)
        at.num_records += 1
    elif message.kind == "pulled":
        storage.pulled(str(fields["block"]), int(fields["trainer"]))
    elif message.kind == "finished":
        at.is_finished, at.roster = True, Roster(at.roster.newest)
    else:
        at.is_finished = False  # another run of the job has begun
        at.roster = with_record(at.roster, message.kind, fields)
        if message.kind == "left":
            applied.leave(int(fields["trainer"]))


def round_of(message: Message) -> dict[str, Gradient]:
    """Return the merged gradients in the record of a round."""
    named = {t.name: from_wire(t) for t in message.tensors}
    blocks = [name.removeprefix(VALUES) for name in named if name.startswith(VALUES)]
    return {b: Gradient(named[VALUES + b], named.get(ROWS + b)) for b in blocks}
