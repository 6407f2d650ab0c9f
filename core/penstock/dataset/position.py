"""How far reading has come, file by file, counted only when a batch has been used. Pure; guarded by its owner's lock.

Batches of one reader may be used out of their order by several trainers: a file has come as far as the last batch that
was used with all before it. A position holds nothing but paths and numbers, and goes through JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import SpecError

Marks = Sequence[tuple[int, int, int, bool]]
"""(file, offset, lines, whether it has ended), as a batch carries them."""


@dataclass(slots=True)
class FilePlace:
    """`offset`: where the next line begins, in bytes of the text (rows of a Parquet or Arrow file)."""

    path: str
    offset: int = 0
    lines: int = 0
    ended: bool = False


class FilePlaces:
    """How far all files have come."""

    def __init__(self, paths: Sequence[str], position: Mapping[str, Any] | None = None) -> None:
        """Begin at the start, or at a position of `as_position`. Raises SpecError if it is one of other files."""
        self.files = [FilePlace(path) for path in paths]
        self._waiting: dict[int, dict[int, Marks]] = {}
        self._next: dict[int, int] = {}
        if position is not None:
            self._restore(position)

    def used(self, producer: int, number: int, marks: Marks) -> None:
        """Count batch `number` of a reader."""
        waiting = self._waiting.setdefault(producer, {})
        waiting[number] = marks
        following = self._next.get(producer, 0)
        while following in waiting:
            for file, offset, lines, ended in waiting.pop(following):
                place = self.files[file]
                place.offset, place.lines, place.ended = offset, lines, ended
            following += 1
        self._next[producer] = following

    def as_position(self) -> dict[str, Any]:
        """Return the position in plain types."""
        return {"kind": "files", "files": [[f.path, f.offset, f.lines, f.ended] for f in self.files]}

    def _restore(self, position: Mapping[str, Any]) -> None:
        given = position.get("files") if position.get("kind") == "files" else None
        if not isinstance(given, Sequence) or [entry[0] for entry in given] != [file.path for file in self.files]:
            raise SpecError(
                "the reader's position is not one of this file list; set the same files in the same order "
                f"(position of {[entry[0] for entry in given] if given else position}; "
                f"files {[file.path for file in self.files]})"
            )
        self.files = [FilePlace(str(p), int(offset), int(lines), bool(ended)) for p, offset, lines, ended in given]
