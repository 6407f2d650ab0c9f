"""Jobs of real processes: servers and trainers that run `wide_and_deep.py`, what became of them, and what they left."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.endpoints import free_endpoints
from tests.faults.wide_and_deep import FAR, STEPS

from penstock.ps.snapshot import newest

ROOT, SCRIPT = Path(__file__).parents[2], Path(__file__).with_name("wide_and_deep.py")
BOUND_S = 120.0  # for what takes a few seconds on a machine with nothing else to do
QUICK = {
    "PENSTOCK_JOB_ID": "j", "PENSTOCK_PS_TOKEN": "t", "PENSTOCK_PS_LEASE_S": "6", "PENSTOCK_PS_DEADLINE_S": "100",
    "PENSTOCK_PS_START_S": "60", "PENSTOCK_PS_SNAPSHOT_S": "0.3", "OMP_NUM_THREADS": "1", "CPU_NUM": "1",
}  # fmt: skip
Environ = dict[str, str]


def until(holds: Callable[[], Any], what: str, limit_s: float = BOUND_S) -> None:
    """Wait for a condition."""
    pause, deadline = threading.Event(), time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        pause.wait(0.003)


class Nursery:
    """The process that forks the others."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._answer()

    def ask(self, **request: Any) -> Any:
        """Ask for something; see `tests.faults.nursery`."""
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


class Process:
    """One process of a job."""

    def __init__(self, nursery: Nursery, name: Path, arguments: Sequence[str], environ: Environ, limits: Any) -> None:
        self._nursery, self.name = nursery, name.name
        self._out, self._errors = name.with_suffix(".out"), name.with_suffix(".err")
        self.pid = nursery.ask(
            argv=[str(SCRIPT), *arguments], environ=environ, limits=limits, out=str(self._out),
            errors=str(self._errors),
        )  # fmt: skip
        self._descriptor = os.pidfd_open(self.pid)
        self.status: int | None = None

    @property
    def errors(self) -> str:
        """What it said on stderr so far."""
        return self._errors.read_text() if self._errors.exists() else ""

    @property
    def losses(self) -> dict[int, str]:
        """The steps that were acknowledged so far, with their losses to the bit."""
        text = self._out.read_text() if self._out.exists() else ""
        whole = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {int(line[0]): line[1] for line in whole if line != ["end"]}

    def reaches(self, steps: int) -> None:
        """Wait until so many steps are acknowledged; fail if it ends before."""
        until(lambda: len(self.losses) >= steps or self.has_ended(0), f"step {steps}")
        assert len(self.losses) >= steps, self.errors

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


class Job:
    """A job of two trainers. Servers are started by endpoint; a start after a kill is at the same one."""

    def __init__(self, nursery: Nursery, folder: Path, *, mode: str = "sync", servers: int = 1, **environ: str) -> None:
        self._nursery, self.folder, self.mode = nursery, folder, mode
        self.environ: Environ = {**QUICK, "PENSTOCK_PS_STATE_DIR": str(folder / "state"), **environ}
        self.endpoints = free_endpoints(servers)
        self.processes: list[Process] = []
        self._numbers = itertools.count()
        folder.mkdir(exist_ok=True)

    def server(self, index: int = 0, *, limits: Any = None) -> Process:
        """Start a server."""
        endpoint = self.endpoints[index]
        return self._start(["pserver", endpoint, "--servers", ",".join(self.endpoints)], {}, limits)

    def trainer(
        self, number: int, *options: object, at: Sequence[str] = (), limits: Any = None, **environ: str
    ) -> Process:
        """Start a trainer. `at`: where it finds the servers, if not at their endpoints."""
        arguments = ["trainer", str(number), "--servers", ",".join(at or self.endpoints), *map(str, options)]
        return self._start(arguments, environ, limits)

    def _start(self, arguments: list[str], environ: Environ, limits: Any) -> Process:
        name = self.folder / f"{next(self._numbers)}-{arguments[0]}"
        arguments += ["--mode", self.mode]
        self.processes.append(Process(self._nursery, name, arguments, self.environ | environ, limits or {}))
        return self.processes[-1]

    def all_end_well(self) -> None:
        """Wait until all end with 0, but for those that have ended already."""
        for process in self.processes:
            assert process.status is not None or process.end() == 0, self.said

    @property
    def said(self) -> str:
        """What every process said on stderr: who fails first is seldom the cause."""
        return "\n".join(f"== {process.name}, {process.status}\n{process.errors}" for process in self.processes)

    def close(self) -> None:
        """End what runs."""
        for process in self.processes:
            process.close()


class Left:
    """What a job's servers left: values by parameter; rows by id of the tables that count steps."""

    def __init__(self, job: Job) -> None:
        parts: dict[str, dict[int, Any]] = {}
        self.far: dict[int, float] = {}
        for folder in sorted((job.folder / "state").iterdir()):
            found = newest(folder)
            assert found is not None
            assert found.cut.is_finished
            for item in found.items():
                name, _, part = item.name.partition("@")
                if item.is_part:
                    rows = item.tensors["rows"].numpy()
                    assert (rows[:, :1] == rows).all()
                    self.far |= dict(zip(item.tensors["ids"].tolist(), rows[:, 0].tolist(), strict=True))
                elif name in item.tensors:
                    parts.setdefault(name, {})[int(part)] = item.tensors[name].numpy()
        self.values = {n: np.concatenate([p[i] for i in sorted(p)]) for n, p in parts.items()}

    @property
    def wide(self) -> list[float]:
        """Twice the rounds; what both trainers added by themselves."""
        weights: list[float] = self.values["wide"].ravel().tolist()
        return weights

    def applied(self, trainer: int) -> dict[int, float]:
        """Return step -> how much it added, of the steps of a trainer that were applied; both tables say the same."""
        near = self.values["near"][trainer * STEPS : (trainer + 1) * STEPS]
        assert (near[:, :1] == near).all()
        counted = {int(step): float(near[step, 0]) for step in np.nonzero(near[:, 0])[0]}
        ids = {i: v for i, v in self.far.items() if trainer * FAR <= i < trainer * FAR + STEPS and v}
        assert {i - trainer * FAR: v for i, v in ids.items()} == counted
        return counted


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a sync job of two trainers comes to, of `steps` steps each, and how long it took."""

    losses: list[dict[int, str]]
    left: Left
    steps: int
    took_s: float

    @property
    def slack_s(self) -> float:
        """How late one may be on this machine, which may be busy with other things."""
        return 10.0 + 4.0 * self.took_s

    def has_counted(self, left: Left, share: float) -> None:
        """See that each step of both trainers was applied once, each with `share` of what its trainer sent / 2."""
        each = self.steps * share
        assert left.applied(0) == left.applied(1) == dict.fromkeys(range(self.steps), share)
        assert left.wide == [2 * each, each, each]

    def is_what_became_of(self, job: Job, trainers: Sequence[Process]) -> None:
        """See that a job of as many steps lost nothing, repeated nothing, and, in sync mode, is equal to the bit.

        An update in async mode is not divided by the number of trainers, and its order is not that of others.
        """
        left = Left(job)
        self.has_counted(left, 1.0 if job.mode == "sync" else 2.0)
        if job.mode == "sync":
            assert [t.losses for t in trainers] == self.losses
            assert bits(left) == bits(self.left)
            assert left.far == self.left.far


def bits(left: Left) -> dict[str, bytes]:
    """Return all dense values."""
    return {name: values.tobytes() for name, values in left.values.items()}
