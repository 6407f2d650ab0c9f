"""Nodes that jobs which wait for room reserve, and those on which jobs after them are placed meanwhile. Pure.

A job that waits for room reserves every node that it could use, whole: no job after it is placed there, else small jobs
would starve it. On a node that it could not use, by label, by size or by the time that a pilot has left, jobs after it
start: they delay it by nothing. Wall times are not known, so nothing is placed on a reserved node "in the meantime".

Source: conservative backfill, Mu'alem and Feitelson, "Utilization, Predictability, Workloads, and User Runtime
Estimates in Scheduling the IBM SP2 with Backfilling" (2001), without estimates.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from penstock.protocol.jobspec import JobSpec
from penstock_server.services.pilots import STAYS, Stay, place_job, takes
from penstock_server.services.placement import BEHIND, Chosen, Need, Room, Waits, could_hold, lacks

LOOKED_AT = 32
"""Jobs of a project that wait for room, and are looked at in one pass; those after them wait for these."""
RESERVED = "is reserved for jobs before it that wait for room"


def decide(
    needs: Sequence[Need],
    rooms: Sequence[Room],
    reserved: Set[str],
    stays: dict[str, Stay],
    job_id: str,
    spec: JobSpec,
) -> Chosen | Waits:
    """Place a job on nodes that no job before it reserves, or explain why not. `reserved`: ids of nodes."""
    answer = place_job(needs, [room for room in rooms if room.node_id not in reserved], stays, job_id, spec)
    if isinstance(answer, Chosen) or not reserved:
        return answer
    whole = place_job(needs, rooms, stays, job_id, spec)
    if isinstance(whole, Waits) and (whole.forever or reserved.isdisjoint(usable(needs, rooms, stays, job_id, spec))):
        return whole
    return Waits(BEHIND, forever=False)


def usable(
    needs: Sequence[Need], rooms: Sequence[Room], stays: dict[str, Stay], job_id: str, spec: JobSpec
) -> set[str]:
    """Return the nodes that a job could use once they are empty, and those that share a host's ports with one."""
    mine = [
        room
        for room in rooms
        if not lacks(spec.node_selector, room.labels)
        and takes(stays.get(room.node_id, STAYS), job_id, spec.max_duration_s)
        and could_hold(needs, room)
    ]
    hosts = {room.host for room in mine if room.host}
    return {room.node_id for room in mine} | {room.node_id for room in rooms if room.host in hosts}


def behind_many(project: str) -> str:
    """Describe a job that is not looked at, since so many of its project before it wait for room."""
    return f"waits behind {LOOKED_AT} others of project {project!r} that wait for room"
