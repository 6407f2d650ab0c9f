"""What the processes of jobs wrote themselves (`counting`, `checkpointing`), outside of all that Penstock knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.chaos.history import CheckpointSeen, PointsSeen, ProcessSeen, ReplicaRecord

SCRIPT = Path(__file__).with_name("counting.py")


@dataclass(frozen=True, slots=True)
class Note:
    """One line of a witness file."""

    at: float
    word: str
    number: int


def processes(folder: Path) -> list[ProcessSeen]:
    """Return the processes that wrote to a folder of witness files."""
    found = []
    for path in sorted(folder.iterdir()):
        replica_id, _, pid = path.name.rpartition(".")
        notes = list(_notes(path)) if pid.isdecimal() else []
        if notes:
            wrote = max((note.number for note in notes if note.word == "wrote"), default=0)
            found.append(ProcessSeen(replica_id, int(pid), notes[0].at, notes[-1].at, wrote))
    return found


def checkpoints(folder: Path, replicas: Iterable[ReplicaRecord]) -> list[CheckpointSeen]:
    """Return the checkpoints that processes saw committed, damaged or restored."""
    of = {one.id: one for one in replicas}
    found = []
    for path in sorted(folder.iterdir()):
        replica_id, _, pid = path.name.rpartition(".")
        for note in _notes(path) if pid.isdecimal() and replica_id in of else ():
            if note.word in ("committed", "damaged", "restored"):
                one, whole = of[replica_id], note.word != "damaged"
                is_restored = note.word == "restored"
                found.append(CheckpointSeen(one.job_id, one.node_id, note.at, note.number, whole, is_restored))
    return found


def points(folder: Path) -> list[PointsSeen]:
    """Return the points that processes have logged."""
    found = []
    for path in sorted(folder.iterdir()):
        replica_id, _, pid = path.name.rpartition(".")
        notes = list(_notes(path)) if pid.isdecimal() else []
        logged = tuple((note.at, note.number) for note in notes if note.word == "logged")
        if logged:
            is_closed = any(note.word == "closed" for note in notes)
            found.append(PointsSeen(replica_id, logged, notes[-1].at, is_closed))
    return found


def _notes(path: Path) -> Iterator[Note]:
    content = path.read_text(encoding="utf-8")
    for line in content[: content.rfind("\n") + 1].splitlines():
        at, word, number = line.split()
        yield Note(float(at), word, int(number))
