"""Memory that this process may use: that of the machine, bounded by the limits of its control groups."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from penstock.machine import cgroup


def physical_bytes() -> int:
    """Return the memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def usable_bytes(root: Path = cgroup.ROOT) -> int:
    """Return the memory that this process may use. Reads the limits anew at each call."""
    limits = cgroup.limits(root)
    limit = None if limits is None else limits.memory_bytes
    return physical_bytes() if limit is None else min(physical_bytes(), limit)


def used_bytes(of_machine: int, root: Path = cgroup.ROOT) -> int:
    """Return how much of `usable_bytes` is used; `of_machine`: used on the machine, the answer where nothing limits."""
    limits = cgroup.limits(root)
    if limits is None or limits.memory_bytes is None or limits.memory_bytes >= physical_bytes():
        return of_machine
    return of_machine if limits.used_bytes is None else limits.used_bytes


def return_freed() -> None:
    """Give the memory that the C library has free back to the machine: glibc keeps what lies below a used block.

    Takes 0.1 s for a GiB. Nothing happens where the library has no `malloc_trim`, or another allocator is preloaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
