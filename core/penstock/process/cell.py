"""Limits of a replica: a control group of its own where this process may make one, else limits of each process.

A control group bounds all processes of the replica together, and counts kills for lack of memory. It is made beside the
group of this process: of version 1 below it; of version 2 below it, or beside it if it is the leaf `LEAF` of a
delegated group (a group with processes gives no controllers to others). Without one, memory is bounded by RLIMIT_DATA
and processes by RLIMIT_NPROC, which is of the user and does not bind root; processor time is not bounded then. Standard
library only.

Raises nothing for a machine without control groups: `Cell.missing` says what does not hold.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")
LEAF = "penstock-agent"
CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_REMOVED_S, _AGAIN_S = 2.0, 0.02
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one replica. `memory_bytes`, `processes`: of all its processes together; `open_files`: of each.

    `cpus`: processor time of all its processes together, in seconds a second.
    """

    memory_bytes: int | None = None
    processes: int | None = None
    open_files: int | None = None
    cpus: float | None = None

    @property
    def of_groups(self) -> dict[str, float]:
        """Return what a control group can hold, by controller."""
        found = {"memory": self.memory_bytes, "pids": self.processes, "cpu": self.cpus}
        return {name: limit for name, limit in found.items() if limit is not None}


@dataclass(slots=True)
class Cell:
    """`groups`: the control group of a replica in the hierarchy of each controller; `version` of each."""

    limits: Limits
    groups: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: str = ""

    def note(self) -> str:
        """Describe what holds; '' without limits."""
        if self.limits == Limits():
            return ""
        if not self.missing:
            return "limits hold by control groups" if self.groups else "limits hold for each process"
        unbounded = "" if self.limits.cpus is None or "cpu" in self.groups else "; processor time is not bounded"
        return f"limits hold for each process alone, not for all together: {self.missing}{unbounded}"

    def enter(self) -> None:
        """Put the calling process under the limits: between fork and exec. Raises OSError."""
        for group in set(self.groups.values()):
            (group / "cgroup.procs").write_text("0", encoding="ascii")
        for kind, limit in self._of_process():
            _, hard = resource.getrlimit(kind)
            least = limit if hard == resource.RLIM_INFINITY or os.geteuid() == 0 else min(limit, hard)
            resource.setrlimit(kind, (least, least))

    def _of_process(self) -> Iterator[tuple[int, int]]:
        limits = self.limits
        if limits.open_files is not None:
            yield resource.RLIMIT_NOFILE, limits.open_files
        if limits.memory_bytes is not None and "memory" not in self.groups:
            yield resource.RLIMIT_DATA, limits.memory_bytes
        if limits.processes is not None and "pids" not in self.groups:
            yield resource.RLIMIT_NPROC, limits.processes

    def out_of_memory(self) -> str:
        """Describe that the kernel ended a process here for lack of memory, with the amounts; '' if it did not."""
        group = self.groups.get("memory")
        if group is None or self.limits.memory_bytes is None:
            return ""
        is_new = self.versions["memory"] == "2"
        kills = _fields(group / ("memory.events" if is_new else "memory.oom_control")).get("oom_kill", 0)
        if not kills:
            return ""
        peak = _number(group / ("memory.peak" if is_new else "memory.max_usage_in_bytes"))
        used = "" if peak is None else f"{peak / _MIB:.0f} MiB used, "
        return f"out of memory: {used}limits.memory is {self.limits.memory_bytes / _MIB:.0f} MiB"

    def remove(self) -> None:
        """Remove the groups; the last process may need a moment to leave."""
        for group in set(self.groups.values()):
            give_up_at = time.monotonic() + _REMOVED_S
            while group.exists() and time.monotonic() < give_up_at:
                try:
                    group.rmdir()
                except OSError:
                    time.sleep(_AGAIN_S)


def left_behind(name: str, root: Path = ROOT) -> Cell:
    """Return the cell of a replica whose guard has ended without removing it, with the groups that are there.

    Called by a process beside that guard: groups are made beside the group of the process that makes them.
    """
    cell = Cell(Limits())
    for controller in CONTROLLERS:
        with suppress(OSError):
            version, parent = _parent(controller, root)
            if (group := parent / f"penstock-{name}").is_dir():
                cell.groups[controller], cell.versions[controller] = group, version
    return cell


