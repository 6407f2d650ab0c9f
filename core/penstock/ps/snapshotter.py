"""Snapshotter of a server that keeps serving, and of the copies that trainers request.

the cut   with the locks of all blocks: everything but tables is copied, the log begins another file. Updates wait for
          the copies, not for the disk
tables    part by part, each under the locks of the tables: in between they are updated. A part names the record of
          the log that is the first that it does not hold
a copy    (`save`) has no log to make parts equal, so updates wait until the last part is copied. With `begin_save` only
          for that: what was copied is written while the server serves, and `finish_save` waits for it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from penstock.errors import PeerError
from penstock.ps.dispatcher import Dispatcher
from penstock.ps.durability.server_snapshots import (
    AtStep,
    Cut,
    Item,
    SnapshotWriter,
    keep_newest,
    snapshot_path,
    snapshots,
)
from penstock.ps.rounds.machine import Roster
from penstock.ps.state import ServerState
from penstock.ps.wire import Origin


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
            self._last = sequence
            self._state.log.forget_before(keep_newest(folder))

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
        self, path_at: Callable[[int], Path], at_cut: Callable[[], None], *, in_one_go: bool, is_finished: bool
    ) -> int:
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
