"""Memory that processes of one host share: a memfd where there is one, else an unlinked file.

Either vanishes with the last descriptor and mapping of it. Only a memfd can be sealed against shrinking, without which
memory of another process must not be trusted: `is_sealable` holds for a memfd alone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from pathlib import Path

from penstock.machine.capability import Absent, capability, note, probe

FOLDER = Path("/dev/shm")
_SIZE = mmap.PAGESIZE


def open_shared(name: str, size: int) -> int:
    """Return a descriptor of new memory of `size` bytes that exist already: writing to it cannot fail later.

    `name`: what /proc shows. Raises OSError when memory is short.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC) if capability("memfd").present else _unlinked_file(name)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _unlinked_file(name: str) -> int:
    folder = FOLDER if capability("shared_memory").present else None
    number, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
    Path(path).unlink()
    return number


@probe("memfd", fallback="bodies of messages over the Unix socket, rings in an unlinked file")
def _memfd() -> str:
    if not hasattr(os, "memfd_create"):
        raise Absent("this platform has no memfd_create")
    descriptor = os.memfd_create("penstock-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE)
        _check_shared(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        try:
            os.ftruncate(descriptor, 0)
        except PermissionError:
            return "can be shared and sealed against shrinking"
        raise Absent("a seal against shrinking does not hold")
    finally:
        os.close(descriptor)


@probe("shared_memory", fallback="unlinked files of the temporary folder")
def _shared_memory() -> str:
    with tempfile.TemporaryFile(dir=FOLDER) as file:
        os.posix_fallocate(file.fileno(), 0, _SIZE)
        _check_shared(file.fileno())
    found = os.statvfs(FOLDER)
    return f"{FOLDER}: {found.f_blocks * found.f_frsize >> 20} MiB, {found.f_bavail * found.f_frsize >> 20} MiB free"


def _check_shared(descriptor: int) -> None:
    """Raise Absent unless what is written through one mapping is read through another."""
    expected = os.urandom(16)
    with mmap.mmap(descriptor, _SIZE) as writer, mmap.mmap(descriptor, _SIZE, prot=mmap.PROT_READ) as reader:
        writer[: len(expected)] = expected
        found = _read(reader, len(expected))
    if found != expected:
        raise Absent("a second mapping does not show what was written through the first")


def _read(memory: mmap.mmap, count: int) -> bytes:
    return memory[:count]


@note("huge_pages", meaning="pages of the usual size")
def _huge_pages() -> str:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii").strip()
    if "[never]" in setting or "[" not in setting:
        raise Absent(f"the kernel gives none: transparent_hugepage/enabled is {setting!r}")
    with mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[:4] = b"page"
        if memory[:4] != b"page":
            raise Absent("memory with MADV_HUGEPAGE does not keep what is written")
    return f"advice only; the kernel's setting is {setting}"
