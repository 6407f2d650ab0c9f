"""The files of tests that take longest: the order in which runs begin, and what a short run leaves out.

tests/longest.txt lists them, longest first, so that no worker has one left when others have ended. Files that are not
listed follow in the order of collection. A listed file is *long*, unless the list says `always` beside it: `make test`
runs only those of its tests that are marked `smoke`, and `make test-all` runs every one.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

LIST = Path(__file__).parents[1] / "longest.txt"


class When(Enum):
    """Which runs have a listed file."""

    ALWAYS = "always"
    LONG = ""


def listed(text: str) -> dict[str, When]:
    """Return the files that a list names, in its order, and when each runs. Raises `ValueError` for another word."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return {words[0]: When(" ".join(words[1:])) for words in lines if words}


def place(file: str, longest: Mapping[str, When]) -> int:
    """Return the place of a file: that in the list, else behind it."""
    return list(longest).index(file) if file in longest else len(longest)


def is_long(file: str, longest: Mapping[str, When], marks: set[str]) -> bool:
    """Return whether a test of this file, with these marks, is left to `make test-all`."""
    return longest.get(file) is When.LONG and "smoke" not in marks
