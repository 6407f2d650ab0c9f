"""A job of parameter servers on one host: which processes, with which environment, and what to do as they end.

Pure: the shell starts processes, looks at their exit statuses, and does what `verdict` says. A job is over when all its
trainers have ended; servers end by themselves then, or are asked to after a grace. The first process that ends with
another status than 0 ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.protocol import contract

Kind = Literal["pserver", "trainer"]
_WATCHED = (contract.SOCKET, contract.REPLICA_ID)


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start. `env`: what is added to the launcher's environment; None takes a variable away."""

    kind: Kind
    index: int
    env: Mapping[str, str | None]
    log: Path

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a job: servers first, since trainers wait for them. `endpoints`: of all servers, in order."""

    processes: tuple[Process, ...]
    endpoints: tuple[str, ...]

    def described(self) -> str:
        """Return the plan for a person, one line a process."""
        rows = [(p.name, self.endpoints[p.index] if p.kind == "pserver" else "", p.log) for p in self.processes]
        return "\n".join(f"  {name:<11} {endpoint:<21} {log}" for name, endpoint, log in rows)


def planned(
    endpoints: Sequence[str],
    num_trainers: int,
    log_dir: Path,
    environ: Mapping[str, str],
    *,
    defaults: Mapping[str, str],
) -> Plan:
    """Return the processes of a job. `defaults`: variables for all of them, unless `environ` sets them."""
    shared: dict[str, str | None] = {
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
        "PADDLE_TRAINERS_NUM": str(num_trainers),
        "PYTHONUNBUFFERED": "1",
        **{name: environ.get(name) or value for name, value in defaults.items()},
        **dict.fromkeys(_WATCHED),  # they name the launcher's own replica, which several processes cannot be
    }
    servers = []
    for index, endpoint in enumerate(endpoints):
        host, _, port = endpoint.rpartition(":")
        mine = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port, "PADDLE_TRAINER_ID": None}
        servers.append(_process("pserver", index, {**shared, **mine}, log_dir / f"serverlog.{index}"))
    trainers = []
    for index in range(num_trainers):
        own = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": str(index), "POD_IP": None, "PADDLE_PORT": None}
        trainers.append(_process("trainer", index, {**shared, **own}, log_dir / f"workerlog.{index}"))
    return Plan((*servers, *trainers), tuple(endpoints))


def _process(kind: Kind, index: int, env: Mapping[str, str | None], log: Path) -> Process:
    return Process(kind, index, {**env, contract.ROLE: kind, contract.INDEX: str(index)}, log)


@dataclass(frozen=True, slots=True)
class Running:
    """Go on waiting."""


@dataclass(frozen=True, slots=True)
class Draining:
    """All trainers have ended well; servers have until the end of their grace to do so."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Process number `place` of the plan has ended with `status` (negative: by that signal): stop the others."""

    place: int
    status: int

    @property
    def exit_status(self) -> int:
        """What the launcher ends with, as a shell would."""
        return 128 - self.status if self.status < 0 else self.status


@dataclass(frozen=True, slots=True)
class Finished:
    """Everything has ended well. `lingering`: servers that have to be stopped, since their grace is over."""

    lingering: tuple[int, ...] = ()


Verdict = Running | Draining | Failed | Finished


def verdict(plan: Plan, ended: Sequence[tuple[int, int]], *, grace_over: bool) -> Verdict:
    """Say what to do. `ended`: (place in the plan, status) in the order in which processes were seen to end."""
    for place, status in ended:
        if status != 0:
            return Failed(place, status)
    over = {place for place, _ in ended}
    if any(p.kind == "trainer" and place not in over for place, p in enumerate(plan.processes)):
        return Running()
    left = tuple(place for place in range(len(plan.processes)) if place not in over)
    if left and not grace_over:
        return Draining()
    return Finished(left)


def status_text(status: int) -> str:
    """Say how a process ended."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"
