"""The units of systemd: valid, hardened, and what they start is what the programs take."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock_server.__main__ as server
from penstock.cli import app
from penstock_server.settings import Settings
from penstock_worker import __main__ as worker

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
NAMES = ("penstock-server", "penstock-agent")
STATE = {name: f"/var/lib/{name}" for name in NAMES}


def installed(name: str, folder: Path) -> Path:
    """Write the unit as it is on a machine where Penstock is in this environment, and return its path."""
    path = folder / f"{name}.service"
    text = (UNITS / path.name).read_text()
    path.write_text(text.replace("/opt/penstock/bin/", f"{Path(sys.executable).parent}/"))
    return path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], check=False, capture_output=True, text=True, timeout=30)


def values(name: str) -> dict[str, str]:
    """Return the settings of a unit, the last of each name."""
    lines = (UNITS / f"{name}.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def command(name: str) -> list[str]:
    """Return what the unit runs."""
    return shlex.split(values(name)["ExecStart"].replace("%S", "/var/lib"))


@pytest.mark.parametrize("name", NAMES)
def test_unit_is_valid_without_a_warning(name: str, tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", str(installed(name, tmp_path)))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_misspelt_setting_of_a_unit_is_named(tmp_path: Path) -> None:
    unit = installed("penstock-agent", tmp_path)
    unit.write_text(unit.read_text().replace("OOMPolicy=", "OOMPolcy="))
    assert "OOMPolcy" in analyze("verify", "--man=no", str(unit)).stderr


@pytest.mark.parametrize(("name", "tenths"), [("penstock-server", 20), ("penstock-agent", 50)])
def test_exposure_of_a_unit_stays_low(name: str, tenths: int, tmp_path: Path) -> None:
    unit = installed(name, tmp_path)
    done = analyze("security", "--offline=true", f"--threshold={tenths}", "--no-pager", str(unit))
    assert done.returncode == 0, done.stdout + done.stderr


def test_server_takes_the_options_of_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Settings] = []
    monkeypatch.setattr(server, "serve", started.append)
    python, *options, module, state, folder, log, form = command("penstock-server")
    assert (python, options, module) == ("/opt/penstock/bin/python", ["-P", "-m"], "penstock_server")
    server.main([state, folder, log, form])
    assert started[0].state_dir == Path(STATE["penstock-server"])
    assert started[0].log_format == "json"


def test_agent_takes_the_options_of_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda _path, argv, _environ: started.append(argv))
    program, *arguments = command("penstock-agent")
    assert program == "/opt/penstock/bin/penstock"
    done = CliRunner().invoke(app, arguments, env={"PENSTOCK_URL": "http://127.0.0.1:9"})
    assert done.exit_code == 0, done.output
    # an exec, so that systemd's main process is the agent itself, and a kill of it leaves the guards
    (argv,) = started
    assert argv[1:3] == ["-m", "penstock_worker"]
    assert worker._parser().parse_args(argv[3:]).state_dir == Path(STATE["penstock-agent"])


@pytest.mark.parametrize("name", NAMES)
def test_unit_keeps_its_state_in_its_own_folder(name: str) -> None:
    found = values(name)
    assert (found["User"], found["StateDirectory"], found["StateDirectoryMode"]) == (name, name, "0700")
    assert f"{STATE[name]}" in command(name)


def test_jobs_outlive_a_restart_of_the_agent_and_not_a_stop() -> None:
    found = values("penstock-agent")
    assert (found["KillMode"], found["RestartKillSignal"], found["KillSignal"]) == ("process", "SIGKILL", "SIGTERM")
    assert found["OOMPolicy"] == "continue"
    assert not {"PrivateTmp", "PrivateUsers", "PrivateDevices", "ProtectClock", "DevicePolicy"} & set(found)
    assert set(found["RestrictNamespaces"].split()) >= {"user", "mnt"}


@pytest.mark.parametrize(("name", "longest_s"), [("penstock-server", 5), ("penstock-agent", 20 + 10)])
def test_systemd_waits_longer_than_a_program_drains(name: str, longest_s: int) -> None:
    limit = values(name)["TimeoutStopSec"]
    assert int(limit.removesuffix("s")) > longest_s


def test_users_of_the_units_are_created(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    file = UNITS / "penstock.sysusers.conf"
    done = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(file)], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    homes = dict(re.findall(r"^([^:]+):.*:([^:]+):[^:]+$", (tmp_path / "etc" / "passwd").read_text(), re.MULTILINE))
    assert homes == {values(name)["User"]: STATE[name] for name in NAMES}
