"""Every probe finds out that its thing is missing, throws, or gives wrong results; none of it ends the process."""

from __future__ import annotations

import errno
import os
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.capabilities import absent

from penstock.errors import SpecError
from penstock.machine.capability import capability, forget, names, notes
from penstock.machine.shared import open_shared

Patch = Callable[[pytest.MonkeyPatch, Path], None]
NAMES = [name for name in names() if "." not in name]  # those with a dot need torch


@pytest.fixture(autouse=True)
def _probed_anew() -> Iterator[None]:
    forget()
    yield
    forget()


def no(*_: Any, **__: Any) -> Any:
    """Fail as a call does that a sandbox forbids."""
    raise PermissionError(errno.EPERM, "Operation not permitted")


def patched(target: str, replacement: object) -> Patch:
    return lambda monkeypatch, _: monkeypatch.setattr(target, replacement)


def missing(target: str) -> Patch:
    return lambda monkeypatch, _: monkeypatch.delattr(target)


def file_that_reads(text: str, *, only: str) -> Patch:
    """Let one path read as `text`; without text it cannot be read."""
    read = Path.read_text

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        if str(self) != only:
            return read(self, *args, **kwargs)
        return text if text else no()

    return patched("pathlib.Path.read_text", read_text)


def unwritable_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder / "file" / "below"))


def forgetful_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda _: b"")


def no_display(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)


def no_browser() -> Any:
    raise webbrowser.Error("no browser")


class Ended:
    """What select.poll gives for a descriptor that is always readable."""

    def register(self, *_: object) -> None: ...
    def poll(self, _: float) -> list[tuple[int, int]]:
        return [(0, 1)]


class Silent(Ended):
    """What select.poll gives for a descriptor that never becomes readable."""

    def poll(self, _: float) -> list[tuple[int, int]]:
        return []


