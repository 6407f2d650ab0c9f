"""Python stacks of processes that hang, read without stopping them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import pytest

from penstock.process import proc
from penstock.protocol.agent import (
    MAX_FRAMES,
    MAX_STACK_TEXT,
    MAX_THREADS,
    StackAnswer,
    StackFrame,
    StackProcess,
    StackThread,
)
from penstock.protocol.frames import MAX_FRAME_BYTES
from penstock_worker import stacks

LOCK = "import threading\nlock = threading.Lock()\nlock.acquire()\ndef waits_for_lock():\n    lock.acquire()\n"
HANGS = {
    "lock": (LOCK + "{up}waits_for_lock()\n", "waits_for_lock", 5),
    "sleep": ("import time\ndef sleeps():\n    time.sleep(600)\n{up}sleeps()\n", "sleeps", 3),
    "native": (
        "import ctypes\npause = ctypes.CDLL(None).pause\ndef calls_native():\n    pause()\n{up}calls_native()\n",
        "calls_native", 4,
    ),
    "busy": ("def computes():\n    while True: pass\n{up}computes()\n", "computes", 2),
}  # fmt: skip
UP = "print('up', flush=True)\n"


class Started:
    """Processes of a test."""

    def __init__(self) -> None:
        self.processes: list[Popen[str]] = []

    def python(self, script: Path, text: str) -> int:
        script.write_text(text)
        return self.command(sys.executable, str(script), "--password=secret")

    def command(self, *argv: str) -> int:
        """Start a command, and wait for the line that it writes."""
        process = Popen(argv, stdout=PIPE, text=True, start_new_session=True)
        self.processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return process.pid


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for process in started.processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def settled(pid: int, function: str, guard: int | None = None) -> StackProcess:
    """Ask until the process has come to a function: it says that it is up just before."""
    until = time.monotonic() + 30
    while True:
        answer = stacks.answer("r", pid, guard)
        names = {frame.name for one in answer.processes for thread in one.threads for frame in thread.frames}
        if function in names or time.monotonic() > until:
            assert function in names, answer
            return next(one for one in answer.processes if one.threads)


@pytest.mark.parametrize("how", HANGS)
def test_the_line_at_which_a_process_hangs_is_found(tmp_path: Path, start: Started, how: str) -> None:
    text, function, line = HANGS[how]
    script = tmp_path / "train.py"
    pid = start.python(script, text.replace("{up}", UP))
    process = settled(pid, function)
    assert process.pid == pid and process.error == "" and process.command.endswith(f" {script}")
    assert "secret" not in process.command
    [main] = process.threads
    assert main.name == "MainThread"
    mine = [(one.name, one.line) for one in main.frames if one.file == str(script)]
    assert mine[0] == (function, line)


def test_a_process_is_not_stopped(tmp_path: Path, start: Started) -> None:
    pid = start.python(tmp_path / "train.py", HANGS["busy"][0].replace("{up}", UP))
    settled(pid, "computes")
    status = Path(f"/proc/{pid}/status").read_text()
    assert "TracerPid:\t0" in status and "State:\tR" in status


def test_what_a_shell_started_is_found_without_the_shell(tmp_path: Path, start: Started) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGS["sleep"][0].replace("{up}", UP))
    shell = start.command("/bin/sh", "-c", f"{sys.executable} {script}; true")
    process = settled(shell, "sleeps")
    assert process.pid != shell
    assert [one.pid for one in stacks.answer("r", shell).processes] == [process.pid]


def test_processes_behind_the_first_are_asked_for(
    tmp_path: Path, start: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(HANGS["sleep"][0].replace("{up}", "import sys\nif len(sys.argv) > 1: print('up', flush=True)\n"))
    run = f"{sys.executable} {script}"
    shell = start.command("/bin/sh", "-c", f"{run} & {run} last & wait")
    until = time.monotonic() + 30
    while len(stacks.answer("r", shell).processes) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    monkeypatch.setattr(stacks, "MAX_PROCESSES", 1)
    first, second = (stacks.answer("r", shell, skip=skip) for skip in (0, 1))
    assert [len(one.processes) for one in (first, second)] == [1, 1]
    assert first.processes[0].pid != second.processes[0].pid
    assert [(one.skip, one.num_left) for one in (first, second)] == [(0, 1), (1, 0)]
    behind = stacks.answer("r", shell, skip=2)
    assert "none is left after the first 2" in behind.error and behind.skip == 2


@pytest.mark.parametrize(
    ("stderr", "says", "reads"),
    [
        ("Error: Unsupported version of Python: 9.9", "pip install --upgrade py-spy", stacks.READS),
        (
            "Error: Failed to find a python interpreter in the .data section",
            "pip install --upgrade py-spy",
            stacks.READS,
        ),
        ("Error: Bad address (os error 14)", "it changed while it was read", stacks.READS),
        ("Error: Permission denied (os error 13)", "run the agent as the user of the process", 1),
    ],
)
def test_a_failed_read_is_repeated_unless_it_is_forbidden(
    monkeypatch: pytest.MonkeyPatch, start: Started, stderr: str, says: str, reads: int
) -> None:
    made: list[int] = []

    def fails(reader: str, pid: int, timeout_s: float, **_: object) -> CompletedProcess[str]:
        made.append(pid)
        return CompletedProcess([reader], 1, "", stderr)

    monkeypatch.setattr(stacks, "read", fails)
    [process] = stacks.answer("r", os.getpid()).processes[:1]
    assert says in process.error
    assert made.count(os.getpid()) == reads


def test_a_replica_without_python_is_said_to_have_none(start: Started) -> None:
    pid = start.command("/bin/sh", "-c", "echo up; sleep 600; true")
    assert stacks.answer("r", pid).error.startswith("no Python runs in this replica")


GUARD = """
import subprocess, sys, time
from penstock.process import proc
proc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER, as the guard does
subprocess.run(["/bin/sh", "-c", f"{sys.executable} {sys.argv[1]} &"])
time.sleep(600)
"""


def test_what_lost_its_parent_is_found_below_the_guard(tmp_path: Path, start: Started) -> None:
    script, guard = tmp_path / "train.py", tmp_path / "guard.py"
    script.write_text(HANGS["sleep"][0].replace("{up}", UP))
    guard.write_text(GUARD)
    root = start.command(sys.executable, str(guard), str(script))
    ended = 1  # whoever has the entrypoint's number now
    process = settled(ended, "sleeps", root)
    assert [one.pid for one in stacks.answer("r", ended, root).processes] == [process.pid]
    assert process.pid not in (root, ended)
    os.kill(process.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while (error := stacks.answer("r", ended, root).error) == "" and time.monotonic() < until:
        time.sleep(0.01)
    assert error == "the processes of this replica have ended"


def test_a_process_in_the_midst_of_its_end_is_no_other_program(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = start.command("/bin/sh", "-c", "echo up; exit 0")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(proc, "descendants", lambda root: [pid])  # as it was seen just before
    assert stacks.answer("r", pid, os.getpid()).error == "the processes of this replica have ended"


def test_a_replica_that_ended_and_a_missing_reader_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not run on its node any more" in stacks.answer("r", None).error
    monkeypatch.setattr(stacks, "find_reader", lambda: None)
    assert "pip install py-spy" in stacks.answer("r", os.getpid()).error


def test_missing_permission_is_named_with_what_to_do(tmp_path: Path, start: Started) -> None:
    # Root may read all of them, so it asks as another user; any other user asks for a process of root.
    is_root = os.geteuid() == 0
    pid = start.python(tmp_path / "train.py", HANGS["sleep"][0].replace("{up}", UP)) if is_root else 1
    reader = stacks.find_reader()
    assert reader is not None
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the environment may be where others may not look
        copy = Path(shutil.copy(reader, folder))
        for path in (copy, Path(folder)):
            path.chmod(0o755)
        found = stacks.read(str(copy), pid, 30, user=65534 if is_root else None)
    assert found.returncode != 0
    assert stacks.why_not(found.stderr) == stacks.NOT_PERMITTED
    assert "kernel.yama.ptrace_scope=0" in stacks.NOT_PERMITTED


def test_long_stacks_are_cut_to_what_a_message_takes(tmp_path: Path, start: Started) -> None:
    text = f"import time\ndef {'f' * 900}(n):\n    time.sleep(600) if n == 0 else {'f' * 900}(n - 1)\n{UP}"
    pid = start.python(tmp_path / "train.py", text + f"{'f' * 900}(300)\n")
    process = settled(pid, "f" * MAX_STACK_TEXT)
    assert len(process.threads[0].frames) == MAX_FRAMES


def test_what_a_process_wrote_into_its_own_memory_is_no_error() -> None:
    text = '[{"thread_name": null, "os_thread_id": 1099511627776, "active": true, "owns_gil": false, "frames": []}]'
    [thread] = stacks.threads_of(7, text)
    assert thread.os_thread_id is None and thread.name == ""
    with pytest.raises(ValueError, match="expected a list of threads"):
        stacks.threads_of(7, '["not a thread"]')


def test_the_main_thread_comes_first() -> None:
    text = '[{"thread_name": "sender", "os_thread_id": 8}, {"thread_name": "MainThread", "os_thread_id": 7}]'
    assert [thread.name for thread in stacks.threads_of(7, text)] == ["MainThread", "sender"]


@pytest.mark.parametrize("character", ["f", "é", "\U00020000"])
def test_an_answer_fits_into_a_message_and_says_what_is_missing(character: str) -> None:
    frames = [StackFrame(name=character * MAX_STACK_TEXT, file="g" * MAX_STACK_TEXT)] * MAX_FRAMES
    threads = [StackThread(name=str(i), frames=frames) for i in range(MAX_THREADS)]
    one, two = stacks.within(stacks.ANSWER_BYTES, [StackProcess(pid=n, threads=threads) for n in (1, 2)])
    assert [thread.name for thread in one.threads] == [str(i) for i in range(len(one.threads))]
    assert 0 < len(one.threads) < MAX_THREADS and not two.threads
    assert one.error.startswith(f"{MAX_THREADS - len(one.threads)} more threads are not shown")
    assert two.error.startswith(f"{MAX_THREADS} more threads are not shown")
    size = len(StackAnswer(request_id="r", processes=[one, two]).encode().encode())
    assert stacks.ANSWER_BYTES / 4 < size < MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ([sys.executable, "-c{up}password = 1"], ""),
        ([sys.executable, "-m", "timeit", "-n1", "-s{up}import time", "time.sleep(60)"], " -m timeit"),
        (["/bin/sh", "-c", "echo up; exec sleep 60"], ""),
    ],
)
def test_of_arguments_the_script_alone_is_shown(start: Started, argv: list[str], shown: str) -> None:
    up = "print('up', flush=True);import time;" if shown else "print('up', flush=True);import time;time.sleep(60);"
    pid = start.command(*(part.replace("{up}", up) for part in argv))
    until = time.monotonic() + 30
    while os.path.basename(os.readlink(f"/proc/{pid}/exe")) in {"sh", "dash", "bash"} and time.monotonic() < until:
        time.sleep(0.01)
    assert stacks._command(pid).split(" ", 1)[1:] == shown.split(" ", 1)[1:]
