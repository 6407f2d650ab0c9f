"""The guard as a real process, without an agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import until

from penstock.process import proc
from penstock_worker import guard, lease

PRINT_PID = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


class Guarded:
    """One replica's folder with a guard on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *argv: str, **fields: Any) -> subprocess.Popen[bytes]:
        order = {
            "argv": list(argv),
            "env": {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
            "cwd": str(self.folder),
            "stop_grace_s": 5.0,
            "lease": str(self.folder / "lease.json"),
            "lease_end": lease.now() + 600,
            **fields,
        }
        lease.write_json(self.folder / guard.ORDER, order)
        self.process = subprocess.Popen([sys.executable, "-P", "-m", "penstock_worker.guard", str(self.folder)])
        return self.process

    def log(self) -> str:
        path = self.folder / guard.LOG
        return path.read_text() if path.exists() else ""

    def outcome(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads((self.folder / guard.EXIT).read_text())
        return {name: fields[name] for name in ("state", "exit_code", "signal", "detail")}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.send_signal(signal.SIGUSR1)
        made.process.wait(60)


def test_the_exit_code_is_written_when_the_entrypoint_returns(guarded: Guarded) -> None:
    assert guarded.start("python", "-c", "raise SystemExit(3)").wait(60) == 0
    assert guarded.outcome() == {"state": "EXITED", "exit_code": 3, "signal": None, "detail": ""}


def test_a_crash_by_signal_is_the_entrypoints_own_end(guarded: Guarded) -> None:
    guarded.start("python", "-c", "import os; os.kill(os.getpid(), 11)").wait(60)
    assert guarded.outcome() == {"state": "EXITED", "exit_code": None, "signal": 11, "detail": ""}


def test_the_entrypoint_starts_with_clean_signals_and_no_stdin(guarded: Guarded) -> None:
    code = "import signal, sys; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), repr(sys.stdin.read()))"
    guarded.start("python", "-c", code).wait(60)
    assert guarded.log().split() == ["set()", "''"]


def test_a_killed_guard_takes_its_entrypoint_along(guarded: Guarded) -> None:
    process = guarded.start("python", "-c", PRINT_PID)
    until(lambda: guarded.log().endswith("\n"))
    process.kill()
    process.wait()
    until(lambda: proc.start_ticks(int(guarded.log())) is None)


def test_orphans_of_an_entrypoint_end_before_the_end_is_written(guarded: Guarded) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {PRINT_PID!r}], start_new_session=True)"
    code += "; import os\nwhile not os.path.getsize('log'): pass"
    assert guarded.start("python", "-c", code).wait(60) == 0
    assert proc.start_ticks(int(guarded.log())) is None
    assert guarded.outcome()["exit_code"] == 0


def test_a_renewed_lease_keeps_the_replica_and_expiry_ends_it(guarded: Guarded) -> None:
    path = guarded.folder / "lease.json"
    lease.write(path, lease.Lease(lease.now() + 600, grace_s=0))
    process = guarded.start("python", "-c", PRINT_PID, lease_end=0.0)
    until(lambda: guarded.log().endswith("\n"))
    assert process.poll() is None, "the file counts, not what the order said"
    lease.write(path, lease.Lease(lease.now() - 10, grace_s=0))
    assert process.wait(60) == 0
    assert guarded.outcome() == {"state": "KILLED", "exit_code": None, "signal": 15, "detail": "lease expired"}


def test_without_a_readable_lease_the_order_says_when_it_is_over(guarded: Guarded) -> None:
    (guarded.folder / "lease.json").write_text("{broken")
    assert guarded.start("python", "-c", PRINT_PID, lease_end=0.0).wait(60) == 0
    assert guarded.outcome()["detail"] == "lease expired"


def test_a_file_that_may_not_be_executed_is_named(guarded: Guarded) -> None:
    (guarded.folder / "train.sh").write_text("echo no")
    guarded.start("./train.sh").wait(60)
    outcome = guarded.outcome()
    assert outcome["exit_code"] == 126
    assert "'./train.sh' may not be executed" in outcome["detail"]


def test_a_folder_has_one_guard(guarded: Guarded) -> None:
    guarded.start("python", "-c", PRINT_PID)
    until(lambda: guarded.log().endswith("\n"))
    second = subprocess.run([sys.executable, "-P", "-m", "penstock_worker.guard", str(guarded.folder)], check=False)
    assert second.returncode == 1
    assert guarded.log().count("\n") == 1


def test_the_guard_loads_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import penstock_worker.guard; print(*sorted(one for one in "
        "set(sys.modules) - before if one.partition('.')[0] not in sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    of_process = [f"penstock.process.{part}" for part in ("cell", "hiding", "private", "proc", "signals")]
    of_protocol = ["penstock.protocol", "penstock.protocol.preemption"]
    library = ["penstock", *(f"penstock.{part}" for part in ("imports", "logger", "openmp", "process"))]
    library += [*of_process, *of_protocol, "penstock.version"]
    worker = ["penstock_worker", *(f"penstock_worker.{part}" for part in ("accounts", "guard", "lease", "notices"))]
    assert result.stdout.split() == [*library, *worker]


@pytest.mark.parametrize(
    ("argv", "env", "named"),
    [
        (["true", "a\0b"], {}, "entrypoint[1] is 'a\\x00b', which holds a NUL character"),
        (["true"], {"A": "\0"}, "env['A'] is '\\x00', which holds a NUL character"),
        (["true"], {"A\0": "x"}, "name 'A\\x00' in env is 'A\\x00', which holds a NUL character"),
        (["true", "\ud800"], {}, "entrypoint[1] is '\\ud800', which no process can be given"),
    ],
)
def test_what_no_process_can_be_given_exits_127_and_is_named(
    guarded: Guarded, argv: list[str], env: dict[str, str], named: str
) -> None:
    assert guarded.start(*argv, env=env).wait(60) == 0
    outcome = guarded.outcome()
    assert (outcome["state"], outcome["exit_code"]) == ("EXITED", 127)
    assert named in outcome["detail"]
    assert named in guarded.log()
