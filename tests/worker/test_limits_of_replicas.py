"""Limits of a replica: control groups where there are any, limits of each process elsewhere, and another user."""

from __future__ import annotations

import dataclasses
import grp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.support.waiting import until
from tests.worker.test_guard_process import Guarded

from penstock.process import cell, proc
from penstock_worker import accounts

MIB = 1 << 20
EATER = "import time\nheld = []\nfor _ in range(512): held.append(b'x' * (1 << 20))\nprint('unbounded', flush=True)"


def missing_groups(controller: str) -> str:
    """Why no control group with a controller can be made here; '' if one can."""
    made = cell.make("probe", cell.Limits(memory_bytes=64 * MIB) if controller == "memory" else cell.Limits(None, 8))
    made.remove()
    return made.missing


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(60)


def test_too_much_memory_is_reported_as_such_with_the_amounts(guarded: Guarded) -> None:
    if missing := missing_groups("memory"):
        pytest.skip(f"needs a control group with memory: {missing}")
    guarded.start("python", "-c", EATER, limits={"memory_bytes": 64 * MIB}, name="eater").wait(60)
    outcome = guarded.outcome()
    assert (outcome["state"], outcome["signal"]) == ("EXITED", 9), guarded.log()
    assert outcome["detail"].startswith("out of memory: 6"), outcome
    assert outcome["detail"].endswith("MiB used, limits.memory is 64 MiB")
    assert "unbounded" not in guarded.log()


def test_memory_of_all_processes_counts_together(guarded: Guarded) -> None:
    if missing := missing_groups("memory"):
        pytest.skip(f"needs a control group with memory: {missing}")
    two = (
        "import os, subprocess, sys; code = 'b = bytearray(40 << 20); import time; time.sleep(20)'; "
        "two = [subprocess.Popen([sys.executable, '-c', code]) for _ in range(2)]; "
        "sys.exit(os.wait()[1] != 0)"  # of the first that ends
    )
    guarded.start("python", "-c", two, limits={"memory_bytes": 64 * MIB}, name="two").wait(60)
    assert guarded.outcome()["detail"].startswith("out of memory: ")


def test_the_group_goes_with_its_replica(guarded: Guarded) -> None:
    if missing := missing_groups("memory"):
        pytest.skip(f"needs a control group with memory: {missing}")
    code = "print([line for line in open('/proc/self/cgroup') if 'penstock-brief' in line])"
    guarded.start("python", "-c", code, limits={"memory_bytes": 256 * MIB}, name="brief").wait(60)
    assert guarded.outcome()["exit_code"] == 0
    assert "penstock-brief" in guarded.log()
    made = cell.make("brief", cell.Limits(memory_bytes=MIB))
    group = made.groups["memory"]
    made.remove()
    assert not group.exists()


def test_group_of_a_killed_guard_is_found_and_removed(guarded: Guarded) -> None:
    if missing := missing_groups("memory"):
        pytest.skip(f"needs a control group with memory: {missing}")
    name = f"killed-{os.getpid()}"
    process = guarded.start("/bin/sh", "-c", "echo up; exec sleep 600", limits={"memory_bytes": 64 * MIB}, name=name)
    until(lambda: guarded.log() == "up\n")
    process.kill()
    process.wait(60)
    left = cell.left_behind(name)
    assert [path.name for path in left.groups.values()] == [f"penstock-{name}"]
    left.remove()
    assert not left.groups["memory"].exists()
    assert cell.left_behind(name).groups == {}


def test_processes_of_a_group_are_bounded(guarded: Guarded) -> None:
    if missing := missing_groups("pids"):
        pytest.skip(f"needs a control group with pids: {missing}")
    code = (
        "import subprocess\ntry:\n  held = [subprocess.Popen(['sleep', '20']) for _ in range(16)]\n"
        "except OSError as error: print('refused', error.errno)\nfor one in held if 'held' in dir() else []: one.kill()"
    )
    guarded.start("python", "-c", code, limits={"processes": 8}, name="forks").wait(60)
    assert "refused 11" in guarded.log()


