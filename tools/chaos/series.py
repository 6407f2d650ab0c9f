"""The series of counting processes: what the server holds of each beside what its process has logged. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tools.chaos.history import History, PointsSeen, ReplicaRecord, SeriesSeen
from tools.chaos.run_invariants import undisturbed

from penstock.protocol.states import TERMINAL_REPLICA

SEND_S = 2.0
"""Telemetry is gathered for 0.1 s before it is sent; the rest is for a busy machine."""


def with_points(history: History, seen: Iterable[PointsSeen]) -> History:
    """Add to the series that the server holds what the processes of replicas that have ended have logged."""
    stored = {one.replica_id: one for one in history.series}
    replicas = {one.id: one for one in history.replicas if one.state in TERMINAL_REPLICA}
    lost = {one.job_id: one.lost for one in history.series}
    found = []
    for one in seen:
        replica = replicas.get(one.replica_id)
        if replica is not None:
            empty = SeriesSeen(replica.job_id, replica.attempt, (), (), lost.get(replica.job_id, 0), replica.id)
            held = stored.get(replica.id, empty)
            written = tuple(step for _, step in one.points)
            found.append(replace(held, written=written, unsent=_unsent(history, replica, one, held)))
    return replace(history, series=tuple(found))


def _unsent(history: History, replica: ReplicaRecord, seen: PointsSeen, held: SeriesSeen) -> tuple[int, ...]:
    """Return the newest points of a process that was killed, for which it had no `SEND_S` without a disturbance.

    One that closed its telemetry has sent all, or left it to its agent.
    """
    if seen.is_closed:
        return ()
    newest = max(held.stored, default=-1)
    later = [(at, step) for at, step in seen.points if step > newest]
    return tuple(step for at, step in later if _calm_s(history, replica, at, seen.last) < SEND_S)


def _calm_s(history: History, replica: ReplicaRecord, begin: float, end: float) -> float:
    return sum(to - at for at, to in undisturbed(history, replica.node_id, [(begin, end)]))
