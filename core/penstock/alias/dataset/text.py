"""What the data sets of text share: numbering words, and lines of files in archives."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping

from penstock.errors import SpecError

START, END, UNKNOWN = "<s>", "<e>", "<unk>"


def numbered(counts: Mapping[str, int], cutoff: int) -> dict[str, int]:
    """Return the ids of words with more than `cutoff` occurrences, by frequency, then by the alphabet; `<unk>` last."""
    kept = [word for word, count in counts.items() if count > cutoff and word != UNKNOWN]
    words = sorted(kept, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate([*words, UNKNOWN])}


def lines(archive: str, name: str) -> Iterator[str]:
    """Iterate over the lines of each file in a tar archive whose path ends with `name`. Raises SpecError for none."""
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.endswith(name)]
        if not members:
            raise SpecError(f"{archive} has no file {name}", pointer=archive)
        for member in members:
            for line in tar.extractfile(member) or ():
                yield line.decode("utf-8").strip()
