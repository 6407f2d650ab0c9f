"""Python stacks of a replica's processes. py-spy reads them from their memory: they are not stopped, and run nothing.

Reading the memory of another process takes the same user and the kernel's permission, or root. Without stopping it a
process may change while it is read, so a read that fails is repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.process import proc
from penstock.protocol.agent import (
    MAX_FRAMES,
    MAX_PROCESSES,
    MAX_STACK_TEXT,
    MAX_THREADS,
    StackAnswer,
    StackFrame,
    StackProcess,
    StackThread,
)

READ_S = 3.0
"""For one process; a read takes some 20 ms."""
ALL_S = 8.0
"""For all of a replica: the server waits longer."""
READS = 4
ANSWER_BYTES = 1 << 20
"""Of threads in an answer: the server closes the connection of an agent that sends more than some MiB at once."""
NOT_PERMITTED = (
    "the agent may not read the memory of this process: run the agent as the user of the process or as root; if it "
    "is the same user, set 'sysctl kernel.yama.ptrace_scope=0' on its node"
)
UNKNOWN_PYTHON = (
    "py-spy does not know the Python of this process; a newer one may: run 'pip install --upgrade py-spy' in the "
    "environment of its agent"
)
_OF_THE_PYTHON = ("unsupported", "python version", "python interpreter", "python library")
TOO_LATE = f"not read: those before it took {ALL_S:.0f} s, as its node is busy"
MISSING = "py-spy is not installed beside the agent of this node: run 'pip install py-spy' in its environment"


def answer(request_id: str, pid: int | None, guard: int | None = None, skip: int = 0) -> StackAnswer:
    """Return the stacks of a process and of those below it. Blocks for some `ALL_S`.

    `pid`: the entrypoint; None if the replica does not run here. `guard`: the process below which the replica runs, to
    which what has lost its parent belongs; what is not below it, as its number was given to another, is not read.
    `skip`: of the Python processes, the entrypoint first, how many are passed over.
    """
    if pid is None:
        return StackAnswer(request_id=request_id, error="this replica does not run on its node any more", skip=skip)
    reader = find_reader()
    if reader is None:
        return StackAnswer(request_id=request_id, error=MISSING, skip=skip)
    until = time.monotonic() + ALL_S
    below = (
        [pid, *proc.descendants(pid)] if guard is None else sorted(proc.descendants(guard), key=lambda one: one != pid)
    )
    found = [one for one in below if _may_be_python(one)]
    asked = found[skip : skip + MAX_PROCESSES]
    taken = [process for one in asked if (process := _process(reader, one, until)) is not None]
    if not taken and found and skip:
        error = f"of this replica's Python processes none is left after the first {skip}: take the first ones again"
        return StackAnswer(request_id=request_id, error=error, skip=skip)
    if not taken:
        error = "no Python runs in this replica: its entrypoint and what that started are other programs"
        if found or not any(_has_program(one) for one in below):
            error = "the processes of this replica have ended"
        return StackAnswer(request_id=request_id, error=error, skip=skip)
    num_left = max(0, len(found) - skip - MAX_PROCESSES)
    processes = within(ANSWER_BYTES, taken)
    return StackAnswer(request_id=request_id, processes=processes, skip=skip, num_left=num_left)


def within(num_bytes: int, processes: Sequence[StackProcess]) -> list[StackProcess]:
    """Return as many of the threads, in order, as fit into so many bytes of a message; errors say what is missing."""
    out: list[StackProcess] = []
    for process in processes:
        threads: list[StackThread] = []
        for thread in process.threads:
            num_bytes -= len(thread.encode())  # ASCII: a letter may take 12 bytes
            if num_bytes < 0:
                break
            threads.append(thread)
        missing = len(process.threads) - len(threads)
        error = f"{missing} more threads are not shown: they are too much for a message" if missing else process.error
        out.append(process.model_copy(update={"threads": threads, "error": error}))
    return out


def find_reader() -> str | None:
    """Return the path of py-spy: of the agent's environment, else of PATH."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def _may_be_python(pid: int) -> bool:
    """Whether it is, or cannot be looked at."""
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe")) or "libpython" in _maps(pid)
    except PermissionError:
        return True
    except OSError:
        return False


