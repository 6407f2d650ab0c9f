"""Readings of the machine itself, and the finding that follows from each. No I/O: `survey` reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.machine.capability import Capability, notes
from penstock.machine.findings import Finding, Level, size

GIB = 1 << 30
LEAST_MEMORY, LITTLE_MEMORY = GIB // 2, 2 * GIB
LITTLE_SHARED_MEMORY = GIB
FEW_FILES = 1024
LEAST_FREE, LITTLE_FREE = 100 << 20, GIB
INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
}
"""Flags of /proc/cpuinfo that decide which kernels torch and oneDNN use, and their usual names."""
_OPTIONAL = ("affinity", "browser", "cgroup")
"""Capabilities whose absence costs nothing worth a warning."""


@dataclass(frozen=True, slots=True)
class Processor:
    """`machine`: as `uname -m`; `flags`: of /proc/cpuinfo."""

    model: str
    machine: str
    flags: frozenset[str]

    def finding(self) -> Finding:
        """Warn where torch has its slowest kernels, or the architecture is one that nothing was tried on."""
        sets = ", ".join(text for flag, text in INSTRUCTION_SETS.items() if flag in self.flags)
        detail = f"{self.model} ({self.machine}): {sets or 'no vector instructions that torch has kernels for'}"
        if self.machine not in ("x86_64", "aarch64"):
            return Finding("processor", "warning", detail, "expected x86_64 or aarch64; see docs/support.md")
        if not {"avx2", "asimd"} & self.flags:
            advice = "jobs train, but several times slower: use a processor with AVX2 or NEON"
            return Finding("processor", "warning", detail, advice)
        return Finding("processor", "ok", detail)


@dataclass(frozen=True, slots=True)
class Cores:
    """`host`: of the machine; `allowed`: of the affinity mask; `quota`: of the control groups."""

    usable: int
    host: int
    allowed: int
    quota: float | None

    def finding(self) -> Finding:
        """Warn of a single core."""
        quota = "no quota" if self.quota is None else f"a quota of {self.quota:g}"
        detail = f"{self.usable} usable: {self.host} in the machine, {self.allowed} in the affinity mask, {quota}"
        if self.usable > 1:
            return Finding("cores", "ok", detail)
        advice = "replicas share one core and gain nothing: raise the container's CPU limit, or use one replica"
        return Finding("cores", "warning", detail, advice)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `host`: of the machine; `available`: that can be taken now."""

    usable: int
    host: int
    available: int

    def finding(self) -> Finding:
        """Judge the memory that a job can have."""
        detail = f"{size(self.usable)} usable, {size(self.available)} of it free; {size(self.host)} in the machine"
        if self.usable < LEAST_MEMORY:
            return Finding("memory", "error", detail, f"torch alone needs {size(LEAST_MEMORY)}: raise the memory limit")
        if self.usable < LITTLE_MEMORY:
            return Finding("memory", "warning", detail, "small models only: raise the memory limit")
        return Finding("memory", "ok", detail)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """/dev/shm. `total` and `free` in bytes; `absent`: why it cannot be used, or empty."""

    total: int
    free: int
    absent: str

    def finding(self) -> Finding:
        """Warn of a size that data loaders of torch overrun."""
        raise_it = "start the container with --shm-size=1g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
        if self.absent:
            return Finding(
                "shared memory", "warning", self.absent, f"data loaders of torch with workers fail: {raise_it}"
            )
        detail = f"/dev/shm has {size(self.total)}, {size(self.free)} free"
        if self.total >= LITTLE_SHARED_MEMORY:
            return Finding("shared memory", "ok", detail)
        need = "Penstock needs none of it, but data loaders of torch with workers end with a bus error"
        return Finding("shared memory", "warning", detail, f"{need}: {raise_it}")


@dataclass(frozen=True, slots=True)
class OpenFiles:
    """Limits of open descriptors; `hard` is what a process may raise its own to. -1: no limit."""

    soft: int
    hard: int

    def finding(self) -> Finding:
        """Warn of a limit that a server with some agents and browsers reaches."""
        soft, hard = (math.inf if limit < 0 else limit for limit in (self.soft, self.hard))
        detail = f"{_number(soft)} at a time, can be raised to {_number(hard)}"
        if soft >= FEW_FILES:
            return Finding("open files", "ok", detail)
        return Finding("open files", "warning", detail, f"ulimit -n {_number(min(hard, 4 * FEW_FILES))}")


def _number(limit: float) -> str:
    return "no limit" if limit == math.inf else str(int(limit))


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a probe."""

    capability: Capability

    def finding(self) -> Finding:
        """Warn of an absence whose fallback is slower."""
        found = self.capability
        name = found.name.replace("_", " ")
        if found.present:
            return Finding(name, "ok", found.detail)
        if found.name in notes():
            return Finding(name, "ok", f"absent: {found.detail}; {found.fallback}")
        level: Level = "ok" if found.name in _OPTIONAL else "warning"
        return Finding(name, level, f"absent: {found.detail}", f"used instead: {found.fallback}")


@dataclass(frozen=True, slots=True)
class Folder:
    """`error`: why nothing can be written there, or empty. `free`: bytes of its file system."""

    name: str
    path: str
    free: int
    error: str
    is_needed: bool
    advice: str

    def finding(self) -> Finding:
        """Judge a folder: one that is needed is an error where it cannot be written."""
        level: Level = "warning"
        if self.error:
            level = "error" if self.is_needed else "warning"
            return Finding(self.name, level, f"{self.path} cannot be written: {self.error}", self.advice)
        detail = f"{self.path}, {size(self.free)} free"
        if self.free >= LITTLE_FREE:
            return Finding(self.name, "ok", detail)
        if self.is_needed and self.free < LEAST_FREE:
            level = "error"
        return Finding(self.name, level, detail, f"free some space, or {self.advice}")


@dataclass(frozen=True, slots=True)
class KernelClock:
    """What the kernel knows of its clock. `is_synchronised`: None where the kernel does not answer."""

    is_synchronised: bool | None
    error_s: float

    def finding(self) -> Finding:
        """Warn of a clock that nothing corrects."""
        if self.is_synchronised is None:
            return Finding("clock", "ok", "the kernel does not report whether it is synchronised")
        if self.is_synchronised:
            return Finding("clock", "ok", f"synchronised, at most {self.error_s:.3g} s off")
        advice = "run chrony or systemd-timesyncd on the host, else times of several hosts do not fit together"
        return Finding("clock", "warning", "the kernel's clock is not synchronised", advice)
