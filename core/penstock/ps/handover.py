"""Handover of a server's state, where no folder is configured, from one that is stopped to the next at its endpoint.

stop       Ctrl-C or SIGTERM while trainers are members: a snapshot is written when serving has ended. Nothing is
           written before, so updates cost what they cost without, and a kill leaves nothing
claim      a trainer joins the next server that was a member before, as the same incarnation: a process that is still
           training. The snapshot is restored, and removed, since the updates that follow make it old
dismissal  only other incarnations join: it is another run. The snapshot is removed unread. One that joins first may
           have been started again beside others that go on: its join waits for theirs, `hold_s` at most, and not at
           all once each former member is replaced
a server that ends before either leaves the snapshot as it is

One server at a time holds the folder, by a file lock: the one that stops from before its port is free until the
snapshot is written, the next from its start, or its first join, until it is decided. A join that comes before the
writing has ended is Unavailable, so trainers repeat it.

Decided once, by the threads of requests; the snapshot itself is `Snapshotter.write_at`, `recover_server` reads it.
Source: docs/adr/0022-handover-of-a-stopped-server.md.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PeerError, Unavailable
from penstock.ps.durability.server_snapshots import LOCK, Cut, StateLock, finished_cut, snapshots, tidy
from penstock.ps.rounds.machine import Roster
from penstock.ps.rounds.messages import TrainerIncarnation

HOLD_S = 5.0
"""A trainer whose server is unreachable retries after a second at most, by `ps.retry`."""

Report = Callable[[str], None]


class Handover:
    """One endpoint's folder. Thread-safe. `report`: logs what was decided."""

    def __init__(self, folder: Path, report: Report, *, hold_s: float = HOLD_S) -> None:
        self.folder, self._report, self._hold_s = folder, report, hold_s
        self._changed = threading.Condition()
        self._lock: StateLock | None = None
        self._found: tuple[Path, Cut] | None = None
        self._is_decided = False
        self._new: dict[int, int] = {}  # trainer -> newest epoch among those that wait and were no members
        self._until: float | None = None  # when the wait for former members ends
        self._has_stopped = self._has_said_so = False

    @property
    def is_open(self) -> bool:
        """Whether there is a snapshot, of those that `look` has seen, that is neither claimed nor dismissed."""
        return self._found is not None

    def look(self) -> None:
        """Look for what was left, and hold it. What an interrupted or damaged writing left is removed.

        Raises Unavailable while another server holds it, OSError.
        """
        with self._changed:
            if self._found is not None or self._has_stopped or not self.folder.exists():
                return
            self._hold()
            try:
                tidy(self.folder)
                found = snapshots(self.folder)
                self._found = (found[-1][1], finished_cut(found[-1][1])) if found else None
            except PeerError as error:
                self._report(f"{error}; it is removed")
                self._remove(found[-1][1])
            finally:
                if self._found is None:
                    self._let_go()

    def hold(self) -> None:
        """Take hold of the folder before the port is free for the next server. Raises Unavailable, OSError."""
        with self._changed:
            self._hold()

    def clear(self) -> None:
        """Before it is written: remove a snapshot that was decided on and could not be removed then."""
        with self._changed:
            for _, old in snapshots(self.folder):
                self._remove(old)

    def let_go(self) -> None:
        """End. Folders that are empty then are removed; what is still undecided stays."""
        with self._changed:
            self._let_go()

    def _hold(self) -> None:
        if self._lock is None:
            self._lock = StateLock(self.folder)

    def _let_go(self) -> None:
        if self._lock is None:
            return
        if not snapshots(self.folder):
            with contextlib.suppress(OSError):  # another file is there, or it is gone
                (self.folder / LOCK).unlink()
                self.folder.rmdir()
                self.folder.parent.rmdir()
        self._lock.close()
        self._lock = None

    def check_writable(self) -> None:
        """Raise OSError if the folder cannot be made, or written to. Makes nothing: most servers never need it."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"{there} is not writable")

    def admit(self, sender: TrainerIncarnation, claim: Callable[[Path], None]) -> None:
        """Decide before a trainer joins. `claim` restores from the path; what it raises leaves the snapshot.

        Raises PeerError for a trainer that has been replaced, Unavailable if the server before is still writing, or
        if this one ends while the trainer waits for others.
        """
        with self._changed:
            if self._is_decided:
                return
            self._look_for_join()
            if self._found is None:
                self._is_decided = True
                return
            path, cut = self._found
            former = cut.roster.newest.get(sender.trainer, sender.epoch)
            if former > sender.epoch:
                raise PeerError(f"trainer {sender.trainer} was started again (epoch {former}); this is {sender.epoch}")
            if not self._is_former(cut.roster, sender):
                self._wait_for_former(cut.roster, sender)
            if self._is_decided:
                return
            if self._has_stopped:
                raise Unavailable("the server has ended")
            if self._is_former(cut.roster, sender):
                claim(path)
                self._report(f"goes on from {path}, with trainer {sender.trainer} that was a member before")
            else:
                self._report(f"removes {path}, which is of another run: its trainers have not come back")
            self._found, self._is_decided = None, True
            self._changed.notify_all()
            self._remove(path)
            self._let_go()

    def _look_for_join(self) -> None:
        try:
            self.look()
        except Unavailable:
            if not self._has_said_so:
                self._has_said_so = True
                self._report(f"the server before is still writing {self.folder}: trainers wait until it is written")
            raise
        except OSError as error:
            self._report(f"{self.folder} cannot be read, so training begins anew: {error}")

    @staticmethod
    def _is_former(roster: Roster, sender: TrainerIncarnation) -> bool:
        return roster.newest.get(sender.trainer) == sender.epoch

    def _wait_for_former(self, roster: Roster, sender: TrainerIncarnation) -> None:
        """Wait until it is decided, or no former member can come back."""
        self._new[sender.trainer] = max(sender.epoch, self._new.get(sender.trainer, 0))
        self._changed.notify_all()
        if self._until is None:
            self._until = time.monotonic() + self._hold_s
        self._changed.wait_for(lambda: self._is_over(roster), max(self._until - time.monotonic(), 0.0))

    def _is_over(self, roster: Roster) -> bool:
        remaining = {trainer: epoch for trainer, epoch in roster.newest.items() if trainer not in roster.left}
        replaced = all(self._new.get(trainer, epoch) > epoch for trainer, epoch in remaining.items())
        return self._is_decided or self._has_stopped or replaced

    def stop(self) -> None:
        """End the waits: the server ends."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify_all()

    def _remove(self, path: Path) -> None:
        try:
            shutil.rmtree(path)
        except OSError as error:
            self._report(f"{path} cannot be removed: {error}")
