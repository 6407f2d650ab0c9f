"""What has to be known after a restart, beside the parameters: rounds, applied pushes, rows to tell, who takes part.

It changes together with the log, under the lock of the block (or of all blocks, for a round), so that a snapshot that
holds all locks sees it as of one position of the log. Replaying the log calls the same methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import PeerError
from penstock.ps.changed_rows import ChangedRows
from penstock.ps.members import Roster
from penstock.ps.messages import Sender
from penstock.ps.wire import Value

Applied = dict[tuple[int, str], tuple[int, int]]


class Ledger:
    """`round`: rounds applied. `applied`: (trainer, block) -> (epoch, step) of its newest applied push."""

    def __init__(self, *, trainers: int, keeps_changes: bool) -> None:
        self.round = 0
        self.applied: Applied = {}
        self.changed = ChangedRows(set(range(trainers)))
        self._keeps_changes = keeps_changes

    def close_round(self, number: int) -> None:
        """A round is logged and applied."""
        self.round = number + 1

    def apply(self, sender: Sender, step: int, block: str, rows: Any | None) -> None:
        """A push is logged and applied."""
        self.applied[sender.trainer, block] = (sender.epoch, step)
        if self._keeps_changes and rows is not None:
            self.changed.note(block, sender.trainer, rows.numpy())

    def leave(self, trainer: int) -> None:
        """A trainer has left: under the same epoch it may count its steps from the beginning."""
        # Other threads add what they apply meanwhile: only a copy can be walked through.
        for key in [key for key in list(self.applied) if key[0] == trainer]:
            del self.applied[key]


def with_record(roster: Roster, kind: str, fields: Mapping[str, Value]) -> Roster:
    """Return the roster after a record of who took part."""
    trainer, members, newest = int(fields["trainer"]), dict(roster.members), dict(roster.newest)
    if kind == "joined":
        epoch = int(fields["epoch"])
        members[trainer] = (epoch, int(fields["round"]))
        newest[trainer] = epoch
        return Roster(newest, roster.joined | {trainer}, roster.left - {trainer}, members)
    members.pop(trainer, None)
    if kind == "left":
        return Roster(newest, roster.joined, roster.left | {trainer}, members)
    if kind == "lost":
        return Roster(newest, roster.joined, roster.left, members)
    raise PeerError(f"a log has no records called {kind!r}")
