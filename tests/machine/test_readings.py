"""Which level each reading of a machine gets, and that what is not ok has something to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from penstock.command.doctor_readings import Gpus, Kernels, Libraries, Native, Port, Server, Torch
from penstock.errors import Unavailable
from penstock.machine import survey
from penstock.machine.capability import Capability
from penstock.machine.findings import Finding, Level, MachineReading, to_mend, worst
from penstock.machine.readings import Cores, Folder, KernelClock, Memory, OpenFiles, Probed, Processor, SharedMemory

MIB, GIB = 1 << 20, 1 << 30
X86 = frozenset({"sse2", "avx2"})


def folder(*, free: int = GIB, error: str = "", is_needed: bool = False) -> Folder:
    return Folder("a folder", "/there", free, error, is_needed=is_needed, advice="take another one")


def kernels(*present: bool, setting: str = "", measured: dict[str, int] | None = None) -> Kernels:
    names = ("matrix.onednn", "matrix.onednn_matmul")
    probed = tuple(Capability(n, p, "why", "torch's") for n, p in zip(names, present, strict=True))
    return Kernels(setting, probed, measured or {})


def server(version: str = "1", *, failed: bool = False, asked: bool = False, url: str = "http://there") -> Server:
    return Server(url, version, "1", Unavailable("no answer\nat all") if failed else None, is_asked_for=asked)


READINGS: list[tuple[MachineReading, Level, str]] = [
    (Processor("EPYC", "x86_64", X86 | {"avx512f", "amx_tile"}), "ok", "EPYC (x86_64): AVX2, AVX-512, AMX"),
    (Processor("Xeon", "x86_64", frozenset({"sse2"})), "warning", "no vector instructions"),
    (Processor("Grace", "aarch64", frozenset({"asimd", "sve"})), "ok", "NEON, SVE"),
    (Processor("Power", "ppc64le", frozenset()), "warning", "ppc64le"),
    (Cores(2, 64, 64, 1.5), "ok", "2 usable: 64 in the machine, 64 in the affinity mask, a quota of 1.5"),
    (Cores(1, 2, 2, 1.0), "warning", "a quota of 1"),
    (Memory(16 * GIB, 64 * GIB, 8 * GIB), "ok", "16.0 GiB usable, 8.0 GiB of it free; 64.0 GiB in the machine"),
    (Memory(GIB, 64 * GIB, 0), "warning", "1.0 GiB usable"),
    (Memory(256 * MIB, 64 * GIB, 0), "error", "256 MiB usable"),
    (SharedMemory(GIB, GIB, ""), "ok", "/dev/shm has 1.0 GiB"),
    (SharedMemory(64 * MIB, 60 * MIB, ""), "warning", "/dev/shm has 64 MiB, 60 MiB free"),
    (SharedMemory(0, 0, "/dev/shm cannot be used"), "warning", "/dev/shm cannot be used"),
    (OpenFiles(1024, -1), "ok", "1024 at a time, can be raised to no limit"),
    (OpenFiles(-1, -1), "ok", "no limit at a time"),
    (OpenFiles(256, 512), "warning", "256 at a time, can be raised to 512"),
    (Probed(Capability("memfd", True, "works", "a file")), "ok", "works"),
    (Probed(Capability("memfd", False, "blocked", "a file")), "warning", "absent: blocked"),
    (Probed(Capability("browser", False, "no display", "the address")), "ok", "absent: no display"),
    (Probed(Capability("ptrace", False, "scope 3", "no gdb")), "ok", "absent: scope 3; no gdb"),
    (folder(), "ok", "/there, 1.0 GiB free"),
    (folder(free=500 * MIB, is_needed=True), "warning", "500 MiB free"),
    (folder(free=50 * MIB, is_needed=True), "error", "50 MiB free"),
    (folder(free=50 * MIB), "warning", "50 MiB free"),
    (folder(error="read-only"), "warning", "/there cannot be written: read-only"),
    (folder(error="read-only", is_needed=True), "error", "/there cannot be written: read-only"),
    (KernelClock(True, 0.002), "ok", "at most 0.002 s off"),
    (KernelClock(False, 16.0), "warning", "not synchronised"),
    (KernelClock(None, 0.0), "ok", "does not report"),
    (Torch("2.13.0", cuda="12.8", capability="AVX2"), "ok", "2.13.0, CUDA 12.8, kernels for AVX2"),
    (Torch("", is_installed=False), "warning", "not installed"),
    (Torch("", "loading it ended with SIGILL"), "error", "cannot be loaded: loading it ended with SIGILL"),
    (Native("2.13.0", ""), "ok", "they match torch 2.13.0"),
    (Native("2.13.0", "built with torch 2.12"), "error", "built with torch 2.12"),
    (kernels(True, True), "ok", "torch, onednn, onednn_matmul available; none measured yet"),
    (kernels(True, False), "ok", "left out onednn_matmul: why"),
    (kernels(True, True, measured={"torch": 3, "onednn": 12}), "ok", "15 products measured: torch 3, onednn 12"),
    (Libraries("threads", (Capability("threads.mkl", False, "why", "fewer"),)), "ok", "mkl: absent: why (fewer)"),
    (kernels(True, True, setting="auto"), "ok", "none measured yet"),
    (kernels(False, False), "warning", "torch available; left out onednn: why"),
    (kernels(False, False, setting="torch"), "ok", "PENSTOCK_MATRIX_KERNELS=torch"),
    (Gpus(0, "", (), torch_has_cuda=False), "ok", "none"),
    (Gpus(2, "570.1", ("H200", "H200"), torch_has_cuda=True), "ok", "2 of 2 visible to torch (H200, H200), driver 570"),
    (Gpus(2, "570.1", (), torch_has_cuda=False), "warning", "0 of 2 visible"),
    (Port(7080, "", is_ours=False), "ok", "7080 is free"),
    (Port(7080, "in use", is_ours=True), "ok", "7080 is the known server's"),
    (Port(7080, "in use", is_ours=False), "warning", "7080: in use"),
    (server(url=""), "ok", "none is known"),
    (server(), "ok", "http://there, version 1"),
    (server("2"), "warning", "runs version 2, this is 1"),
    (server(failed=True), "warning", "http://there: no answer"),
    (server(failed=True, asked=True), "error", "http://there: no answer"),
]  # fmt: skip


@pytest.mark.parametrize(("reading", "level", "text"), READINGS)
def test_a_reading_has_a_level_and_says_what_was_read(reading: MachineReading, level: Level, text: str) -> None:
    found = reading.finding()
    assert (found.level, text in found.detail, "\n" in found.detail) == (level, True, False), found


@pytest.mark.parametrize("reading", [r for r, level, _ in READINGS if level != "ok"])
def test_what_is_not_ok_says_what_to_do(reading: MachineReading) -> None:
    assert reading.finding().advice


def test_the_worst_level_is_that_of_the_report() -> None:
    ok, warning, error = (Finding("x", level, "") for level in ("ok", "warning", "error"))
    assert [worst([]), worst([ok]), worst([warning, ok]), worst([ok, error, warning])] == [
        "ok", "ok", "warning", "error",
    ]  # fmt: skip


def test_what_is_ok_needs_no_mending() -> None:
    ok, warning = Finding("x", "ok", ""), Finding("y", "warning", "")
    assert to_mend([ok, warning]) == (warning,)


def test_a_machine_without_proc_is_surveyed(tmp_path: Path) -> None:
    names = [found.name for found in survey.findings_of_machine(tmp_path)]
    assert names[:5] == ["processor", "cores", "memory", "shared memory", "open files"]


def test_a_quota_of_one_core_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    (cores,) = (found for found in survey.findings_of_machine(tmp_path) if found.name == "cores")
    assert (cores.level, "1 usable" in cores.detail, "a quota of 1" in cores.detail) == ("warning", True, True)


def test_a_state_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = survey.read_state_folder(tmp_path / "file" / "state", advice="another one").finding()
    assert (found.level, "Not a directory" in found.detail) == ("error", True)


def test_a_full_disk_under_the_state_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    found = survey.read_state_folder(tmp_path / "new", advice="another one").finding()
    assert (found.level, "No space left on device" in found.detail) == ("error", True)


def test_a_kernel_that_does_not_answer_leaves_the_clock_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert survey.read_clock() == KernelClock(None, 0.0)
