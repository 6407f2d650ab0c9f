"""Desired x observed -> instructions. No I/O, no clock; the agent carries the instructions out.

1. What is desired and not here is started, once: a replica that has ended is never started again, since a retry is a
   new replica with a new id.
2. What is here, alive and not desired is stopped. If it is preempted, it gets a notice first, once, whose end stops it;
   preempted no more, since another process of its attempt has failed, it is stopped at once.
3. A replica whose desired epoch is newer is stopped; an order with an older epoch than the running one is stale and
   changes nothing (fencing).
4. What has ended, is not desired, and whose end and log the server has confirmed, is forgotten (its folder goes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from penstock.protocol.agent import Desired, Preemption


class Life(Enum):
    """Of a replica on this node, as far as decisions need it."""

    ALIVE = "alive"
    NOTICED = "noticed"  # it was asked to save and to end
    STOPPING = "stopping"
    ENDED = "ended"  # its end is not yet confirmed by the server
    SETTLED = "settled"  # its end and its whole log are confirmed


@dataclass(frozen=True, slots=True)
class Observed:
    """One replica that this node has."""

    epoch: int
    life: Life


@dataclass(frozen=True, slots=True)
class Start:
    """Start this replica."""

    desired: Desired


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this replica with its own grace."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Ask this replica to save and to end by itself."""

    replica_id: str
    preemption: Preemption


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what is left of this replica."""

    replica_id: str


Instruction = Start | Stop | Preempt | Forget
NONE_PREEMPTED: Mapping[str, Preemption] = {}


def reconcile(
    desired: Mapping[str, Desired],
    observed: Mapping[str, Observed],
    preempted: Mapping[str, Preemption] = NONE_PREEMPTED,
) -> list[Instruction]:
    """Return what to do, in a fixed order: stops and notices, forgets, starts."""
    stops: list[Instruction] = []
    forgets: list[Instruction] = []
    for replica_id, seen in observed.items():
        wanted = desired.get(replica_id)
        if wanted is not None and wanted.epoch <= seen.epoch:
            continue
        preemption = preempted.get(replica_id)
        if seen.life is Life.ALIVE and preemption is not None:
            stops.append(Preempt(replica_id, preemption))
        elif seen.life in (Life.ALIVE, Life.NOTICED) and preemption is None:
            stops.append(Stop(replica_id))
        elif seen.life is Life.SETTLED:
            forgets.append(Forget(replica_id))
    starts = [Start(wanted) for replica_id, wanted in desired.items() if replica_id not in observed]
    return [*stops, *forgets, *starts]
