"""Jobs of real processes, forked from one that has imported what they need."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.fluid_jobs import BOUND_S, Nursery


class Process:
    """One process of a job."""

    def __init__(self, nursery: Nursery, name: Path, argv: list[str], environ: dict[str, str]) -> None:
        self._nursery, self._out, self._errors = nursery, name.with_suffix(".out"), name.with_suffix(".err")
        self.pid = nursery.ask(argv=argv, environ=environ, limits={}, out=str(self._out), errors=str(self._errors))
        self._descriptor = os.pidfd_open(self.pid)
        self.status: int | None = None

    @property
    def said(self) -> str:
        """What it has written so far."""
        return "".join(path.read_text() for path in (self._out, self._errors) if path.exists())

    def kill(self) -> None:
        """Kill it as a machine would."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def end(self) -> int:
        """Wait for its end; return its exit status."""
        if self.status is None:
            ended = select.select([self._descriptor], [], [], BOUND_S)[0]
            if not ended:
                self.kill()
            self.status = int(self._nursery.ask(reap=self.pid))
            os.close(self._descriptor)
            assert ended, f"it hung: {self.said}"
        return self.status


Start = Callable[..., Process]


@pytest.fixture(scope="session")
def checkpoints_nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def start(checkpoints_nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Start processes: `start(script, "--option", …, NAME="value")`. What a test leaves running is killed."""
    made: list[Process] = []

    def begin(script: Path, *arguments: object, **environ: str) -> Process:
        name = tmp_path / f"process{len(made)}"
        told = {"OMP_NUM_THREADS": "1", "CPU_NUM": "1", **environ}
        made.append(Process(checkpoints_nursery, name, [str(script), *map(str, arguments)], told))
        return made[-1]

    yield begin
    for process in made:
        if process.status is None:
            process.kill()
            process.end()
