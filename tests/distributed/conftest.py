"""Collective jobs of real processes, forked from one that has imported what they need."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.endpoints import free_endpoints
from tests.support.nursery import Nursery
from tests.support.waiting import until

SCRIPT = Path(__file__).with_name("nccl2_job.py")
BOUND_S = 120.0  # for what takes a few seconds on a machine with nothing else to do


class Rank:
    """One trainer."""

    def __init__(
        self, nursery: Nursery, folder: Path, number: int, arguments: list[str], environ: dict[str, str], *,
        destructors: bool,
    ) -> None:  # fmt: skip
        self._nursery, self.number = nursery, number
        self._out, self._errors = folder / f"out{number}", folder / f"err{number}"
        self._left = folder / f"rank{number}.npz"
        told = {**environ, "PADDLE_TRAINER_ID": str(number), "OMP_NUM_THREADS": "1"}
        self.pid = nursery.ask(
            argv=[str(SCRIPT), str(folder), *arguments], environ=told, limits={}, out=str(self._out),
            errors=str(self._errors), destructors=destructors,
        )  # fmt: skip
        self._descriptor = os.pidfd_open(self.pid)
        self.status: int | None = None

    @property
    def errors(self) -> str:
        """What it said on stderr so far."""
        return self._errors.read_text() if self._errors.exists() else ""

    @property
    def steps(self) -> int:
        """Steps that it has finished."""
        return self._out.read_text().count("\n") if self._out.exists() else 0

    def said(self, word: str) -> int:
        """Return the number that stands behind a word in its output."""
        (line,) = [line for line in self._out.read_text().splitlines() if line.startswith(word)]
        return int(line.removeprefix(word))

    def reaches(self, steps: int) -> None:
        """Wait for a step."""
        until(lambda: self.steps >= steps, f"step {steps} of rank {self.number}: {self.errors}")

    def kill(self) -> None:
        """Kill it as a machine would."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def stop(self) -> None:
        """Let it stand still, as a machine under too much load, or a debugger, would."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGSTOP)

    def end(self) -> int:
        """Wait for its end; return its exit status."""
        if self.status is None:
            ended = select.select([self._descriptor], [], [], BOUND_S)[0]
            if not ended:
                self.kill()
            self.status = int(self._nursery.ask(reap=self.pid))
            os.close(self._descriptor)
            assert ended, f"rank {self.number} hung: {self.errors}"
        return self.status

    def values(self) -> dict[str, np.ndarray]:
        """Return the variables that it has left; it has ended well."""
        assert self.end() == 0, self.errors
        with np.load(self._left) as found:
            return dict(found)


Start = Callable[..., list[Rank]]


@pytest.fixture
def trainers(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Start trainers: `trainers(2, "--steps", 4)`. `only`: numbers of those that are.

    `own`, `environ_of`: options and variables of one. `destructors`: they end as processes do that nobody forked.
    """
    made: list[Rank] = []

    def start(
        count: int, *options: object, only: tuple[int, ...] | None = None, own: dict[int, list[str]] | None = None,
        environ_of: dict[int, dict[str, str]] | None = None, destructors: bool = False, **environ: str,
    ) -> list[Rank]:  # fmt: skip
        folder = tmp_path / str(len(made))
        folder.mkdir()
        told = {"PADDLE_TRAINER_ENDPOINTS": ",".join(free_endpoints(count)), "CPU_NUM": "1", **environ}
        ranks = []
        for number in range(count) if only is None else only:
            arguments = [*(str(o) for o in options), *(own or {}).get(number, [])]
            told_one = {**told, **(environ_of or {}).get(number, {})}
            ranks.append(Rank(nursery, folder, number, arguments, told_one, destructors=destructors))
        made.extend(ranks)
        return ranks

    yield start
    for rank in made:
        if rank.status is None:
            rank.kill()
            rank.end()


def differences(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the largest difference of each variable."""
    assert left.keys() == right.keys()
    return {name: float(np.abs(left[name] - right[name]).max(initial=0)) for name in left}
