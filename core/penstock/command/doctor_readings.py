"""Readings of what Penstock runs on besides the machine: torch, native libraries, GPUs, port, server. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.machine.capability import Capability
from penstock.machine.findings import Finding, Level


@dataclass(frozen=True, slots=True)
class Torch:
    """`version`: empty if torch cannot be loaded; then `error` holds why. `cuda`: of its build, or empty.

    capability: the instruction set whose kernels torch uses. native: why the native libraries do not load, or empty.
    """

    version: str
    error: str = ""
    cuda: str = ""
    capability: str = ""
    native: str = ""
    is_installed: bool = True

    def finding(self) -> Finding:
        """Judge torch alone."""
        if not self.is_installed:
            advice = "pip install torch where jobs run; a host with the server alone needs none"
            return Finding("torch", "warning", "not installed", advice)
        if not self.version:
            advice = "install a torch that fits this processor and Python (docs/support.md)"
            return Finding("torch", "error", f"cannot be loaded: {self.error}", advice)
        build = f"CUDA {self.cuda}" if self.cuda else "CPU only"
        return Finding("torch", "ok", f"{self.version}, {build}, kernels for {self.capability}")


@dataclass(frozen=True, slots=True)
class Native:
    """The native libraries. `error`: why they do not load with this torch, or empty."""

    torch: str
    error: str

    def finding(self) -> Finding:
        """Judge the libraries."""
        if not self.error:
            return Finding("native libraries", "ok", f"loaded, they match torch {self.torch}")
        return Finding("native libraries", "error", self.error, "python -m penstock.native.build")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels of matrix products. `setting`: PENSTOCK_MATRIX_KERNELS, or empty.

    measured: how many products of this machine's cache run by each kernel.
    """

    setting: str
    probed: tuple[Capability, ...] = ()
    measured: Mapping[str, int] = field(default_factory=dict)

    def finding(self) -> Finding:
        """Name the kernels that may be chosen, why others are not, and what was chosen. Slower is no failure."""
        kernels = [(one.name.partition(".")[2], one) for one in self.probed]
        present = ", ".join(["torch", *(name for name, one in kernels if one.present)])
        left_out = [f"left out {name}: {one.detail}" for name, one in kernels if not one.present]
        detail = "; ".join([f"{present} available", *left_out, self._chosen()])
        if "," in present or self.setting:
            return Finding("matrix kernels", "ok", detail)
        return Finding(
            "matrix kernels", "warning", detail, "nothing must be done: jobs train with torch's kernels alone"
        )

    def _chosen(self) -> str:
        if self.setting not in ("", "auto"):
            return f"PENSTOCK_MATRIX_KERNELS={self.setting}, nothing is measured"
        if not self.measured:
            return "none measured yet"
        chosen = ", ".join(f"{kernel} {count}" for kernel, count in self.measured.items())
        return f"{sum(self.measured.values())} products measured: {chosen}"


@dataclass(frozen=True, slots=True)
class Libraries:
    """What else of the libraries changes the speed, on a line of its own: threads, MKL's vendor check, OpenSSL."""

    name: str
    probed: tuple[Capability, ...]

    def finding(self) -> Finding:
        """Name what is set. An absence follows from the build of torch or Python, and nothing needs to be done."""
        shown = [(one.name.partition(".")[2].replace("_", " "), one) for one in self.probed]
        texts = [f"{name}: {one.detail if one.present else self._absent(one)}" for name, one in shown]
        return Finding(self.name, "ok", "; ".join(texts))

    @staticmethod
    def _absent(one: Capability) -> str:
        return f"absent: {one.detail} ({one.fallback})"


@dataclass(frozen=True, slots=True)
class Gpus:
    """`installed`: devices that the driver lists; `visible`: names that torch sees; `driver`: its version."""

    installed: int
    driver: str
    visible: tuple[str, ...]
    torch_has_cuda: bool

    def finding(self) -> Finding:
        """Warn of devices that torch does not see."""
        if not self.installed and not self.visible:
            return Finding("GPU", "ok", "none")
        detail = f"{len(self.visible)} of {self.installed} visible to torch ({', '.join(self.visible) or 'none'})"
        detail += f", driver {self.driver or 'unknown'}"
        if self.visible:
            return Finding("GPU", "ok", detail)
        advice = "check CUDA_VISIBLE_DEVICES and the driver" if self.torch_has_cuda else "install a torch with CUDA"
        return Finding("GPU", "warning", detail, advice)


@dataclass(frozen=True, slots=True)
class Port:
    """The port of `penstock up`. `taken`: why it cannot be listened at, or empty; `is_ours`: a known server has it."""

    number: int
    taken: str
    is_ours: bool

    def finding(self) -> Finding:
        """Warn of a port that something else has."""
        if not self.taken:
            return Finding("port", "ok", f"{self.number} is free")
        if self.is_ours:
            return Finding("port", "ok", f"{self.number} is the known server's")
        return Finding("port", "warning", f"{self.number}: {self.taken}", "penstock up --port 0 takes any free port")


@dataclass(frozen=True, slots=True)
class Server:
    """`url`: empty if no server is known. `error`: why it did not answer. `is_asked_for`: by option or environment."""

    url: str
    version: str
    own_version: str
    error: PenstockError | None
    is_asked_for: bool

    def finding(self) -> Finding:
        """Judge the server: one that was named has to answer."""
        if not self.url:
            return Finding("server", "ok", "none is known; 'penstock up' starts one")
        if self.error is not None:
            level: Level = "error" if self.is_asked_for else "warning"
            advice = "check --url, --token and the network; 'penstock up' starts a server here"
            return Finding("server", level, f"{self.url}: {_first_line(self.error)}", advice)
        if self.version != self.own_version:
            detail = f"{self.url} runs version {self.version}, this is {self.own_version}"
            return Finding("server", "warning", detail, "install the same version on both")
        return Finding("server", "ok", f"{self.url}, version {self.version}")


def _first_line(error: PenstockError) -> str:
    return str(error).partition("\n")[0]
