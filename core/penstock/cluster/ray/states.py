"""The pilots of a gang, from what Ray's tables and the gang's own actor say. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.cluster.provisioner import Phase, Pilot, Request

RESCHEDULING = "RESCHEDULING"
_HANDLE = re.compile(r"(?P<gang>.+)\.(?P<count>\d+)x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group. `places`: bundle to the id of its node, without those that have none."""

    state: str = ""
    places: Mapping[int, str] = field(default_factory=dict)


def group(table: Mapping[str, Any]) -> Group:
    """Return what an entry of `ray.util.placement_group_table` says."""
    places = {int(index): node for index, node in table.get("bundles_to_node_id", {}).items() if node}
    return Group(str(table.get("state", "")), places)


def pilots(
    gang: str, count: int, placed: Group, ended: Mapping[int, str], nodes: Mapping[str, str], room: str
) -> tuple[Pilot, ...]:
    """Return every pilot. `ended`: index to how; `nodes`: id to address, of those that are alive; `room`: what is free.

    A pilot runs while its bundle has a place on a node that is alive: Ray starts its actor there, and again if it dies.
    """
    return tuple(_pilot(f"{gang}-{index}", index, placed, ended, nodes, room) for index in range(count))


def _pilot(
    name: str, index: int, placed: Group, ended: Mapping[int, str], nodes: Mapping[str, str], room: str
) -> Pilot:
    if index in ended:
        return Pilot(name, Phase.ENDED, ended[index])
    node = placed.places.get(index, "")
    if node in nodes:
        return Pilot(name, Phase.RUNNING, f"running on {nodes[node]}")
    if node or placed.state == RESCHEDULING:
        return Pilot(name, Phase.PENDING, f"its node was lost; waits for room on another; {room}")
    if not placed.state:
        return Pilot(name, Phase.PENDING, "its placement group is being made")
    return Pilot(name, Phase.PENDING, f"its gang waits for room; {room}")


def free(available: Mapping[str, float], total: Mapping[str, float]) -> str:
    """Return how much of CPUs and memory no bundle has."""
    cpus = f"{available.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs"
    gib = f"{available.get('memory', 0) / (1 << 30):.3g} of {total.get('memory', 0) / (1 << 30):.3g} GiB"
    return f"free: {cpus}, {gib}"


def bundle(request: Request) -> dict[str, float]:
    """Return the resources of a pilot, under Ray's names."""
    shape = request.shape
    return {"CPU": shape.cpus, "memory": shape.memory_bytes, **({"GPU": shape.gpus} if shape.gpus else {})}


def new_handle(gang: str, count: int, unique: str) -> str:
    """Return the name of a gang's actor; its pilots' are `HANDLE.INDEX`. `unique`: hexadecimal digits."""
    return f"{gang}.{count}x{unique}"


def gang_and_count(handle: str) -> tuple[str, int] | None:
    """Take a handle apart; None if it is none."""
    found = _HANDLE.fullmatch(handle)
    return None if found is None else (found["gang"], int(found["count"]))


def handles_of(gang: str, names: Collection[str]) -> list[str]:
    """Return the handles of gangs of a name, among names of actors."""
    return sorted(name for name in names if (found := gang_and_count(name)) is not None and found[0] == gang)
