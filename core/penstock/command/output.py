"""Print for a person or for a script: results to stdout, everything else to stderr; a job in one line."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.protocol.states import TERMINAL_JOB

if TYPE_CHECKING:
    from penstock.protocol.rest import Job, Replica


_STEERING = frozenset({"Cc", "Cf", "Co", "Cs"})


def emit_json(value: Any) -> None:
    """Print one JSON document on one line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def emit_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print aligned columns, or `empty` to stderr if there are no rows."""
    if not rows:
        note(empty)
        return
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def note(text: str) -> None:
    """Print a message for people."""
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Spell out what would steer a terminal or reorder its text: names and reasons are other people's."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in _STEERING else ascii(c)[1:-1] for c in text)


def duration(seconds: float) -> str:
    """Return a duration as a person writes it: 42s, 3m05s, 2h07m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def is_over(job: Job) -> bool:
    """True if the job is in a state that it does not leave."""
    return job["state"] in TERMINAL_JOB


def describe(job: Job) -> str:
    """Return the state of a job in one line."""
    parts = [f"{job['name']}: {job['state']}", *figures(job)]
    if is_over(job) or job["progress"] is None:
        parts.append(why_in_a_line(job))
    return printable(" · ".join(part for part in parts if part))


def why_in_a_line(job: Job) -> str:
    """Return why the job is where it is; of a log's end that follows, the last line, which has a traceback's error."""
    sentence, *rest = [line.strip() for line in job["why"].splitlines() if line.strip()] or [""]
    return f"{sentence}: {rest[-1]}" if rest else sentence


def figures(job: Job) -> list[str]:
    """Return progress, loss, rate and remaining time, as far as they are known."""
    parts = []
    progress, latest = job["progress"], job["latest"] or {}
    if progress is not None and progress["total"]:
        parts.append(f"{progress['done']:g}/{progress['total']:g} {progress['unit']}")
    loss, rate = latest.get("loss"), latest.get("samples_per_s")
    if loss is not None:
        parts.append(f"loss {loss:.4f}")
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    if job["eta_s"] is not None and not is_over(job):
        parts.append(f"{duration(job['eta_s'])} left")
    return parts


def label(replica: Replica) -> str:
    """Return what a person calls a replica."""
    return f"{replica['role']} {replica['index']}"
