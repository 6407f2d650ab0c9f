"""A home folder that cannot be searched, as in a container that runs as another user than the image's: no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.command import profile
from penstock.command.exits import Exit
from penstock.errors import SpecError
from penstock.machine import survey

AS_OWNER = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that permissions of files bind, for root too: the interpreter may lie where another user cannot go."""
REPORT = """
import sys
from pathlib import Path
from penstock_worker.machine import look_at_machine
print([found.level for found in look_at_machine(Path(sys.argv[1])) if found.name == "state folder"])
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """Make a home folder with a profile and a server's state, below a folder that cannot be searched."""
    folder = tmp_path / "closed"
    server = folder / "home" / ".penstock" / "server"
    server.mkdir(parents=True)
    (server / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:9"}))
    folder.chmod(0)
    yield folder / "home"
    folder.chmod(0o700)


@pytest.fixture
def run(closed: Path) -> Run:
    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", "-c", AS_OWNER, sys.executable, *arguments]
        base = {n: v for n, v in os.environ.items() if not n.startswith("PENSTOCK_")} | {"HOME": str(closed)}
        return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env={**base, **environ})

    return run


def denied(*_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_doctor_reports_a_home_that_cannot_be_searched(run: Run) -> None:
    done = run("-m", "penstock.cli", "doctor", "--no-torch", "--json")
    assert (done.returncode, done.stderr) == (Exit.UNAVAILABLE, "")
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    state, server = found["state folder"], found["server"]
    assert (state["level"], "Permission denied" in state["detail"]) == ("error", True)
    assert "--state-dir" in state["advice"]
    assert (server["level"], "set HOME or PENSTOCK_CONFIG" in server["detail"]) == ("error", True)


@pytest.mark.parametrize("variable", ["HOME", "PENSTOCK_CONFIG"])
def test_a_command_names_the_file_that_it_cannot_read(run: Run, closed: Path, tmp_path: Path, variable: str) -> None:
    (tmp_path / "open").mkdir()
    places = {"HOME": str(tmp_path / "open"), "PENSTOCK_CONFIG": str(tmp_path / "none"), variable: str(closed)}
    done = run("-m", "penstock.cli", "jobs", **places)
    assert done.returncode == Exit.USAGE
    assert str(closed) in done.stderr
    assert "cannot be read: Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_url_and_token_need_no_profile(run: Run) -> None:
    done = run("-m", "penstock.cli", "jobs", "--url", "http://127.0.0.1:9", "--token", "t")
    assert done.returncode == Exit.UNAVAILABLE, done.stderr


def test_the_report_of_an_agent_has_its_folder_as_an_error(run: Run, closed: Path) -> None:
    done = run("-c", REPORT, str(closed / "agent"))
    assert (done.returncode, done.stdout.strip()) == (0, "['error']"), done.stderr


def test_a_state_folder_whose_stat_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as machine:
        machine.setattr("os.stat", denied)
        found = survey.read_state_folder(tmp_path, advice="another one").finding()
    assert (found.level, found.detail) == ("error", f"{tmp_path} cannot be written: Permission denied")


def test_a_token_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "config.json"))
    profile.save(profile.UserProfile("http://there", str(tmp_path)))  # a folder
    with pytest.raises(SpecError, match=r"the token in .* cannot be read: .*; give --token or set PENSTOCK_TOKEN"):
        profile.resolve(None, None)


def test_a_profile_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_CONFIG", str(tmp_path / "file" / "config.json"))
    with pytest.raises(SpecError, match=r"cannot be written: .*; set PENSTOCK_CONFIG"):
        profile.save(profile.UserProfile("http://there", "token"))


def test_a_user_without_a_home_is_advised_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no entry in the table of users
    with pytest.raises(SpecError, match="set HOME"):
        profile.home()
