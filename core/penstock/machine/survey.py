"""Reads the machine: processor, limits, memory, capabilities, folders, clock. A thin shell around `readings`.

`root`: where /proc and /sys are, `/` except in tests. Nothing here raises for what a machine lacks. Cost: 30 ms.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.machine import cache, cgroup, cores, memory, shared
from penstock.machine.capability import Absent, capability, names
from penstock.machine.findings import Finding, MachineReading
from penstock.machine.readings import Cores, Folder, KernelClock, Memory, OpenFiles, Probed, Processor, SharedMemory

_OWN_LINE = ("cache_folder", "shared_memory")  # capabilities that have a more detailed reading
_TIME_ERROR, _UNSYNCHRONISED = 5, 0x40


def findings_of_machine(root: Path = cgroup.ROOT) -> tuple[Finding, ...]:
    """Return the findings about this machine that need no torch."""
    return tuple(reading.finding() for reading in read_machine(root))


def read_machine(root: Path = cgroup.ROOT) -> Sequence[MachineReading]:
    """Read everything about this machine that needs no torch."""
    probed = [Probed(capability(name)) for name in names() if name not in _OWN_LINE and "." not in name]
    return [
        read_processor(root),
        Cores(cores.usable_cores(root), os.cpu_count() or 1, len(cores.core_numbers()), cores.core_quota(root)),
        read_memory(root),
        read_shared_memory(),
        OpenFiles(*(limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))),
        *probed,
        read_cache_folder(),
        read_clock(),
    ]


def read_processor(root: Path = cgroup.ROOT) -> Processor:
    """Read the model and the instruction set of the first core."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, text = line.partition(":")
            fields.setdefault(key.strip(), text.strip())
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    return Processor(fields.get("model name") or "a processor without a name", platform.machine(), flags)


def read_memory(root: Path = cgroup.ROOT) -> Memory:
    """Read what can be used, and what of it is free."""
    usable, host = memory.usable_bytes(root), memory.physical_bytes()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        (text,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        free = int(text) << 10
    return Memory(usable, host, max(0, min(free, usable - memory.used_bytes(host - free, root))))


def read_shared_memory() -> SharedMemory:
    """Read the size of /dev/shm."""
    found = capability("shared_memory")
    if not found.present:
        return SharedMemory(0, 0, f"/dev/shm cannot be used: {found.detail}")
    size = os.statvfs(shared.FOLDER)
    return SharedMemory(size.f_blocks * size.f_frsize, size.f_bavail * size.f_frsize, "")


def read_cache_folder() -> Folder:
    """Read whether measurements can be remembered."""
    advice = "set PENSTOCK_CACHE to a folder that can be written; until then every process measures its kernels anew"
    try:
        path = cache.cache_folder()
    except RuntimeError as error:
        return Folder("cache folder", "none", 0, str(error), is_needed=False, advice=advice)
    found = capability("cache_folder")
    return Folder(
        "cache folder",
        str(path),
        free_bytes(path),
        "" if found.present else found.detail,
        is_needed=False,
        advice=advice,
    )


def read_state_folder(path: Path, *, advice: str) -> Folder:
    """Read whether state can be kept in a folder, which is not made here: the nearest that exists is tried."""
    nearest, error = path, ""
    try:
        nearest = _nearest(path)
        cache.check_writes(nearest)
    except (OSError, Absent) as failed:
        error = failed.strerror or str(failed) if isinstance(failed, OSError) else str(failed)
    return Folder("state folder", str(path), free_bytes(nearest), error, is_needed=True, advice=advice)


def _nearest(path: Path) -> Path:
    """Return the path, or the nearest above it that exists. Raises OSError where that cannot be found out."""
    for folder in (path, *path.parents):
        with suppress(FileNotFoundError):  # not Path.exists: it raises for a folder that cannot be searched
            os.stat(folder)
            return folder
    return path


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of a path, or of its nearest parent that there is."""
    for folder in (path, *path.parents):
        with suppress(OSError):
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize
    return 0


class _Timex(ctypes.Structure):
    """`struct timex` as far as it is read, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> KernelClock:
    """Ask the kernel, without setting anything, whether its clock is synchronised."""
    timex = _Timex()
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.byref(timex)))
    except (AttributeError, OSError):  # another C library, or a platform without the call
        return KernelClock(None, 0.0)
    if state < 0:
        return KernelClock(None, 0.0)
    return KernelClock(state != _TIME_ERROR and not timex.status & _UNSYNCHRONISED, timex.maxerror / 1e6)
