"""Back-off between restarts: a replacement starts at once, unless those before it failed soon as well.

Pure. A process, or a whole attempt, that fails as soon as it runs would use up its job's restarts within seconds, long
before what is wrong (a full disk, an unreachable file system) can pass. The longest pause of one process is well below
the 30 s that trainers wait for a server (`PENSTOCK_PS_DEADLINE_S`); for a whole attempt no process waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from penstock.protocol.jobspec import MAX_PAUSE_S

FIRST = timedelta(seconds=1)
LONGEST = timedelta(seconds=8)
LONGEST_OF_ATTEMPTS = timedelta(seconds=MAX_PAUSE_S)
STEADY = timedelta(seconds=30)
"""One that ran so long has not failed soon."""


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when a process, or an attempt, was there."""

    created_at: datetime
    finished_at: datetime | None


def starts_at(
    former: Sequence[Span], created_at: datetime, *, first: timedelta = FIRST, longest: timedelta = LONGEST
) -> datetime:
    """Return when a process or an attempt may start. `former`: those in whose place it is, oldest first."""
    soon = 0
    for life in former:
        is_steady = life.finished_at is not None and life.finished_at - life.created_at >= STEADY
        soon = 1 if is_steady else soon + 1
    if soon < 2:
        return created_at
    return created_at + min(first * (1 << min(soon - 2, 10)), longest)


def waits_until(spec: Mapping[str, Any], since: datetime) -> datetime | None:
    """Return when a job that waits to be placed from `since` on has waited for its `max_wait_s`; None without that."""
    max_wait_s = spec.get("max_wait_s")
    return None if max_wait_s is None else since + timedelta(seconds=max_wait_s)


def is_due(at: datetime, now: datetime, *, longest: timedelta = LONGEST) -> bool:
    """Whether a pause that ends at `at` is over. So is one that is longer than any: the clock was set back since."""
    return not now < at <= now + longest
