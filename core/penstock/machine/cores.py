"""Cores that this process may use: those of its affinity mask, bounded by the quota of its control groups.

A quota of 1.5 cores counts as 2: with 2 threads the quota is used up, with 1 a third of it is not. Which cores a quota
falls on is the scheduler's choice, so `core_numbers` is the mask alone.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from penstock.machine import cgroup
from penstock.machine.capability import Absent, capability, probe


def usable_cores(root: Path = cgroup.ROOT) -> int:
    """Return how many threads of this process can run at once; at least 1. Reads the limits anew at each call."""
    quota = core_quota(root)
    return len(core_numbers()) if quota is None else min(len(core_numbers()), max(1, math.ceil(quota)))


def core_quota(root: Path = cgroup.ROOT) -> float | None:
    """Return how many cores the control groups of this process may keep busy, all its processes together."""
    limits = cgroup.limits(root)
    return None if limits is None else limits.cores


def core_numbers() -> tuple[int, ...]:
    """Return the numbers of the cores on which this process may run, ascending; at least one."""
    if capability("affinity").present:
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@probe("affinity", fallback="all cores of the machine")
def _affinity() -> str:
    if not hasattr(os, "sched_getaffinity"):
        raise Absent("this platform has no sched_getaffinity")
    found = os.sched_getaffinity(0)
    if not found or min(found) < 0:
        raise Absent(f"sched_getaffinity gives {sorted(found)}; expected the numbers of one core at least")
    return f"{len(found)} of {os.cpu_count() or 1} cores"
