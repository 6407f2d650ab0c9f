"""A process group is stopped with all that it started, and its number stays its own until it is reaped."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.process.end import open_process_end
from penstock.process.group import LoggedGroup, ProcessGroup, stop, wait_for_an_end

BOUND_S = 30.0
PARENT = "sleep 600 & echo $!; wait"
DEAF = "trap '' TERM; echo ready; while true; do sleep 600; done"


def group(script: str) -> ProcessGroup:
    return ProcessGroup(["bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def first_line(one: ProcessGroup) -> str:
    assert one.stdout is not None
    with one.stdout as output:
        return output.readline().decode().strip()


def has_ended(end: int) -> bool:
    ends = select.poll()
    ends.register(end, select.POLLIN)
    found = bool(ends.poll(BOUND_S * 1000))
    os.close(end)
    return found


@pytest.fixture
def parent() -> Iterator[ProcessGroup]:
    one = group(PARENT)
    yield one
    stop([one], BOUND_S)
    assert one.stdout is not None
    one.stdout.close()


def test_stop_ends_what_the_process_started(parent: ProcessGroup) -> None:
    end = open_process_end(int(first_line(parent)))
    stop([parent], BOUND_S)
    assert has_ended(end)


def test_stop_kills_what_ignores_sigterm() -> None:
    one = group(DEAF)
    assert first_line(one) == "ready"
    stop([one], 0.05)
    assert one.status() == -signal.SIGKILL


def test_status_does_not_reap(parent: ProcessGroup) -> None:
    parent.signal_all(signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    assert Path(f"/proc/{parent.pid}").exists()
    parent.reap()
    assert not Path(f"/proc/{parent.pid}").exists()
    assert parent.status() == -signal.SIGKILL


def test_signal_after_reap_is_sent_to_no_process(parent: ProcessGroup) -> None:
    stop([parent], BOUND_S)
    parent.signal_all(signal.SIGKILL)
    parent.reap()


def test_another_thread_may_signal_while_one_waits(parent: ProcessGroup) -> None:
    killer = threading.Timer(0.05, parent.signal_all, [signal.SIGKILL])
    killer.start()
    assert parent.wait() == -signal.SIGKILL
    killer.join()


def test_wait_returns_at_the_first_end() -> None:
    quick, slow = (
        ProcessGroup(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for argv in (["true"], ["sleep", "600"])
    )
    wait_for_an_end([quick, slow], BOUND_S)
    assert (quick.status(), slow.status()) == (0, None)
    stop([quick, slow], BOUND_S)


def test_group_ends_when_its_parent_is_killed() -> None:
    code = (
        "import subprocess, sys; from penstock.process.group import ProcessGroup; "
        "one = ProcessGroup(['sleep', '600'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(one.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        end = open_process_end(int(launcher.stdout.readline()))
        launcher.kill()
    assert has_ended(end)


def test_log_is_read_from_where_this_run_began(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("an earlier run\n")
    one = LoggedGroup(["echo", "this run"], env=os.environ, log=log, appends=True)
    one.wait()
    one.reap()
    assert one.tail(8) == ["this run"]
    assert one.new_output() == b"this run\n"
    assert log.read_text() == "an earlier run\nthis run\n"
