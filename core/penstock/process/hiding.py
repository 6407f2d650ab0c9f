"""Paths that a child process does not see: those of the control plane, hidden from jobs of the same user.

In a mount namespace of its own, which takes root or user namespaces, an empty folder lies over each. No sandbox: a
process with the right to mount can look below it again. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _SLAVE = 1, 2, 4, 8, 4096, 16384, 1 << 19


def hide(paths: Sequence[str]) -> Callable[[], str]:
    """Return what a forked child of one thread calls to see nothing at `paths`; it returns what went wrong, or ''.

    Paths that are not there are left out.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # looked up before the fork
    uid, gid = os.getuid(), os.getgid()

    def call() -> str:
        wrong = _separate(libc, uid, gid)
        for path in paths:
            wrong = wrong or _cover(libc, path)
        return wrong

    return call


def _separate(libc: ctypes.CDLL, uid: int, gid: int) -> str:
    if libc.unshare(_NEWNS) != 0:
        if libc.unshare(_NEWUSER | _NEWNS) != 0:
            return _failed("a mount namespace takes root, or user namespaces")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    if libc.mount(None, b"/", None, _REC | _SLAVE, None) != 0:
        return _failed("mounts could not be taken apart")
    return ""


def _cover(libc: ctypes.CDLL, path: str) -> str:
    if os.path.isdir(path):
        flags = _RDONLY | _NOSUID | _NODEV | _NOEXEC
        result = libc.mount(b"none", os.fsencode(path), b"tmpfs", flags, b"size=4k,mode=0500")
    elif os.path.exists(path):
        result = libc.mount(b"/dev/null", os.fsencode(path), None, _BIND, None)
    else:
        return ""
    return "" if result == 0 else _failed(f"{path} could not be hidden")


def _failed(what: str) -> str:
    return f"{what}: {os.strerror(ctypes.get_errno())}"
