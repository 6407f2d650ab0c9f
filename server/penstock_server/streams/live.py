"""The newest figures of each running job, kept in memory between two writes to the database. Pure but for its dict."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.protocol.stream import Figures

ETA_WINDOW_NS = 30 * 10**9
MAX_JOBS = 2000


@dataclass(slots=True)
class LiveJob:
    """Latest values, progress and the expected time to the end of one job."""

    latest: dict[str, float] = field(default_factory=dict)
    progress: dict[str, Any] | None = None
    eta_s: float | None = None
    _marks: deque[tuple[int, float]] = field(default_factory=deque)

    def advance(self, progress: Mapping[str, Any], at_ns: int) -> bool:
        """Note progress at a time. Return False, and note nothing, if it is not understood."""
        try:
            done, total = float(progress["done"]), float(progress["total"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        if not (math.isfinite(done) and math.isfinite(total)) or total < 0:
            return False
        unit = str(progress.get("unit", "")).replace("\0", "").encode(errors="replace").decode()[:32]
        self.progress = {"done": done, "total": total, "unit": unit}
        if self._marks and done < self._marks[-1][1]:
            self._marks.clear()  # a new attempt begins again
        self._marks.append((at_ns, done))
        while len(self._marks) > 2 and at_ns - self._marks[1][0] > ETA_WINDOW_NS:
            self._marks.popleft()
        self.eta_s = eta(self._marks[0], self._marks[-1], total)
        return True

    def figures(self) -> Figures:
        """Return what a browser is sent of it."""
        return Figures(latest=self.latest, progress=self.progress, eta_s=self.eta_s)


def eta(first: tuple[int, float], last: tuple[int, float], total: float) -> float | None:
    """Return the seconds until `total` at the rate between two marks (time_ns, done), or None if it is unknown."""
    if last[1] >= total:
        return 0.0
    elapsed_s, gained = (last[0] - first[0]) / 1e9, last[1] - first[1]
    if elapsed_s <= 0 or gained <= 0:
        return None
    rest_s = (total - last[1]) * elapsed_s / gained
    return rest_s if math.isfinite(rest_s) else None


class Live:
    """Live figures by job; those of the `MAX_JOBS` jobs that were touched last."""

    def __init__(self) -> None:
        self._jobs: dict[str, LiveJob] = {}

    def get(self, job_id: str) -> LiveJob | None:
        """Return the figures of a job, if any arrived lately."""
        return self._jobs.get(job_id)

    def of(self, job_id: str) -> LiveJob:
        """Return the figures of a job, empty ones if none arrived."""
        found = self._jobs.pop(job_id, None) or LiveJob()
        self._jobs[job_id] = found
        while len(self._jobs) > MAX_JOBS:
            del self._jobs[next(iter(self._jobs))]
        return found
