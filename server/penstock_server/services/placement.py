"""Where replicas go: all of a job's, or none. Pure; the scheduler applies the answer in one transaction.

Replicas with the largest needs are placed first, each on the fullest node that still holds it, so that
large holes stay whole. Jobs are served in order: one that waits for room holds back those behind it
(else small jobs would starve it), one that no node could ever hold does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Amounts = tuple[int, int, int]
"""CPUs, GPUs, bytes of memory."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica asks for."""

    role: str
    index: int
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Room:
    """A node that takes replicas: what it has in all, and what of it is free."""

    node_id: str
    name: str
    total: Amounts
    free: Amounts


@dataclass(frozen=True, slots=True)
class Placed:
    """A node for each need, in the order of the needs."""

    node_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """Why the job stays queued. `forever`: no node that is here could hold it, even when empty."""

    why: str
    forever: bool


def place(needs: Sequence[Need], rooms: Sequence[Room]) -> Placed | Waits:
    """Place all needs, or say why not. Deterministic. O(needs x rooms)."""
    if not rooms:
        return Waits("waits for a node: none is READY. Start one with `penstock agent join`.", forever=True)
    free = {room.node_id: room.free for room in rooms}
    chosen: dict[int, str] = {}
    order = sorted(range(len(needs)), key=lambda i: (_weight(needs[i].amounts), -i), reverse=True)
    for i in order:
        fitting = [room for room in rooms if _fits(needs[i].amounts, free[room.node_id])]
        if not fitting:
            return _explain(needs, needs[i], rooms)
        best = min(fitting, key=lambda room: (_weight(free[room.node_id]), room.name, room.node_id))
        chosen[i] = best.node_id
        free[best.node_id] = _minus(free[best.node_id], needs[i].amounts)
    return Placed(tuple(chosen[i] for i in range(len(needs))))


def take(rooms: Sequence[Room], needs: Sequence[Need], placed: Placed) -> list[Room]:
    """Return the rooms as they are once the placement stands."""
    free = {room.node_id: room.free for room in rooms}
    for need, node_id in zip(needs, placed.node_ids, strict=True):
        free[node_id] = _minus(free[node_id], need.amounts)
    return [Room(room.node_id, room.name, room.total, free[room.node_id]) for room in rooms]


def behind(name: str) -> str:
    """Say that a job waits for the one before it."""
    return f"waits behind job {name!r}, which waits for room"


def _explain(needs: Sequence[Need], stuck: Need, rooms: Sequence[Room]) -> Waits:
    who, what = f"{stuck.role} {stuck.index}", _say(stuck.amounts)
    if not any(_fits(stuck.amounts, room.total) for room in rooms):
        largest = max(rooms, key=lambda room: _weight(room.total))
        return Waits(
            f"{who} asks for {what}, but no READY node has that; the largest, {largest.name!r}, "
            f"has {_say(largest.total)}. Ask for less, or join a larger node.",
            forever=True,
        )
    whole = [Room(r.node_id, r.name, r.total, r.total) for r in rooms]
    if any(room.free != room.total for room in rooms) and isinstance(place(needs, whole), Placed):
        return Waits(
            f"waits for room: {who} asks for {what}; free are {_list_free(rooms)}. It starts when others end.",
            forever=False,
        )
    count = len(needs)
    return Waits(
        f"asks for {count} replicas at once ({who}: {what}), more than the {len(rooms)} READY nodes hold "
        "together. Ask for fewer, or join another node.",
        forever=True,
    )


def _list_free(rooms: Sequence[Room]) -> str:
    shown = "; ".join(f"{_say(room.free)} on {room.name!r}" for room in rooms[:3])
    return shown + (f"; and {len(rooms) - 3} more nodes" if len(rooms) > 3 else "")


def _say(amounts: Amounts) -> str:
    cpus, gpus, memory = amounts
    parts = [f"{cpus} CPU{'s' if cpus != 1 else ''}"]
    if gpus:
        parts.append(f"{gpus} GPU{'s' if gpus != 1 else ''}")
    parts.append(f"{memory / 2**30:.3g} GiB")
    return ", ".join(parts)


def _weight(amounts: Amounts) -> Amounts:
    return amounts[1], amounts[0], amounts[2]  # GPUs are the scarcest


def _fits(need: Amounts, free: Amounts) -> bool:
    return all(n <= f for n, f in zip(need, free, strict=True))


def _minus(free: Amounts, need: Amounts) -> Amounts:
    return free[0] - need[0], free[1] - need[1], free[2] - need[2]