def test_processor_time_of_a_replica_is_bounded(guarded: Guarded) -> None:
    made = cell.make("probe", cell.Limits(cpus=0.2))
    made.remove()
    if made.missing:
        pytest.skip(f"needs a control group with cpu: {made.missing}")
    code = (
        "import time\n"
        "began, used = time.monotonic(), time.process_time()\n"
        "while time.monotonic() - began < 2: pass\n"
        "print((time.process_time() - used) / (time.monotonic() - began))"
    )
    guarded.start("python", "-c", code, limits={"cpus": 0.2}, name="busy").wait(60)
    assert float(guarded.log()) < 0.4  # a quota of 20 ms in each 100, and what the last period had


def test_open_files_of_a_process_are_bounded(guarded: Guarded) -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    guarded.start("python", "-c", code, limits={"open_files": 64}, name="files").wait(60)
    assert guarded.log().strip() == "(64, 64)"


def test_without_groups_each_process_is_bounded_and_it_is_said(tmp_path: Path) -> None:
    made = cell.make("r", cell.Limits(memory_bytes=64 * MIB), root=tmp_path)
    assert made.note() == (
        "limits hold for each process alone, not for all together: memory: no control groups are mounted"
    )
    eater = subprocess.run(
        [sys.executable, "-c", EATER], preexec_fn=made.enter, capture_output=True, text=True, check=False
    )
    assert "MemoryError" in eater.stderr
    assert made.out_of_memory() == ""


def laid_out(root: Path, group: str, controllers: str, children: str) -> Path:
    """A machine with control groups of version 2, as files."""
    proc, own = root / "proc/self", root / "sys/fs/cgroup" / group
    proc.mkdir(parents=True)
    own.mkdir(parents=True)
    (proc / "cgroup").write_text(f"0::/{group}\n")
    (proc / "mountinfo").write_text("29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.subtree_control").write_text(children)
    return own


