"""A tether: its command ends in order, whichever of its ancestors ends, and waits for the predecessor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until

from penstock.process import proc

COMMAND = """
import pathlib, signal, sys
def end(*_):
    with open(FOLDER / "said", "a") as said: said.write(f"end {NAME}\\n")
    sys.exit(3)
FOLDER, NAME = pathlib.Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGTERM, end)
with open(FOLDER / "said", "a") as said: said.write(f"start {NAME}\\n")
signal.pause()
"""
PARENT = """
import os, subprocess, sys
argv = [sys.executable, "-m", "penstock.process.tether", str(os.getpid()), *sys.argv[1:]]
sys.exit(subprocess.Popen(argv, start_new_session=True).wait())
"""
IMPATIENT = """
import os, sys
from penstock.process import tether
UID, tether.WAIT_S = int(sys.argv[1]), 0.3
os.getuid = lambda: UID
sys.exit(tether.main([str(os.getppid()), *sys.argv[2:]]))
"""


class Tethers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start a parent of a tether of a command."""
        command = [sys.executable, "-c", COMMAND, str(self.folder), name]
        argv = [sys.executable, "-c", PARENT, str(self.folder / "lock"), *command]
        self.started.append(subprocess.Popen(argv, env={**os.environ, "TETHER_OF_TEST": str(self.folder)}))
        return self.started[-1]

    def said(self) -> list[str]:
        path = self.folder / "said"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        proc.send(proc.with_environment(f"TETHER_OF_TEST={self.folder}"), signal.SIGKILL)
        for process in self.started:
            process.wait()


@pytest.fixture
def tethers(tmp_path: Path) -> Iterator[Tethers]:
    made = Tethers(tmp_path)
    yield made
    made.close()


def tether_of(parent: subprocess.Popen[bytes]) -> int:
    (found,) = [one.pid for one in proc.every() if one.parent == parent.pid and not one.dead]
    return found


def test_command_ends_in_order_when_its_parent_is_killed(tethers: Tethers) -> None:
    parent = tethers.start("a")
    until(lambda: tethers.said() == ["start a"])
    parent.kill()
    until(lambda: tethers.said() == ["start a", "end a"])


def test_command_ends_in_order_when_its_tether_is_killed(tethers: Tethers) -> None:
    parent = tethers.start("a")
    until(lambda: tethers.said() == ["start a"])
    os.kill(tether_of(parent), signal.SIGKILL)
    until(lambda: tethers.said() == ["start a", "end a"])


def test_sigterm_is_passed_on_and_the_exit_status_back(tethers: Tethers) -> None:
    parent = tethers.start("a")
    until(lambda: tethers.said() == ["start a"])
    os.kill(tether_of(parent), signal.SIGTERM)
    assert parent.wait(60) == 3
    assert tethers.said() == ["start a", "end a"]


def test_next_command_waits_for_the_end_of_the_one_before(tethers: Tethers) -> None:
    first = tethers.start("a")
    until(lambda: tethers.said() == ["start a"])
    second = tethers.start("b")
    until(lambda: any(one.parent == second.pid for one in proc.every()), "the second tether is there")
    os.kill(tether_of(first), signal.SIGTERM)
    until(lambda: len(tethers.said()) == 3, "the second command has started")
    assert tethers.said() == ["start a", "end a", "start b"]


def test_tether_whose_parent_has_ended_starts_nothing(tethers: Tethers) -> None:
    command = [sys.executable, "-c", COMMAND, str(tethers.folder), "a"]
    tether = [sys.executable, "-m", "penstock.process.tether", "1", str(tethers.folder / "lock"), *command]
    assert subprocess.run(tether, timeout=60, check=False).returncode == 128 + signal.SIGTERM
    assert tethers.said() == []


def refused(folder: Path, uid: int) -> str:
    """Return what a tether of a user says, that waits 0.3 s and starts nothing."""
    argv = [sys.executable, "-c", IMPATIENT, str(uid), str(folder / "lock"), "touch", str(folder / "started")]
    ran = subprocess.run(argv, timeout=60, check=False, capture_output=True, text=True)
    assert (ran.returncode, (folder / "started").exists()) == (os.EX_TEMPFAIL, False), ran
    return ran.stderr


def test_tether_gives_up_on_a_lock_that_is_not_released(tethers: Tethers) -> None:
    tethers.start("a")
    until(lambda: tethers.said() == ["start a"])
    said = refused(tethers.folder, os.getuid())
    assert said == f"{tethers.folder}/lock cannot be locked: another process has held it for 0.3 s\n"


def test_tether_refuses_the_lock_of_another_user(tethers: Tethers) -> None:
    (tethers.folder / "lock").touch()
    said = refused(tethers.folder, os.getuid() + 1)
    owner = f"it belongs to user {os.getuid()}; remove it, or choose another folder"
    assert said == f"{tethers.folder}/lock cannot be locked: {owner}\n"
