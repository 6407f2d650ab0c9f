"""`penstock doctor` as a process: on a machine that lacks something it reports, and does not crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Site

from penstock import __version__
from penstock.command import doctor_report
from penstock.command.doctor import lines
from penstock.command.exits import Exit
from penstock.machine import survey
from penstock.machine.findings import Finding

Doctor = Callable[..., dict[str, Any]]
SMALL_SHM = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
_SPACES = (["unshare", "-m"], ["unshare", "-rm"])  # as root; as a user who may make namespaces


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Run `penstock doctor --json` in a home of its own; return the report, `findings` by name."""

    def run(*options: str, before: tuple[str, ...] = (), code: int = 0, **environ: str) -> dict[str, Any]:
        home = {n: v for n, v in os.environ.items() if not n.startswith("PENSTOCK_")} | {"HOME": str(tmp_path)}
        argv = [*before, sys.executable, "-m", "penstock.cli", "doctor", "--json", *options]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env={**home, **environ})
        assert done.returncode == code, done.stderr
        assert not done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return {**report, "findings": {found["name"]: found for found in report["findings"]}}

    return run


@pytest.mark.slow
def test_the_report_names_everything_once(doctor: Doctor) -> None:
    report = doctor()
    assert set(report) == {"version", "level", "findings"}
    wanted = {
        "processor", "cores", "memory", "shared memory", "open files", "cache folder", "state folder", "clock",
        "torch", "native libraries", "matrix kernels", "parameter servers", "GPU", "port", "server",
    }  # fmt: skip
    assert wanted <= report["findings"].keys()


@pytest.mark.slow
def test_torch_and_the_installed_native_libraries_match(doctor: Doctor) -> None:
    found = doctor()["findings"]
    assert (found["torch"]["level"], found["native libraries"]["level"]) == ("ok", "ok")
    assert found["parameter servers"]["detail"].startswith("tls: ")
    assert "tls" not in found["matrix kernels"]["detail"]


def test_without_torch_nothing_about_it_is_read(doctor: Doctor) -> None:
    assert not {"torch", "native libraries", "matrix kernels", "GPU"} & doctor("--no-torch")["findings"].keys()


def test_a_cache_folder_that_cannot_be_written_is_a_warning(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = doctor("--no-torch", PENSTOCK_CACHE=str(tmp_path / "file" / "cache"))["findings"]["cache folder"]
    assert (found["level"], "cannot be written" in found["detail"]) == ("warning", True)
    assert "PENSTOCK_CACHE" in found["advice"]


def test_a_state_folder_that_cannot_be_written_is_an_error(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = doctor("--no-torch", "--state-dir", str(tmp_path / "file" / "state"), code=Exit.UNAVAILABLE)
    assert (report["level"], report["findings"]["state folder"]["level"]) == ("error", "error")


def test_a_server_that_was_named_and_is_away_is_an_error(doctor: Doctor) -> None:
    report = doctor("--no-torch", "--url", "http://127.0.0.1:9", "--token", "t", code=Exit.UNAVAILABLE)
    assert (report["level"], report["findings"]["server"]["level"]) == ("error", "error")


def test_without_a_server_there_is_nothing_to_mend(doctor: Doctor) -> None:
    assert doctor("--no-torch")["findings"]["server"]["level"] == "ok"


def test_capabilities_that_are_declared_absent_are_reported(doctor: Doctor) -> None:
    found = doctor("--no-torch", PENSTOCK_ABSENT="memfd,pidfd")["findings"]
    assert (found["memfd"]["level"], found["pidfd"]["level"]) == ("warning", "warning")


def test_an_unknown_capability_is_a_usage_error(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "penstock.cli", "doctor", "--no-torch"]
    environ = {**os.environ, "HOME": str(tmp_path), "PENSTOCK_ABSENT": "memdf"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False, env=environ)
    assert (done.returncode, "PENSTOCK_ABSENT names memdf" in done.stderr) == (Exit.USAGE, True)


def test_64_mib_of_shared_memory_are_a_warning(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mount namespace where the machine lets one be made, else with the size that such a machine has."""
    for space in _SPACES:
        before = (*space, "sh", "-c", SMALL_SHM, "sh")
        if _works((*before, "true")):
            found = doctor("--no-torch", before=before)["findings"]["shared memory"]
            break
    else:
        monkeypatch.setattr("os.statvfs", of_64_mib)
        judged = survey.read_shared_memory().finding()
        found = {"level": judged.level, "detail": judged.detail, "advice": judged.advice}
    assert (found["level"], "64 MiB" in found["detail"], "--shm-size" in found["advice"]) == ("warning", True, True)


def of_64_mib(_: object) -> os.statvfs_result:
    """Return what statvfs gives for a file system of 64 MiB."""
    return os.statvfs_result((4096, 4096, 16384, 16000, 16000, 0, 0, 0, 0, 255))


def _works(argv: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, check=False, timeout=150).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize("ends", ["import os; os.kill(os.getpid(), 4)", "raise SystemExit('no such symbol')"])
def test_a_torch_that_cannot_be_loaded_is_an_error(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ends + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor_report.read_torch()[0].finding()
    assert (found.level, "SIGILL" in found.detail or "no such symbol" in found.detail) == ("error", True), found


def test_native_libraries_that_do_not_match_are_an_error() -> None:
    said: dict[str, Any] = {
        "version": "2.14.0",
        "cuda": None,
        "capability": "AVX2",
        "gpus": [],
        "native": "built with torch 2.13",
    }
    levels = {r.finding().name: r.finding().level for r in doctor_report.torch_readings(said, "", "")}
    assert levels == {"torch": "ok", "native libraries": "error", "GPU": "ok"}


def test_a_line_that_is_not_ok_is_followed_by_what_to_do() -> None:
    found = [Finding("clock", "warning", "it is wrong", "mend it"), Finding("port", "ok", "free", "not shown")]
    assert [line for one in found for line in lines(one)] == [
        "warning  clock: it is wrong", "         → mend it", "ok       port: free",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_running_server_is_named_with_its_version(serving: Site) -> None:
    found = {one["name"]: one for one in serving.json("doctor", "--no-torch")["findings"]}
    assert (found["server"]["level"], f"version {__version__}" in found["server"]["detail"]) == ("ok", True)


@pytest.mark.slow
def test_nodes_show_what_their_machines_lack(site: Site, until: Callable[..., None]) -> None:
    site.environ["PENSTOCK_ABSENT"] = "memfd"
    site.up()
    until(lambda: site.ready() and bool(site.json("nodes")))
    (node,) = site.json("nodes")
    assert "memfd" in [found["name"] for found in node["findings"]]
    assert f"{node['name']}: warning: memfd: absent: declared absent by PENSTOCK_ABSENT" in site.run("nodes").stderr