def other_file(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    """Let /proc/PID/fd open another file than the process has open: its pipe never gets data."""
    monkeypatch.setattr("penstock.machine.process_end._PROBE_S", 0.05)
    really = os.open

    def opens_nothing_of_others(path: Any, *how: Any) -> int:
        return really(os.devnull if str(path).startswith("/proc/") else path, *how)

    monkeypatch.setattr("os.open", opens_nothing_of_others)


def silent_loopback(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    """Let a connection be accepted that never gets data."""
    monkeypatch.setattr("penstock.machine.network._PROBE_S", 0.05)
    monkeypatch.setattr("socket.socket.sendall", lambda *_: None)


HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
MOUNTS = "/proc/self/mountinfo"

ABSENT: list[tuple[str, str, Patch]] = [
    ("memfd", "this platform has no memfd_create", missing("os.memfd_create")),
    ("memfd", "PermissionError", patched("os.memfd_create", no)),
    ("memfd", "PermissionError", patched("os.posix_fallocate", no)),
    ("memfd", "a seal against shrinking does not hold", patched("os.ftruncate", lambda *_: None)),
    ("memfd", "a second mapping does not show", patched("penstock.machine.shared._read", lambda *_: b"")),
    ("shared_memory", "FileNotFoundError", patched("penstock.machine.shared.FOLDER", Path("/nowhere/at/all"))),
    ("shared_memory", "PermissionError", patched("os.posix_fallocate", no)),
    ("shared_memory", "a second mapping does not show", patched("penstock.machine.shared._read", lambda *_: b"")),
    ("huge_pages", "the kernel gives none", file_that_reads("always madvise [never]", only=HUGE_PAGES)),
    ("huge_pages", "PermissionError", file_that_reads("", only=HUGE_PAGES)),
    ("huge_pages", "transparent_hugepage/enabled is 'nonsense'", file_that_reads("nonsense", only=HUGE_PAGES)),
    ("pidfd", "this platform has no pidfd_open", missing("os.pidfd_open")),
    ("pidfd", "PermissionError", patched("os.pidfd_open", no)),
    ("pidfd", "shows the end of a process that runs", patched("select.poll", Ended)),
    ("pidfd", "does not show the end of a process", patched("select.poll", Silent)),
    ("pidfd", "the interpreter's path is unknown", patched("sys.executable", "")),
    ("other_descriptors", "PermissionError", patched("subprocess.Popen", no)),
    ("other_descriptors", "the interpreter's path is unknown", patched("sys.executable", "")),
    ("other_descriptors", "opens another file", patched("penstock.machine.process_end._read", lambda *_: b"x")),
    ("other_descriptors", "opens another file", other_file),
    ("ptrace", "ptrace_scope is 3", file_that_reads("3\n", only=SCOPE)),
    ("ptrace", "PermissionError", file_that_reads("", only=SCOPE)),
    ("ptrace", "ValueError", file_that_reads("nonsense", only=SCOPE)),
    ("affinity", "this platform has no sched_getaffinity", missing("os.sched_getaffinity")),
    ("affinity", "PermissionError", patched("os.sched_getaffinity", no)),
    ("affinity", "expected the numbers of one core", patched("os.sched_getaffinity", lambda _: set())),
    ("cgroup", "no control groups are mounted", file_that_reads("25 1 8:1 / / rw - ext4 x rw\n", only=MOUNTS)),
    ("cgroup", "PermissionError", file_that_reads("", only=MOUNTS)),
    ("cgroup", "ValueError", patched("penstock.machine.cgroup._cores", lambda *_: int("nonsense"))),
    ("ipv6", "this Python was built without IPv6", patched("socket.has_ipv6", False)),
    ("ipv6", "PermissionError", patched("socket.create_server", no)),
    ("ipv6", "other bytes than were sent", patched("penstock.machine.network._received", lambda *_: b"x")),
    ("ipv6", "TimeoutError", silent_loopback),
    ("browser", "there is no display", no_display),
    ("browser", "Error: no browser", patched("webbrowser.get", no_browser)),
    ("browser", "w3m runs in this terminal", patched("webbrowser.get", lambda: webbrowser.GenericBrowser("w3m"))),
    ("cache_folder", "NotADirectoryError", unwritable_home),
    ("cache_folder", "PermissionError", patched("tempfile.NamedTemporaryFile", no)),
    ("cache_folder", "reads back 0 bytes that were not written", forgetful_files),
    ("file_locks", "PermissionError", patched("fcntl.flock", no)),
    ("file_locks", "lets two hold one lock", patched("fcntl.flock", lambda *_: None)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "reason", "patch"), ABSENT, ids=lambda value: value if isinstance(value, str) else "")
def test_a_thing_that_fails_is_absent_with_its_reason(
    name: str, reason: str, patch: Patch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_lacking = name != "browser" and not capability(name).present  # this machine itself may fail earlier in the probe
    forget()
    monkeypatch.setenv("DISPLAY", ":0")
    with monkeypatch.context() as machine:
        patch(machine, tmp_path)
        found = capability(name)
    assert (found.present, is_lacking or reason in found.detail) == (False, True), found


def test_every_capability_is_forced_absent_here() -> None:
    assert {name for name, _, _ in ABSENT} == set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in notes()])
def test_every_capability_can_be_declared_absent(name: str) -> None:
    with absent(name):
        assert not capability(name).present


@pytest.mark.parametrize("name", ["ptrace", "huge_pages"])
def test_a_note_cannot_be_declared_absent(name: str) -> None:
    with absent(name), pytest.raises(SpecError, match=rf"names {name}, which is for the report .* change nothing"):
        capability("memfd")


@pytest.mark.parametrize("name", NAMES)
def test_every_capability_names_its_fallback_in_one_line(name: str) -> None:
    found = capability(name)
    assert found.fallback
    assert "\n" not in found.detail + found.fallback


@pytest.mark.parametrize("name", NAMES)
def test_every_capability_stands_in_the_documentation(name: str) -> None:
    assert f"`{name}`" in (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def test_probing_leaves_no_descriptor_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for name in NAMES:
        capability(name)
    assert not set(os.listdir("/proc/self/fd")) - before  # others may have been closed meanwhile


def test_shared_memory_without_memfd_is_memory_of_the_size() -> None:
    with absent("memfd"):
        descriptor = open_shared("penstock-test", 8192)
    try:
        assert (os.fstat(descriptor).st_size, os.fstat(descriptor).st_nlink) == (8192, 0)
    finally:
        os.close(descriptor)
