"""Handover of a server's state, where no folder is configured, from one that is stopped to the next at its endpoint.

stop       Ctrl-C or SIGTERM while trainers are members: a snapshot is written when serving has ended. Nothing is
           written before, so updates cost what they cost without, and a kill leaves nothing
claim      a trainer joins the next server that was a member before, as the same incarnation: a process that is still
           training. The snapshot is restored, and removed, since the updates that follow make it old
dismissal  only other incarnations join: it is another run. The snapshot is removed unread. One that joins first may
           have been started again beside others that go on: its join waits for theirs, `hold_s` at most, and not at
           all once each former member is replaced
a server that ends before either leaves the snapshot as it is

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
from penstock.ps.durability.server_snapshots import Cut, finished_cut, snapshots, tidy
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
        self._cut = self._found()
        self._new: dict[int, int] = {}  # trainer -> newest epoch among those that wait and were no members
        self._until: float | None = None  # when the wait for former members ends
        self._has_stopped = False

    def _found(self) -> Cut | None:
        """Return the cut of what is there. What an interrupted or damaged writing left is removed. Raises OSError."""
        tidy(self.folder)
        found = snapshots(self.folder)
        try:
            return finished_cut(found[-1][1]) if found else None
        except PeerError as error:
            self._report(f"{error}; it is removed")
            self.remove()
            return None

    @property
    def is_open(self) -> bool:
        """Whether there is a snapshot that is neither claimed nor dismissed."""
        return self._cut is not None

    def check_writable(self) -> None:
        """Raise OSError if the folder cannot be made, or written to. Makes nothing: most servers never need it."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"{there} is not writable")

    def admit(self, sender: TrainerIncarnation, claim: Callable[[], None]) -> None:
        """Decide before a trainer joins. `claim` restores; what it raises leaves the snapshot.

        Raises Unavailable if the server ends while the trainer waits for others.
        """
        with self._changed:
            if self._cut is not None and not self._is_former(self._cut.roster, sender):
                self._wait_for_former(self._cut.roster, sender)
            if self._cut is None:
                return
            if self._has_stopped:
                raise Unavailable("the server has ended")
            if self._is_former(self._cut.roster, sender):
                claim()
                self._report(f"goes on from {self.folder}, with trainer {sender.trainer} that was a member before")
            else:
                self._report(f"removes {self.folder}, which is of another run: its trainers have not come back")
            self._cut = None
            self._changed.notify_all()
            self.remove()

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
        return self._cut is None or self._has_stopped or replaced

    def stop(self) -> None:
        """End the waits: the server ends."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify_all()

    def remove(self) -> None:
        """Remove the snapshot, and the folders that are empty then. What cannot be removed is logged."""
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as error:
            self._report(f"{self.folder} cannot be removed: {error}")
        with contextlib.suppress(OSError):  # other servers' folders are in it, or it is not there
            self.folder.parent.rmdir()
