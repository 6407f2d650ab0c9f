"""Limits of control groups: both versions, own group and those above, containers; read below a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.machine import cgroup, cores, memory
from penstock.machine.capability import capability, forget

V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw"
V1_CPU = "33 25 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "34 25 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
MIB = 1 << 20


class Machine:
    """A root folder with mounts, this process's groups, and their files."""

    def __init__(self, root: Path, mounts: list[str], groups: str) -> None:
        self.root = root
        own = root / "proc/self"
        own.mkdir(parents=True)
        (own / "mountinfo").write_text("\n".join(["25 1 8:1 / / rw - ext4 /dev/root rw", *mounts, ""]))
        (own / "cgroup").write_text(groups)

    def group(self, path: str, **files: str) -> Machine:
        """Add a group; `_` of a file's name stands for a dot where it comes first."""
        folder = self.root / "sys/fs/cgroup" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(text + "\n")
        return self


@pytest.fixture
def v2(tmp_path: Path) -> Machine:
    return Machine(tmp_path, [V2], "0::/jobs/one\n").group("/jobs/one")


@pytest.fixture
def v1(tmp_path: Path) -> Machine:
    mounts = [V1_CPU.format(root="/"), V1_MEMORY.format(root="/")]
    return Machine(tmp_path, mounts, "4:cpu,cpuacct:/jobs/one\n3:memory:/jobs/one\n1:name=systemd:/x\n0::/\n")


def test_the_own_group_limits(v2: Machine) -> None:
    v2.group("/jobs/one", cpu_max="150000 100000", memory_max=str(64 * MIB), memory_current=str(9 * MIB))
    assert cgroup.read_limits(v2.root) == cgroup.Limits("2", 1.5, 64 * MIB, 9 * MIB)


def test_the_tightest_limit_of_the_groups_above_holds(v2: Machine) -> None:
    v2.group("/jobs/one", cpu_max="400000 100000", memory_max="max")
    v2.group("/jobs", cpu_max="100000 100000", memory_max=str(512 * MIB))
    found = cgroup.read_limits(v2.root)
    assert found is not None
    assert (found.cores, found.memory_bytes) == (1.0, 512 * MIB)


def test_max_is_no_limit(v2: Machine) -> None:
    v2.group("/jobs/one", cpu_max="max 100000", memory_max="max")
    assert cgroup.read_limits(v2.root) == cgroup.Limits("2", None, None, None)


def test_a_group_without_files_is_no_limit(v2: Machine) -> None:
    assert cgroup.read_limits(v2.root) == cgroup.Limits("2", None, None, None)


def test_version_1_limits_by_its_own_files(v1: Machine) -> None:
    v1.group("/cpu,cpuacct/jobs/one", cpu_cfs_quota_us="250000", cpu_cfs_period_us="100000")
    v1.group("/memory/jobs/one", memory_limit_in_bytes=str(256 * MIB), memory_usage_in_bytes=str(5 * MIB))
    assert cgroup.read_limits(v1.root) == cgroup.Limits("1", 2.5, 256 * MIB, 5 * MIB)


def test_version_1_writes_no_limit_as_numbers(v1: Machine) -> None:
    v1.group("/cpu,cpuacct/jobs/one", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    v1.group("/memory/jobs/one", memory_limit_in_bytes="9223372036854771712")
    assert cgroup.read_limits(v1.root) == cgroup.Limits("1", None, None, None)


def test_version_1_parents_limit_too(v1: Machine) -> None:
    v1.group("/cpu,cpuacct/jobs/one", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    v1.group("/cpu,cpuacct/jobs", cpu_cfs_quota_us="50000", cpu_cfs_period_us="100000")
    found = cgroup.read_limits(v1.root)
    assert found is not None
    assert found.cores == 0.5


def test_a_container_reads_its_group_at_the_mount_point(tmp_path: Path) -> None:
    mounts = [V1_CPU.format(root="/docker/abc")]
    machine = Machine(tmp_path, mounts, "4:cpu,cpuacct:/docker/abc\n")
    machine.group("/cpu,cpuacct", cpu_cfs_quota_us="100000", cpu_cfs_period_us="100000")
    found = cgroup.read_limits(tmp_path)
    assert found is not None
    assert found.cores == 1.0


def test_a_group_below_that_of_a_container_limits_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [V1_CPU.format(root="/docker/abc")], "4:cpu,cpuacct:/docker/abc/job\n")
    machine.group("/cpu,cpuacct/job", cpu_cfs_quota_us="50000", cpu_cfs_period_us="100000")
    found = cgroup.read_limits(tmp_path)
    assert found is not None
    assert found.cores == 0.5


def test_a_path_outside_the_mount_is_read_at_the_mount_point(tmp_path: Path) -> None:
    machine = Machine(tmp_path, [V2], "0::/../../elsewhere\n").group("/", cpu_max="100000 100000")
    found = cgroup.read_limits(machine.root)
    assert found is not None
    assert found.cores == 1.0


def test_pages_that_the_kernel_can_drop_are_not_used_memory(v2: Machine) -> None:
    v2.group("/jobs/one", memory_max="4096", memory_current="4000", memory_stat="anon 900\ninactive_file 3000")
    found = cgroup.read_limits(v2.root)
    assert found is not None
    assert found.used_bytes == 1000


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    assert cgroup.read_limits(Machine(tmp_path, [], "").root) is None


def test_a_machine_without_proc_has_none(tmp_path: Path) -> None:
    assert cgroup.read_limits(tmp_path) is None


@pytest.mark.parametrize(
    "files",
    [{"cpu_max": "0 100000"}, {"cpu_max": "many 100000"}, {"memory_max": "-5"}, {"memory_max": "0"}],
    ids=str,
)
def test_a_limit_that_cannot_be_is_refused(v2: Machine, files: dict[str, str]) -> None:
    v2.group("/jobs/one", **files)
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        cgroup.read_limits(v2.root)


def test_a_limit_that_cannot_be_is_ignored_in_use(v2: Machine) -> None:
    v2.group("/jobs/one", cpu_max="0 100000", memory_max="0")
    assert (cores.usable_cores(v2.root), memory.usable_bytes(v2.root)) == (
        len(cores.core_numbers()),
        memory.physical_bytes(),
    )


@pytest.mark.parametrize(("quota", "expected"), [("20000", 1), ("100000", 1), ("150000", 2), ("6400000", 4)])
def test_a_quota_counts_as_whole_cores(v2: Machine, quota: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 4, 5})
    v2.group("/jobs/one", cpu_max=f"{quota} 100000")
    assert cores.usable_cores(v2.root) == expected


def test_memory_is_that_of_the_tightest_limit(v2: Machine) -> None:
    v2.group("/jobs/one", memory_max=str(64 * MIB), memory_current=str(MIB))
    assert (memory.usable_bytes(v2.root), memory.used_bytes(17, v2.root)) == (64 * MIB, MIB)


def test_a_limit_above_the_machine_counts_as_none(v2: Machine) -> None:
    v2.group("/jobs/one", memory_max=str(2 * memory.physical_bytes()), memory_current=str(MIB))
    assert (memory.usable_bytes(v2.root), memory.used_bytes(17, v2.root)) == (memory.physical_bytes(), 17)


def test_without_affinity_all_cores_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    forget()
    try:
        assert (capability("affinity").present, cores.core_numbers()) == (False, (0, 1, 2))
    finally:
        forget()
