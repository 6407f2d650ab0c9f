"""Processes forked from one that has imported what a job needs, so that each costs a third of an import of torch.

`python -m tests.support.nursery` serves: one JSON line in, one out. {"argv": [script, …], ["-m", module, …] or
["-c", code, …], "environ": {…}, "cwd": path or null, "out": path, "errors": path, "limits": {name: bytes}} starts a
process, and gives its pid; an environment variable that is null is taken away. With "destructors": true the process
ends as any other does; else it ends once its interpreter has, without the destructors of torch's libraries, which take
longer than all else in most. {"reap": pid} waits for its end, and
gives how it ended; {"children": true} gives the processes that are there, orphans included (this one is a subreaper).
It has no threads and has computed nothing when it forks, so a script finds what it would have imported itself. When its
input ends, or it is killed, everybody that it started is killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.imports import importing

ROOT = Path(__file__).parents[2]
BOUND_S = 120.0  # for what takes a few seconds on a machine with nothing else to do
Environ = Mapping[str, str | None]
_WARM = (
    "penstock.program.layers", "penstock.program.optimizers", "penstock.exec.executor", "penstock.transpile.transpiler",
    "penstock.serving.storage", "penstock.ps.server", "penstock.ps.client", "penstock.ps.communicators.geo",
    "penstock.exec.parallel", "penstock.dataset", "penstock.io",
    "penstock.operators", "penstock.program.framework", "penstock.serving.server",
    "sympy", "torch.fx.experimental.symbolic_shapes",  # which torch imports for the shapes of some operators
)  # fmt: skip
_SUBREAPER, _DIE_WITH_PARENT = 36, 1  # of prctl


class Nursery:
    """The process that forks the others."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._answer()

    def ask(self, **request: Any) -> Any:
        """Ask for something."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the nursery ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        """End it, and with it whoever is left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Forked:
    """One process. `name`: a path; its output goes to files beside it that end in .out and .err."""

    def __init__(
        self, nursery: Nursery, name: Path, argv: Sequence[str], environ: Environ, *,
        limits: Mapping[str, int] | None = None, cwd: Path | None = None,
    ) -> None:  # fmt: skip
        self._nursery, self.name = nursery, name.name
        self._out, self._errors = name.with_name(f"{name.name}.out"), name.with_name(f"{name.name}.err")
        self.pid = nursery.ask(
            argv=list(argv), environ=dict(environ), limits=dict(limits or {}), cwd=None if cwd is None else str(cwd),
            out=str(self._out), errors=str(self._errors),
        )  # fmt: skip
        self._descriptor = os.pidfd_open(self.pid)
        self.status: int | None = None

    @property
    def output(self) -> str:
        """What it wrote to stdout so far."""
        return self._out.read_text() if self._out.exists() else ""

    @property
    def errors(self) -> str:
        """What it said on stderr so far."""
        return self._errors.read_text() if self._errors.exists() else ""

    def first_line(self, limit_s: float = BOUND_S) -> str:
        """Wait for a line on stdout, and return it; fail if it ends before."""
        deadline = time.monotonic() + limit_s
        while "\n" not in self.output:
            assert time.monotonic() < deadline and not self.has_ended(0.005), f"{self.name} says nothing: {self.errors}"
        return self.output.splitlines()[0]

    def signal(self, number: int) -> None:
        """Send a signal, which finds this process or nobody."""
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Kill it as a machine would; it has to have been at work."""
        self.signal(signal.SIGKILL)
        assert self.end() == -signal.SIGKILL

    def has_ended(self, limit_s: float) -> bool:
        """Wait for its end."""
        return self.status is not None or bool(select.select([self._descriptor], [], [], limit_s)[0])

    def end(self, limit_s: float = BOUND_S) -> int:
        """Wait for its end, and return its exit status, or the negative number of a signal."""
        if self.status is None:
            assert self.has_ended(limit_s), f"it runs after {limit_s:g} s: {self.errors}"
            self.status = int(self._nursery.ask(reap=self.pid))
            os.close(self._descriptor)
        return self.status

    def close(self) -> None:
        """End it, whatever it does."""
        if self.status is None:
            self.signal(signal.SIGKILL)
            self.end()


def all_end_well(processes: Sequence[Forked], limit_s: float = BOUND_S) -> None:
    """Wait until all have ended with 0. Fails as soon as one has not, with what all have said: see who was first."""
    deadline = time.monotonic() + limit_s
    while running := [one for one in processes if not one.has_ended(0)]:
        assert time.monotonic() < deadline, (
            f"{[one.name for one in running]} run after {limit_s:g} s: {said(processes)}"
        )
        running[0].has_ended(0.05)
        assert not any(one.end() for one in processes if one.has_ended(0)), said(processes)
    assert not any(one.end() for one in processes), said(processes)


def said(processes: Sequence[Forked]) -> str:
    """What every process said on stderr: who fails first is seldom the cause."""
    return "\n".join(f"== {process.name}, {process.status}\n{process.errors}" for process in processes)


# -- the process that forks ----------------------------------------------------------------------------


def main() -> list[str]:
    """Serve requests; return in each forked process, with what it is to run."""
    with importing():
        for name in _WARM:
            importlib.import_module(name)
    early = importlib.import_module("penstock.ps.settings")._started_ns.cache_info().currsize
    assert not early, "all processes would have the same default epoch"
    gc.collect()
    gc.freeze()  # what is not looked at by a forked process is not copied for it
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_SUBREAPER, 1) == 0
    print(json.dumps("warm"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            pid = os.fork()
            if not pid:
                assert libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL) == 0
                if not request.get("destructors"):  # what is registered last comes first, and gets the exit status
                    assert libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None) == 0
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
    """Take on the streams, environment, folder and limits of a request."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, path in ((1, request["out"]), (2, request["errors"])):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update({name: value for name, value in request["environ"].items() if value is not None})
    for name in (name for name, value in request["environ"].items() if value is None):
        os.environ.pop(name, None)
    if request.get("cwd") is not None:
        os.chdir(request["cwd"])
    for name, limit in request["limits"].items():
        which = getattr(resource, name)
        resource.setrlimit(which, (limit, resource.getrlimit(which)[1]))


def run(argv: list[str]) -> None:
    """Be a script, a module or some code; the process ends as that does."""
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102 the tests' own
        return
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    arguments = main()
    if arguments:
        run(arguments)
