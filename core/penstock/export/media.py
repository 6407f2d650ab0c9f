"""Tables and histograms that a job logged, as CSV files: a folder for each name, a file for each step."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SpecError
from penstock.export.files import whole_folder
from penstock.export.recording import Recording
from penstock.protocol.media import MEDIA, HistogramContent, TableContent

if TYPE_CHECKING:
    from penstock.protocol.rest import MediaItem


def write_media(recording: Recording, folder: Path) -> dict[str, int]:
    """Write `folder`/NAME/STEP.csv, which is whole when it appears. Returns how many names, files and rows.

    Raises SpecError if the folder is not empty or cannot be written, or the job has logged none; nothing is left then.
    """
    found = recording.client.media(recording.job["id"])
    if not found:
        raise SpecError(
            f"job {recording.job['name']!r} has no tables and histograms: its script logs none, or they were deleted "
            "with its metrics (the server's retention)"
        )
    files = rows = 0
    try:
        with whole_folder(Path(os.path.realpath(folder)), "its files would stand among these") as part:
            for name, of_name in zip(_folders([one["name"] for one in found]), found, strict=True):
                (part / name).mkdir()
                for item in of_name["items"]:
                    content = MEDIA.validate_python(recording.client.media_content(recording.job["id"], item["id"]))
                    rows += _write(part / name / file_name(item), content)
                    files += 1
    except OSError as error:
        raise SpecError(f"cannot write {folder}: {error.strerror or error}; give another --output") from error
    return {"names": len(found), "files": files, "rows": rows}


def file_name(item: MediaItem) -> str:
    """Return the name of the file of one step, in whose order the names are; two logs of a step differ by time."""
    return f"attempt{item['attempt']}-step{item['step']:09d}-{item['time_ns']}.csv"


def _folders(names: Sequence[str]) -> list[str]:
    """Return a folder for each name, of letters that all file systems have; equal ones get numbers."""
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "media"
        number = sum(one == plain or one.startswith(f"{plain}~") for one in found)
        found.append(f"{plain}~{number + 1}" if number else plain)
    return found


def _write(path: Path, content: TableContent | HistogramContent) -> int:
    """Write a file with a header, UTF-8, an empty field for None; return how many rows."""
    head: Sequence[str] = ("low", "high", "count")
    if isinstance(content, TableContent):
        head = content.columns
        rows: list[Iterable[object]] = [*content.rows]
    else:
        rows = [(*edges, count) for edges, count in zip(pairwise(content.edges), content.counts, strict=True)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)
    return len(rows)
