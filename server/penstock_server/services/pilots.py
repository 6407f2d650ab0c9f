"""Pilots: nodes that are there for a while, and those that `penstock cluster` asks other schedulers for.

`takes` and `bound` decide without I/O which job may be placed on a node that leaves. `PilotBoard` holds what the
commands report of their pilots, in memory: a report is the whole of a cluster and comes every few seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.protocol.jobspec import JobSpec
from penstock_server.clock import Clock
from penstock_server.problems import Problem
from penstock_server.schemas import api
from penstock_server.services.placement import Chosen, Need, Room, Waits, labelled, place

MAX_CLUSTERS = 64
STALE_S = 60.0
"""After so long without a report a pilot's reason says so."""


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a node is there. `seconds_left`: None without a limit. `job_id`: the one job that it takes, if known."""

    seconds_left: float | None = None
    once: bool = False
    leaving: bool = False
    job_id: str | None = None


STAYS = Stay()


def takes(stay: Stay, job_id: str, max_duration_s: float | None) -> bool:
    """Whether a job may be placed on a node, as far as the time and the terms of the node go."""
    if stay.leaving or (stay.once and stay.job_id not in (None, job_id)):
        return False
    if stay.seconds_left is None:
        return True
    return stay.seconds_left > 0 and stay.seconds_left >= (max_duration_s or 0.0)


def place_job(
    needs: Sequence[Need], rooms: Sequence[Room], stays: dict[str, Stay], job_id: str, spec: JobSpec
) -> Chosen | Waits:
    """Place a job on the nodes that have its labels and stay long enough for it, or explain why not."""
    max_duration_s, with_labels = spec.max_duration_s, labelled(spec.node_selector, rooms)
    if isinstance(with_labels, Waits):
        return with_labels
    offered = [room for room in with_labels if takes(stays.get(room.node_id, STAYS), job_id, max_duration_s)]
    if rooms and not offered:
        limit = "" if max_duration_s is None else f", or leave within the {max_duration_s:g} s of max_duration_s"
        why = f"waits for a node: those that are READY are pilots that drain or have another job{limit}"
        return Waits(why, forever=True)
    return _among(spec, place(needs, offered))


def _among(spec: JobSpec, answer: Chosen | Waits) -> Chosen | Waits:
    """Say of a job that waits for room that only nodes with its labels were looked at."""
    if isinstance(answer, Chosen) or not spec.node_selector:
        return answer
    return replace(answer, why=f"{answer.why} Only nodes with the labels of node_selector were looked at.")


def bound(stays: dict[str, Stay], placed: Chosen, job_id: str) -> dict[str, Stay]:
    """Return the stays once a job is placed: nodes that take one job take that one."""
    mine = {node_id: replace(stays[node_id], job_id=job_id) for node_id in placed.node_ids if node_id in stays}
    return {**stays, **mine}


class PilotBoard:
    """The newest report of each cluster. One event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[float, list[api.PilotReport]]] = {}

    def report(self, cluster: str, pilots: Sequence[api.PilotReport]) -> None:
        """Replace what is known of a cluster. Raises a problem if there are too many clusters."""
        if cluster not in self._reports and len(self._reports) >= MAX_CLUSTERS:
            raise Problem(409, "too_many_clusters", f"{MAX_CLUSTERS} clusters report pilots already")
        if pilots:
            self._reports[cluster] = self._clock.monotonic(), list(pilots)
        else:
            self._reports.pop(cluster, None)

    def all(self) -> list[api.Pilot]:
        """Return every pilot, by cluster, in the order of its report."""
        now = self._clock.monotonic()
        return [
            api.Pilot(cluster=cluster, name=one.name, state=one.state, reason=_aged(one.reason, now - at))
            for cluster, (at, reported) in sorted(self._reports.items())
            for one in reported
        ]


def _aged(reason: str, age_s: float) -> str:
    return reason if age_s < STALE_S else f"{reason} (reported {age_s:.0f} s ago: is 'penstock cluster' running?)"
