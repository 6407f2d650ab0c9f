"""The processes of a job on one host: their environment, and what to do as they end.

Pure: the supervisor starts processes, looks at their exit statuses, and does what `verdict` says. A job is over when
all its trainers have ended; servers end by themselves then, or are asked to after a grace. The first process that ends
with another status than 0 ends the job.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from penstock.identity import (
    NUM_TRAINERS,
    POD_IP,
    PORT,
    REPLICA_ID,
    REPLICA_INDEX,
    REPLICA_ROLE,
    SERVERS,
    SOCKET,
    TRAINER_ID,
    TRAINING_ROLE,
)  # fmt: skip

Kind = Literal["pserver", "trainer"]
_OF_A_REPLICA = (SOCKET, REPLICA_ROLE, REPLICA_INDEX)


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start. `env`: what is added to the launcher's environment; None takes a variable away.

    `index`: among those of its kind in the whole job. `name`: how messages call it. `endpoint`: '' if it has none.
    """

    kind: Kind
    index: int
    env: Mapping[str, str | None]
    log: Path
    name: str
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a job on this host: servers first, since trainers wait for them."""

    processes: tuple[Process, ...]

    def described(self) -> str:
        """Return the plan for a person, one line a process."""
        return "\n".join(f"  {p.name:<11} {p.endpoint:<21} {p.log}" for p in self.processes)


@dataclass(frozen=True, slots=True)
class Share:
    """Which of a job's servers and trainers, by number, are this host's."""

    servers: Sequence[int]
    trainers: Sequence[int]


def planned(
    endpoints: Sequence[str],
    num_trainers: int,
    log_dir: Path,
    environ: Mapping[str, str],
    *,
    defaults: Mapping[str, str],
    share: Share | None = None,
) -> Plan:
    """Return the processes of a job with parameter servers. `defaults`: variables for all, unless `environ` sets them.

    `endpoints`, `num_trainers`: of the whole job. `share`: what of it is this host's; None: all.
    """
    share = share or Share(range(len(endpoints)), range(num_trainers))
    shared: dict[str, str | None] = {
        SERVERS: ",".join(endpoints),
        NUM_TRAINERS: str(num_trainers),
        **for_all(),
        **{name: environ.get(name) or value for name, value in defaults.items()},
    }
    servers = []
    for index in share.servers:
        host, _, port = endpoints[index].rpartition(":")
        mine = {
            TRAINING_ROLE: "PSERVER",
            POD_IP: host,
            PORT: port,
            TRAINER_ID: None,
        }
        env = {**shared, **mine, **replica_variables("pserver", index)}
        log = log_dir / f"serverlog.{index}"
        servers.append(Process("pserver", index, env, log, f"pserver {index}", endpoints[index]))
    trainers = []
    for index in share.trainers:
        own = {
            TRAINING_ROLE: "TRAINER",
            TRAINER_ID: str(index),
            POD_IP: None,
            PORT: None,
        }
        env = {**shared, **own, **replica_variables("trainer", index)}
        trainers.append(Process("trainer", index, env, log_dir / f"workerlog.{index}", f"trainer {index}"))
    return Plan((*servers, *with_one_watched(trainers, environ)))


def for_all() -> dict[str, str | None]:
    """Return what is set for every process of a launcher: unbuffered output, no reports as the launcher's replica.

    The replica's id stays: by it an agent finds what is left of a launcher that was killed.
    """
    return {"PYTHONUNBUFFERED": "1", SOCKET: None}


def with_one_watched(trainers: Sequence[Process], environ: Mapping[str, str]) -> list[Process]:
    """Let the first trainer report in the place of its launcher, if that is a replica of a job.

    Not all of them: the steps of several processes would mix in the figures of one replica.
    """
    if not (environ.get(SOCKET) and environ.get(REPLICA_ID)):
        return list(trainers)
    env = {name: value for name, value in trainers[0].env.items() if name not in _OF_A_REPLICA}
    return [replace(trainers[0], env=env), *trainers[1:]]


def replica_variables(kind: Kind, index: int) -> dict[str, str | None]:
    """Return which process of its job one is, as telemetry reads it."""
    return {REPLICA_ROLE: kind, REPLICA_INDEX: str(index)}


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
    """Decide what to do. `ended`: (place in the plan, status) in the order in which processes were seen to end."""
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
    """Describe how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"signal {-status} ({names[-status]})" if -status in names else f"signal {-status}"
