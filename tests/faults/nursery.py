"""A process that has imported all that a job needs, and forks to run scripts: `python -m tests.faults.nursery`.

One JSON line in, one out. {"argv": […], "environ": {…}, "out": path, "errors": path, "limits": {name: bytes}} starts a
script in a process of its own, and gives its pid; {"reap": pid} waits for its end, and gives how it ended; {"children":
true} gives who is there, what scripts left behind included (this process is a subreaper).
It has no threads and has computed nothing when it forks, so a script finds what it would have imported itself. When its
input ends, or it is killed, everybody that it started is killed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

_WARM = (
    "penstock.program.layers", "penstock.program.optimizers", "penstock.exec.executor", "penstock.transpile.transpiler",
    "penstock.exec.ps_storage", "penstock.ps.server", "penstock.ps.communicators.wrapping",
    "torch._functorch.aot_autograd", "torch.export",  # what torch imports at the first recorded operator
)  # fmt: skip
_FRESH = ("penstock.ps.opening", "penstock.exec.serving")  # they note when a process was started
_SUBREAPER, _DIE_WITH_PARENT = 36, 1  # of prctl


def main() -> list[str]:
    """Serve requests; return in each forked process, with what it is to run."""
    for name in _WARM:
        importlib.import_module(name)
    early = [name for name in _FRESH if name in sys.modules]
    assert not early, f"{early} would be the same in all processes"
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SUBREAPER, 1) == 0
    print(json.dumps("warm"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            pid = os.fork()
            if not pid:
                assert libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL) == 0
                become(request)
                return list(request["argv"])
            answer: Any = pid
        elif "reap" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = children()
        print(json.dumps(answer), flush=True)
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    return []


def children() -> list[int]:
    """Return who has this process as its parent."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def become(request: dict[str, Any]) -> None:
    """Take on the streams, environment and limits of a request."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, path in ((1, request["out"]), (2, request["errors"])):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(request["environ"])
    for name, limit in request["limits"].items():
        which = getattr(resource, name)
        resource.setrlimit(which, (limit, resource.getrlimit(which)[1]))


if __name__ == "__main__":
    arguments = main()
    if arguments:  # the process of a script: it ends as that does
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
