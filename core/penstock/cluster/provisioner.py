"""The seam to a scheduler that runs pilots: plan, launch, poll, cancel. Every engine passes tests/engines/contract.py.

Pilots come in gangs: what one `launch` asks for. A gang has a name of its own, and its pilots are `NAME-0` to
`NAME-(count - 1)`, which are also the names of their nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from penstock.errors import Unavailable


class EngineAway(Unavailable):
    """The scheduler did not take a call; a retry may help."""

    code = "engine_unreachable"


@dataclass(frozen=True, slots=True)
class Shape:
    """What one pilot has."""

    cpus: int
    memory_bytes: int
    gpus: int = 0

    @property
    def memory_mib(self) -> int:
        """Whole MiB, rounded up."""
        return -(-self.memory_bytes // (1 << 20))


@dataclass(frozen=True, slots=True)
class Request:
    """A gang. `ttl_s`: how long each pilot serves. `token`: a reusable join token, also in `token_file` (0600).

    `labels`: of the nodes of the pilots.
    """

    name: str
    count: int
    shape: Shape
    ttl_s: float
    url: str
    token: str
    token_file: Path
    once: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)

    def pilots(self) -> tuple[str, ...]:
        """Return the names of the pilots."""
        return tuple(f"{self.name}-{index}" for index in range(self.count))

    def agent_arguments(self) -> list[str]:
        """Return the arguments of `penstock agent join`, without name, folder and token, which the engine adds."""
        shape = self.shape
        return [
            *("--url", self.url, "--ttl", f"{self.ttl_s:g}", "--cpus", str(shape.cpus), "--gpus", str(shape.gpus)),
            *("--memory", str(shape.memory_bytes), *(["--once"] if self.once else [])),
            *(f"--label={key}={value}" for key, value in sorted(self.labels.items())),
        ]


class Phase(StrEnum):
    """How far a pilot is, as its scheduler says."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class Pilot:
    """One pilot, as its scheduler describes it. `detail`: where it runs, or what it waits for, or how it ended."""

    name: str
    phase: Phase
    detail: str = ""


class Provisioner(Protocol):
    """A scheduler. Calls block, for seconds at most, and raise EngineAway if it cannot be reached."""

    @property
    def engine(self) -> str:
        """Its name for a person."""

    def plan(self, request: Request) -> str:
        """Return what `launch` would submit, without secrets. Changes nothing."""

    def launch(self, request: Request) -> str:
        """Submit a gang and return its handle, which outlives this process.

        Idempotent by the name of the gang, so that a caller that was killed before it stored the handle asks once more.
        Raises UserError for a request that the scheduler will never take.
        """

    def poll(self, handle: str) -> tuple[Pilot, ...]:
        """Return the pilots of a gang that the scheduler still knows; none of a gang that it does not know."""

    def cancel(self, handle: str, names: Collection[str] = ()) -> None:
        """End some pilots, or without names the gang. Those that have ended, or are not known, are passed over."""