def make(name: str, limits: Limits, root: Path = ROOT) -> Cell:
    """Return the cell of a replica, with groups as far as they can be made."""
    cell, wrong = Cell(limits), []
    for controller, limit in limits.of_groups.items():
        try:
            version, parent = _parent(controller, root)
            group = parent / f"penstock-{name}"
            group.mkdir(mode=0o755, exist_ok=True)
            cell.groups[controller], cell.versions[controller] = group, version
            _bound(group, version, controller, limit)
        except OSError as error:
            unused = cell.groups.pop(controller, None)
            if unused is not None and unused not in cell.groups.values():
                with suppress(OSError):
                    unused.rmdir()
            wrong.append(f"{controller}: {error.strerror or error}")
    cell.missing = "; ".join(wrong)
    return cell


def _bound(group: Path, version: str, controller: str, limit: float) -> None:
    if controller == "pids":
        _write(group / "pids.max", limit)
    elif controller == "cpu":
        _bound_cpus(group, version, limit)
    elif version == "2":
        _write(group / "memory.max", limit)
        with suppress(OSError):  # a kernel without swap accounting, or without the second
            _write(group / "memory.swap.max", 0)
            _write(group / "memory.oom.group", 1)
    else:
        _write(group / "memory.limit_in_bytes", limit)
        with suppress(OSError):
            _write(group / "memory.memsw.limit_in_bytes", limit)


def _bound_cpus(group: Path, version: str, cpus: float) -> None:
    quota_us = max(1_000, round(cpus * _PERIOD_US))  # the kernel takes no less
    if version == "2":
        _write(group / "cpu.max", f"{quota_us} {_PERIOD_US}")
    else:
        _write(group / "cpu.cfs_period_us", _PERIOD_US)
        _write(group / "cpu.cfs_quota_us", quota_us)


def delegate(root: Path = ROOT) -> None:
    """Let groups of version 2 beside this process's own have controllers, if it is the leaf `LEAF`.

    Nothing changes elsewhere, or where this may not be done. The process does not move itself into a leaf: systemd
    could not start it a second time while its replicas run on.
    """
    own = _own(root, "")
    if own is None or own.name != LEAF:
        return
    for controller in sorted(set(CONTROLLERS) & set(_words(own.parent / "cgroup.controllers"))):
        with suppress(OSError):
            (own.parent / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")


def _parent(controller: str, root: Path) -> tuple[str, Path]:
    """Return the version and the folder in which a group with a controller can be made. Raises OSError."""
    old = _own(root, controller)
    if old is not None:
        return "1", old
    own = _own(root, "")
    if own is None:
        raise OSError("no control groups are mounted")
    folder = own.parent if own.name == LEAF else own
    if controller in _words(folder / "cgroup.subtree_control"):
        return "2", folder
    raise OSError(
        "the group of the agent gives it to none below (systemd: Delegate=yes and DelegateSubgroup=penstock-agent)"
    )


def _own(root: Path, controller: str) -> Path | None:
    """Return the folder of this process's group: in the hierarchy of a controller, or of version 2 ('')."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, names, path = line.split(":", 2)
            if (controller in names.split(",")) if controller else not names:
                top = _mounted(root, controller)
                return None if top is None else _below(top, path)
    return None


def _mounted(root: Path, controller: str) -> Path | None:
    for line in (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if (kind == "cgroup" and controller in options.split(",")) if controller else kind == "cgroup2":
            return root / before.split(" ")[4].lstrip("/")
    return None


def _below(top: Path, path: str) -> Path:
    inner = top / path.lstrip("/")
    return inner if inner.is_dir() else top  # a container that sees its own group as the root


def _write(path: Path, value: float | str) -> None:
    path.write_text(str(value), encoding="ascii")


def _words(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="ascii").split()
    return []


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def _fields(path: Path) -> dict[str, int]:
    found = {}
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, value = line.split()
            found[name] = int(value)
    return found