def _has_program(pid: int) -> bool:
    """Whether it still has one; a process that ends gives its memory back before it becomes a zombie."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")


def _process(reader: str, pid: int, until: float) -> StackProcess | None:
    """Read one process; None if it has ended."""
    error = ""
    for _ in range(READS):
        if time.monotonic() >= until:
            break
        try:
            found = read(reader, pid, min(READ_S, until - time.monotonic()))
            if found.returncode == 0:
                return StackProcess(pid=pid, command=_command(pid), threads=threads_of(pid, found.stdout))
        except subprocess.TimeoutExpired:
            error = f"its stacks could not be read within {READ_S:.0f} s: its node is busy"
            continue
        except (OSError, ValueError) as failure:
            error = str(failure)
            continue
        error = why_not(found.stderr)
        if error == NOT_PERMITTED:  # of all others a process that is just starting may be the cause
            break
    if proc.start_ticks(pid) is None:
        return None
    return StackProcess(pid=pid, command=_command(pid), error=_text(error or TOO_LATE))


def read(reader: str, pid: int, timeout_s: float, *, user: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run py-spy on a process. `user`: as which, None: as this one."""
    return subprocess.run(
        [reader, "dump", "--nonblocking", "--json", "--pid", str(pid)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, errors="replace", timeout=timeout_s, check=False, user=user, cwd="/",
    )  # fmt: skip


def why_not(stderr: str) -> str:
    """Return what a failed read means, and what to do."""
    if "ermission denied" in stderr.lower() or "operation not permitted" in stderr.lower():
        return NOT_PERMITTED
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    says = lines[0].removeprefix("Error: ") if lines else "py-spy says nothing"
    if any(word in stderr.lower() for word in _OF_THE_PYTHON):
        return f"{UNKNOWN_PYTHON}: {says}"
    return f"it changed while it was read: {says}"


def threads_of(pid: int, text: str) -> list[StackThread]:
    """Return the threads that py-spy found in a process, the main one first. Raises ValueError for another text."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"py-spy wrote {text[:80]!r}; expected a list of threads")
    found.sort(key=lambda one: one.get("os_thread_id") != pid)
    return [_thread(pid, one) for one in found[:MAX_THREADS]]


def _thread(pid: int, fields: dict[str, Any]) -> StackThread:
    frames = [
        StackFrame(name=_text(one.get("name")), file=_text(one.get("filename")), line=max(0, one.get("line") or 0))
        for one in fields.get("frames", [])[:MAX_FRAMES]
    ]
    number = fields.get("os_thread_id")  # read from memory of the process, which may have written anything there
    # Names are of the module `threading`, which a script without threads has not loaded.
    name = fields.get("thread_name") or ("MainThread" if number == pid else "")
    return StackThread(
        name=_text(name), os_thread_id=number if isinstance(number, int) and 0 <= number < 1 << 31 else None,
        active=bool(fields.get("active")), owns_gil=bool(fields.get("owns_gil")), frames=frames,
    )  # fmt: skip


def _command(pid: int) -> str:
    """Return the program and, of Python, its script or module, without arguments, which may hold secrets."""
    try:
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    program, script, module = (*parts, "", "", "")[:3]
    named = [os.path.basename(program)]
    if "python" in named[0] and script == "-m":
        named += [script, module]
    elif "python" in named[0] and not script.startswith("-"):
        named.append(script)
    return _text(" ".join(part for part in named if part))


def _text(text: object) -> str:
    """Return text that a message takes."""
    whole = "" if text is None else str(text)
    return whole[:MAX_STACK_TEXT].encode("utf-8", "replace").decode("utf-8").replace("\0", "?")
