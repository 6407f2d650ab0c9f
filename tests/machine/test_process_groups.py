"""A process group is stopped with all that it started, and its number stays its own until it is reaped."""

from __future__ import annotations

import ast
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.machine.capability import capability
from penstock.process.end import open_process_end
from penstock.process.group import ProcessGroup, stop, wait_for_an_end

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


@pytest.fixture
def kernel_reaps() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("kernel_reaps")
def test_stop_ends_all_where_sigchld_is_ignored() -> None:
    groups = [
        ProcessGroup(["sleep", seconds], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for seconds in ("0", "600", "600")
    ]
    assert groups[0].wait() == 0
    wait_for_an_end(groups[:1], BOUND_S)
    stop(groups, BOUND_S)
    assert not [one.pid for one in groups if Path(f"/proc/{one.pid}").exists()]


@pytest.mark.usefixtures("kernel_reaps")
def test_process_reaped_by_the_kernel_has_ended() -> None:
    one = ProcessGroup(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = open_process_end(one.pid)
    one.signal_all(signal.SIGKILL)
    assert has_ended(end)
    assert one.wait() == one.status() == 0
    one.signal_all(signal.SIGKILL)
    one.reap()


def test_stop_waits_where_no_descriptor_is_left(parent: ProcessGroup) -> None:
    capability("pidfd")  # whose probe needs descriptors
    assert first_line(parent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        stop([parent], BOUND_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert parent.status() == -signal.SIGTERM


def test_stop_kills_all_before_it_raises() -> None:
    class Failing(ProcessGroup):
        def reap(self) -> None:
            super().reap()
            raise PermissionError

    first = Failing(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = ProcessGroup(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.raises(PermissionError):
        stop([first, second], BOUND_S)
    assert not Path(f"/proc/{second.pid}").exists()


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


LOGGED = """
import os, sys
from pathlib import Path
from penstock.process.group import LoggedGroup

log = Path(sys.argv[1])
log.write_text("an earlier run\\n")
one = LoggedGroup(["echo", "this run"], env=os.environ, log=log, appends=True)
one.wait()
one.reap()
print([one.tail(8), one.new_output(), log.read_text()])
"""


def test_log_is_read_from_where_this_run_began(tmp_path: Path) -> None:
    # In a process of its own: after a fork, gRPC's handlers of a test before would write into the log as well.
    command = [sys.executable, "-c", LOGGED, str(tmp_path / "log")]
    found = ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found == [["this run"], b"this run\n", "an earlier run\nthis run\n"]
