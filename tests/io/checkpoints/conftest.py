"""Jobs of real processes, forked from one that has imported what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.nursery import Forked, Nursery


class Process(Forked):
    """One process of a job."""

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self.output + self.errors


Start = Callable[..., Process]


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Start]:
    """Start processes: `start(script, "--option", …, NAME="value")`. What a test leaves running is killed."""
    made: list[Process] = []

    def begin(script: Path, *arguments: object, **environ: str) -> Process:
        name = tmp_path / f"process{len(made)}"
        told = {"OMP_NUM_THREADS": "1", "CPU_NUM": "1", **environ}
        made.append(Process(nursery, name, [str(script), *map(str, arguments)], told))
        return made[-1]

    yield begin
    for process in made:
        process.close()
