"""What happens in a run of chaos, from a seed alone: which jobs, and which faults at what time. Pure.

The same seed, duration and numbers give the same plan. What a fault hits, such as one of the replicas that run at that
moment, is drawn when it happens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

GAP_S = 3.0
"""Mean time between faults. They overlap: a node may be cut off while the server is down."""
LEAD_S = 5.0
DURATIONS_S = (0.0, 1.0, 3.0, 6.0, 10.0, 20.0, 30.0)
FAULTS = {
    "agent killed": 4, "agent stopped": 3, "server killed": 3, "server stopped": 2, "guard killed": 2,
    "replica killed": 3, "replica stopped": 1, "partition": 3, "deafened": 2, "silenced": 2, "job cancelled": 1,
}  # fmt: skip
"""Faults and their weights. deafened, silenced: packets are lost one way alone, and connections are half open."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the node with `number` (no matter to those of the server and of jobs), from `at` for `for_s`."""

    at: float
    what: str
    number: int
    for_s: float


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job to be submitted at `at`: arguments of `World.submit`."""

    at: float
    name: str
    lines: int
    pause_s: float
    code: int
    more: str
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run of `for_s` seconds, in which everything is begun; what is left then is given time to end."""

    seed: int
    for_s: float
    jobs: tuple[PlannedJob, ...]
    faults: tuple[Fault, ...]


def make_plan(seed: int, *, for_s: float, num_nodes: int, num_jobs: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(seed)
    jobs = tuple(_job(draw, i, at=for_s * 0.8 * i / num_jobs) for i in range(num_jobs))
    faults = []
    at = LEAD_S + draw.expovariate(1 / GAP_S)
    while at < for_s:
        what = draw.choices(list(FAULTS), list(FAULTS.values()))[0]
        longest = for_s / 5  # of a short run none takes all of it
        for_s_of_fault = min(draw.choice(DURATIONS_S), longest)
        faults.append(Fault(at, what, draw.randrange(num_nodes), for_s_of_fault))
        at += draw.expovariate(1 / GAP_S)
    return Plan(seed, for_s, jobs, tuple(faults))


def _job(draw: random.Random, number: int, *, at: float) -> PlannedJob:
    """Return a job: alone, a gang, with a pserver or checkpoints, one that fails, is deaf, or heeds its lease."""
    kinds = ["alone", "alone", "gang", "gang", "pserver", "fails", "crashes", "deaf", "heeds lease", "checkpoints"]
    kind = draw.choice(kinds)
    lines, pause_s = draw.randrange(100, 500), 0.1
    spec: dict[str, Any] = {"restart": {"max_restarts": 20, "on": ["infra", "user"]}, "stop_grace_s": 2.0}
    more, code = "", 0
    match kind:
        case "gang":
            spec["trainers"] = _small(draw.randrange(2, 5))
        case "pserver":
            spec.update(mode="pserver", trainers=_small(draw.randrange(1, 3)), pservers=_small(1))
        case "fails":
            code, spec["restart"] = 3, {"max_restarts": 2, "on": ["infra", "user"]}
        case "crashes":
            more = "crash"
        case "deaf":
            more = "deaf"
        case "heeds lease":
            spec["on_disconnect"] = "stop"
        case "checkpoints":
            more, lines = "checkpoints", lines // 4
    name = f"{kind.replace(' ', '-')}-{number}"
    return PlannedJob(at, name, lines, pause_s, code, more, spec)


def _small(count: int) -> dict[str, Any]:
    return {"count": count, "cpus": 1, "memory": "16MiB"}
