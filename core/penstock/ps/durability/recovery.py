"""From a folder back to a server: its newest whole snapshot, then the log's records after it, in order.

Records are applied through the same calls as before, so the result is the same to the bit. A part of a table may hold
records after the snapshot's cut. Of a record that it holds, the part's rows are left out: a row that is in no such part
was made, or last changed, after that part was taken, or lies in a part that was taken at the cut.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.errors import PeerError, SpecError
from penstock.ps.durability.server_snapshots import ServerSnapshot, newest, snapshots, tidy
from penstock.ps.durability.wal import AppliedIndex, LogRecord, log_files, recover, with_record
from penstock.ps.rounds.machine import Roster
from penstock.ps.rounds.messages import TrainerIncarnation
from penstock.ps.storage import Gradient, Storage
from penstock.ps.wire import ROWS, VALUES, Message, from_wire

_OF = re.compile(r"(\d+)-of-(\d+)")


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
