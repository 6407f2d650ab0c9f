"""The order in which files of tests begin: the longest first, so that no worker has one left when others have ended.

tests/longest.txt lists them. Files that are not listed follow in the order of collection. A wrong place costs time, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LIST = Path(__file__).parents[1] / "longest.txt"


def listed(text: str) -> list[str]:
    """Return the files that a list names, in its order."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0] for words in lines if words]


def place(file: str, longest: Sequence[str]) -> int:
    """Return the place of a file: that in the list, else behind it."""
    return longest.index(file) if file in longest else len(longest)
