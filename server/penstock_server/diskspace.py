"""When a disk counts as full, and how that is put: of the server and of nodes alike."""

from __future__ import annotations

from penstock.diagnosis import FULL_BYTES
from penstock.protocol.agent import DiskSpace


def is_full(disk: DiskSpace | None) -> bool:
    """Whether a file system has no room left for anything; one that is not known (None) has some."""
    return disk is not None and disk.total_bytes > 0 and disk.free_bytes < FULL_BYTES


def free_of(disk: DiskSpace) -> str:
    """Describe how much of a disk is free, in MB."""
    return f"{disk.free_bytes / 1e6:.1f} MB of {disk.total_bytes / 1e6:,.0f} MB are free"