def test_version_2_takes_the_limits_and_counts_kills(tmp_path: Path) -> None:
    own = laid_out(tmp_path, "penstock.service", "cpu memory pids", "cpu memory pids")
    made = cell.make("r", cell.Limits(64 * MIB, 32, cpus=1.5), root=tmp_path)
    group = own / "penstock-r"
    assert made.note() == "limits hold by control groups"
    assert {name: (group / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")} == {
        "memory.max": str(64 * MIB), "memory.swap.max": "0", "pids.max": "32", "cpu.max": "150000 100000",
    }  # fmt: skip
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 0\n")
    assert made.out_of_memory() == ""
    (group / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (group / "memory.peak").write_text(f"{64 * MIB}\n")
    assert made.out_of_memory() == "out of memory: 64 MiB used, limits.memory is 64 MiB"


def test_version_2_makes_room_beside_the_leaf_of_the_agent(tmp_path: Path) -> None:
    own = laid_out(tmp_path, f"penstock.service/{cell.LEAF}", "", "")
    (own.parent / "cgroup.controllers").write_text("memory")
    (own.parent / "cgroup.subtree_control").write_text("")
    assert "DelegateSubgroup=penstock-agent" in cell.make("r", cell.Limits(MIB), root=tmp_path).missing
    cell.delegate(tmp_path)
    assert (own.parent / "cgroup.subtree_control").read_text() == "+memory"
    (own.parent / "cgroup.subtree_control").write_text("memory")  # as the kernel shows it
    assert cell.make("r", cell.Limits(MIB), root=tmp_path).groups == {"memory": own.parent / "penstock-r"}


def test_a_replica_of_another_user_reads_its_own_files_alone() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone may become another user")
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-as-"))  # pytest's own folders let no other user in
    try:
        account = accounts.find("nobody")
        accounts.open_way(folder)
        (folder / "node.json").write_text("a token")
        (folder / "node.json").chmod(0o600)
        replica = folder / "replicas" / "r"
        work = replica / "work"
        work.mkdir(parents=True)
        replica.chmod(accounts.WAY)
        (work / "given").write_text("by its snapshot")
        account.own_fresh(work)
        script = (
            "id -un; echo more >> given; touch made; stat -c %U made; cat ../../../node.json; ls ../../..; "
            "grep NoNewPrivs /proc/self/status"
        )
        guarded = Guarded(replica)
        guarded.start("/bin/sh", "-c", script, cwd=str(work), account=asdict(account)).wait(60)
        said = guarded.log()
        assert said.split("\n")[:2] == ["nobody", "nobody"], said
        assert "a token" not in said
        assert said.count("Permission denied") == 2
        assert "NoNewPrivs:\t1" in said
        assert (work / "given").read_text() == "by its snapshotmore\n"
    finally:
        shutil.rmtree(folder)


def test_replica_of_another_user_has_its_supplementary_groups() -> None:
    """Those of the user's, as a login has them, and none of root's."""
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone may become another user")
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-as-"))
    try:
        folder.chmod(accounts.WAY)
        for name in ("nobody", "daemon", "www-data"):
            account = accounts.find(name)
            member_of = {entry.gr_gid for entry in grp.getgrall() if name in entry.gr_mem}
            assert set(account.groups) == {account.gid} | member_of
        account = dataclasses.replace(account, groups=(account.gid, 20))  # such as a user of `dialout`
        guarded = Guarded(folder)
        guarded.start("/usr/bin/id", "-G", cwd="/", account=asdict(account)).wait(60)
        assert sorted(map(int, guarded.log().split())) == sorted({account.gid, 20})
    finally:
        shutil.rmtree(folder)


def test_a_folder_that_is_kept_is_its_users_or_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone may become another user")
    account = accounts.find("nobody")
    victim = tmp_path / "of root"
    victim.mkdir()
    (victim / "shadow").write_text("secret")
    kept = tmp_path / "checkpoints"
    account.keep(kept)
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777) == (account.uid, 0o700)
    (kept / "linked").symlink_to(victim)  # as a process of that user could, at any moment
    os.link(victim / "shadow", kept / "hard")
    account.keep(kept)
    assert [(victim / name).stat().st_uid for name in (".", "shadow")] == [0, 0]
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "of root's").mkdir()
    for name in ("link", "of root's"):
        with pytest.raises(PermissionError, match="chown -R -h nobody"):
            account.keep(tmp_path / name)


def test_what_a_fresh_folder_links_to_is_not_given_away(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone may become another user")
    account = accounts.find("nobody")
    victim, work = tmp_path / "victim", tmp_path / "work"
    (work / "inner").mkdir(parents=True)
    victim.mkdir()
    (victim / "file").write_text("root's")
    (work / "inner" / "linked").symlink_to(victim)
    (work / "given").write_text("")
    account.own_fresh(work)
    assert [path.lstat().st_uid for path in (work, work / "inner", work / "given", work / "inner" / "linked")] == [
        account.uid
    ] * 4
    assert [path.stat().st_uid for path in (victim, victim / "file")] == [0, 0]


def test_a_killed_guard_takes_a_replica_of_another_user_along() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, which alone may become another user")
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-as-"))
    try:
        folder.chmod(accounts.WAY)
        guarded = Guarded(folder)
        process = guarded.start(
            "/bin/sh", "-c", "echo $$; exec sleep 600", cwd="/", account=asdict(accounts.find("nobody"))
        )
        until(lambda: guarded.log().endswith("\n"))
        process.kill()
        process.wait(60)
        pid = int(guarded.log())
        until(lambda: proc.start_ticks(pid) is None, "its end")
    finally:
        shutil.rmtree(folder)


def test_a_user_that_cannot_be_used_is_refused() -> None:
    if os.geteuid() != 0:
        with pytest.raises(ValueError, match="needs an agent that is root"):
            accounts.find("nobody")
        return
    for name, said in (("no-such-user", "there is no user"), ("root", "is root")):
        with pytest.raises(ValueError, match=said):
            accounts.find(name)
