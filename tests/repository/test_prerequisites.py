"""What a machine lacks is named, with the package that brings it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "prerequisites.sh"
EMULATOR = f"qemu-{platform.machine()}"
SYSTEM = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge", "ip": "iproute2",
    "nft": "nftables", "systemd-analyze": "systemd",
}  # fmt: skip
"""The programs of Slurm, of network namespaces and of systemd, with their packages, in the order of the script."""
BASE = ("bash", "env", "id", "python3", "g++", "make", "node", "npm")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder that stands for PATH and holds what `make setup` needs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in BASE:
        link(folder, name)
    return folder


def link(folder: Path, name: str) -> None:
    # not what PATH calls python3, which may be a shim or this virtual environment
    target = f"{sys.base_prefix}/bin/python3" if name == "python3" else shutil.which(name)
    assert target is not None, f"this machine has no {name}"
    # a wrapper, not a link: an interpreter finds its installation by its own path
    stub(folder, name, f'exec {target} "$@"')


def stub(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def check(mode: str, programs: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash is not None
    environment = {"PATH": str(programs), "PENSTOCK_PG_ROOT": str(programs / "none"), **environ}
    environment.setdefault("PENSTOCK_SBIN", str(programs / "none"))
    return subprocess.run([bash, str(SCRIPT), mode], check=False, capture_output=True, text=True, env=environment)


def test_a_complete_machine_passes_in_silence(programs: Path) -> None:
    done = check("build", programs)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("program", "package"),
    [("g++", "g++"), ("make", "make"), ("node", "nodejs"), ("npm", "npm"), ("python3", "python3")],
)
def test_a_missing_program_is_named_with_its_package(programs: Path, program: str, package: str) -> None:
    (programs / program).unlink()
    done = check("build", programs)
    assert done.returncode == 1
    assert f"(Debian package: {package})" in done.stderr
    assert f"apt-get install {package}\n" in done.stderr


def test_everything_missing_is_named_at_once(programs: Path) -> None:
    for name in ("g++", "npm"):
        (programs / name).unlink()
    assert "apt-get install g++ npm\n" in check("build", programs).stderr


def test_an_old_node_is_named_with_its_version(programs: Path) -> None:
    stub(programs, "node", "echo v18.19.0")
    done = check("build", programs)
    assert done.returncode == 1
    assert "Node.js 20 or newer (found: v18.19.0" in done.stderr


def test_an_old_python_is_named_with_its_version(programs: Path) -> None:
    stub(programs, "python3", '[ "$1" = --version ] && echo Python 3.9.2 || exit 1')
    done = check("build", programs)
    assert done.returncode == 1
    assert "Python 3.11 or newer (found: Python 3.9.2)" in done.stderr


def test_a_newer_python_beside_an_old_one_is_found(programs: Path) -> None:
    (programs / "python3").rename(programs / "python3.12")
    stub(programs, "python3", "exit 1")
    assert check("python", programs).stdout == "python3.12\n"


def test_tests_want_a_browser_a_database_slurm_and_an_emulator(programs: Path) -> None:
    stub(programs, "id", "echo 1000")  # not root: nothing is installed
    done = check("test", programs)
    assert done.returncode == 1
    assert f"apt-get install chromium postgresql {' '.join(SYSTEM.values())} qemu-user\n" in done.stderr


def test_tests_find_them_where_the_environment_says(programs: Path, tmp_path: Path) -> None:
    stub(tmp_path, "my-browser", "true")
    stub(tmp_path, "initdb", "true")
    for name in (EMULATOR, *SYSTEM):
        stub(programs, name, "true")
    done = check("test", programs, PENSTOCK_CHROMIUM=str(tmp_path / "my-browser"), PENSTOCK_PG_BIN=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_root_with_apt_gets_them_installed(programs: Path) -> None:
    """A stand-in for apt-get leaves the programs where the real one would."""
    stub(programs, "id", "echo 0")
    bring = [
        f"{shutil.which('cp')} {programs}/make {programs}/{name}" for name in ("chromium", "initdb", EMULATOR, *SYSTEM)
    ]
    body = f'echo "$@" >> {programs}/log; [ "$1" = install ] || exit 0; ' + "; ".join(bring)
    stub(programs, "apt-get", body)
    done = check("test", programs)
    assert done.returncode == 0, done.stderr
    log = (programs / "log").read_text().splitlines()
    wanted = f"chromium postgresql {' '.join(SYSTEM.values())} qemu-user"
    assert log == ["update -q", f"install -q -y --no-install-recommends {wanted}"]


def test_a_wrong_mode_is_refused(programs: Path) -> None:
    assert check("everything", programs).returncode == 2
    assert os.access(SCRIPT, os.X_OK)
