"""Rows that a recording has lost to its quota, in a file beside its segments: `{"through": segment, "rows": {…}}`.

The file is replaced before the segments up to `through` are deleted, and those are deleted again when a recording is
opened. So a row is either in a segment or counted here, whenever the server is killed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import structlog

from penstock.protocol.completeness import NAMES
from penstock.protocol.frames import Kind

log = structlog.get_logger(__name__)

FILE = "removed.json"
RowsByStream = Counter[tuple[int, Kind]]


def read(folder: Path) -> tuple[int, RowsByStream]:
    """Return the newest segment that was removed, 0 if none was, and the rows of all that were."""
    try:
        content = json.loads((folder / FILE).read_text())
        through, by_stream = int(content["through"]), content["rows"]
        rows = {(int(s), NAMES[name]): int(count) for s, kinds in by_stream.items() for name, count in kinds.items()}
    except FileNotFoundError:
        return 0, Counter()
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # the recording lacks them: the sums show it
        log.warning("rows that were removed are not readable", path=str(folder / FILE), error=str(error))
        return 0, Counter()
    return through, Counter(rows)


def write(folder: Path, through: int, rows: RowsByStream) -> None:
    """Replace the file. Raises OSError when the disk does."""
    by_stream: dict[str, dict[str, int]] = {}
    for (stream, kind), count in sorted(rows.items()):
        by_stream.setdefault(str(stream), {})[kind.name] = count
    part = (folder / FILE).with_suffix(".part")
    part.write_text(json.dumps({"through": through, "rows": by_stream}))
    part.chmod(0o600)
    part.replace(folder / FILE)
