"""Limits of control groups, version 1 and 2: of this process's group and of every group above it.

Reads /proc/self/mountinfo, /proc/self/cgroup and the groups' files below `root`, which is `/` except in tests. A group
whose path lies outside what is mounted (a container that sees its own group as the root) is read at the mount point.
Raises ValueError for a file that holds no limit, OSError for one that cannot be read; a missing file is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from penstock.machine.capability import Absent, capability, probe

ROOT = Path("/")
_UNLIMITED_BYTES = 1 << 62  # version 1 writes 2^63 less a page for "no limit"


@dataclass(frozen=True, slots=True)
class Limits:
    """The tightest limits. `cores`: of processor time, fractions included. None: no limit.

    version: "1" or "2" of the hierarchies, "1, 2" where both are mounted. used_bytes: memory of the group that has the
    limit, without file pages that the kernel can drop.
    """

    version: str
    cores: float | None
    memory_bytes: int | None
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    version: str
    controllers: frozenset[str]
    own: Path  # the folder of this process's group
    top: Path  # where the hierarchy is mounted


def limits(root: Path = ROOT) -> Limits | None:
    """Return the limits of this process; None where there are none, or where they cannot be made sense of."""
    if root == ROOT and not capability("cgroup").present:
        return None
    try:
        return read_limits(root)
    except (OSError, ValueError):  # changed after the probe; the machine's own numbers are used
        return None


def read_limits(root: Path = ROOT) -> Limits | None:
    """Return the limits of this process, or None where no control groups are mounted."""
    hierarchies = list(_hierarchies(root))
    if not hierarchies:
        return None
    cores = [found for h in hierarchies for group in _groups(h) if (found := _cores(h, group)) is not None]
    memory = [(found, h, group) for h in hierarchies for group in _groups(h) if (found := _memory(h, group))]
    tightest = min(memory, key=lambda found: found[0], default=None)
    return Limits(
        version=", ".join(sorted({h.version for h in hierarchies})),
        cores=min(cores, default=None),
        memory_bytes=None if tightest is None else tightest[0],
        used_bytes=None if tightest is None else _used(tightest[1], tightest[2]),
    )


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    """Yield those that may hold limits of processor time or memory."""
    paths = _own_paths(root)
    try:
        mounts = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        mounted, point = (_unescaped(field) for field in before.split(" ")[3:5])
        version = "2" if kind == "cgroup2" else "1"
        controllers = frozenset({"cpu", "memory"} & set(options.split(","))) if version == "1" else frozenset[str]()
        if version == "1" and not controllers:
            continue
        path = paths.get("" if version == "2" else next(iter(controllers)), "/")
        top = root / point.lstrip("/")
        yield _Hierarchy(version, controllers, _below(top, mounted, path), top)


def _own_paths(root: Path) -> dict[str, str]:
    """Return the path of this process's group by controller; "" names the hierarchy of version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    fields = (line.split(":", 2) for line in lines if line.count(":") >= 2)
    return {name: path for _, names, path in fields for name in names.split(",")}


def _below(top: Path, mounted: str, path: str) -> Path:
    """Return the folder of a group, or the mount point if the group is not below what is mounted."""
    try:
        inside = PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return top
    found = top / inside
    return found if ".." not in inside.parts and found.is_dir() else top


def _groups(hierarchy: _Hierarchy) -> Iterator[Path]:
    """Yield the own group and those above it, as far as they are mounted."""
    group = hierarchy.own
    while True:
        yield group
        if group == hierarchy.top:
            return
        group = group.parent


def _cores(hierarchy: _Hierarchy, group: Path) -> float | None:
    if hierarchy.version == "2":
        text = _text(group / "cpu.max")
        quota, _, period = (text or "max").partition(" ")
        return None if quota == "max" else _quotient(quota, period or "100000", group / "cpu.max")
    quota_text = _text(group / "cpu.cfs_quota_us") if "cpu" in hierarchy.controllers else None
    if quota_text is None or int(quota_text) < 0:
        return None
    return _quotient(quota_text, _text(group / "cpu.cfs_period_us") or "100000", group / "cpu.cfs_quota_us")


def _quotient(quota: str, period: str, file: Path) -> float:
    if int(quota) <= 0 or int(period) <= 0:
        raise ValueError(f"{file} says {quota} of {period} µs; expected both above 0")
    return int(quota) / int(period)


def _memory(hierarchy: _Hierarchy, group: Path) -> int | None:
    if hierarchy.version == "2":
        text = _text(group / "memory.max")
    else:
        text = _text(group / "memory.limit_in_bytes") if "memory" in hierarchy.controllers else None
    if text is None or text == "max":
        return None
    if int(text) <= 0:
        raise ValueError(f"the memory limit of {group} is {text}; expected bytes above 0")
    return None if int(text) >= _UNLIMITED_BYTES else int(text)


def _used(hierarchy: _Hierarchy, group: Path) -> int | None:
    text = _text(group / ("memory.current" if hierarchy.version == "2" else "memory.usage_in_bytes"))
    if text is None:
        return None
    droppable = "inactive_file" if hierarchy.version == "2" else "total_inactive_file"
    stat = dict(line.split(" ", 1) for line in (_text(group / "memory.stat") or "").splitlines() if " " in line)
    return max(0, int(text) - int(stat.get(droppable, "0")))


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def _unescaped(field: str) -> str:
    """Return a field of mountinfo, in which blanks are octal."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


@probe("cgroup", fallback="cores and memory of the whole machine")
def _cgroup() -> str:
    found = read_limits()
    if found is None:
        raise Absent("no control groups are mounted")
    cores = "cores not limited" if found.cores is None else f"cores limited to {found.cores:g}"
    memory = "memory not limited" if found.memory_bytes is None else f"memory to {found.memory_bytes >> 20} MiB"
    return f"version {found.version}: {cores}, {memory}"
