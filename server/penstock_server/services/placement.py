"""Where replicas go, and on which ports: all of a job's, or none. Pure; the scheduler applies the answer.

Replicas with the largest needs are placed first, each on the fullest node that still holds it, so that
large holes stay whole. A port is given once on a host, which several nodes may share. Jobs are served in
order: one that waits for room reserves the nodes that it could use (`backfill`), one that no node could ever
hold does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice, product

Amounts = tuple[int, int, int]
"""CPUs, GPUs, bytes of memory."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica asks for. `num_ports`: at which it listens."""

    role: str
    index: int
    amounts: Amounts
    num_ports: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """A node that takes replicas: what it has in all, and what of it is free. `ports`: the free ones of `offered`.

    `labels`: of the node, by key.
    """

    node_id: str
    name: str
    total: Amounts
    free: Amounts
    host: str = ""
    ports: tuple[int, ...] = ()
    offered: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A node for each need, in the order of the needs. `ports`: by position, for the needs that listen."""

    node_ids: tuple[str, ...]
    ports: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Waits:
    """Why the job stays queued. `forever`: no node that is here could hold it, even when empty."""

    why: str
    forever: bool


def labelled(selector: Mapping[str, str], rooms: Sequence[Room]) -> list[Room] | Waits:
    """Return the rooms that have all labels of `selector`, or which of these no node has."""
    found = [room for room in rooms if not lacks(selector, room.labels)]
    if found or not rooms:
        return found
    nowhere = [key for key in sorted(selector) if all(room.labels.get(key) != selector[key] for room in rooms)]
    asked = f"node_selector asks for {_labels_text(selector)}"
    if not nowhere:
        return Waits(f"{asked}: READY nodes have these labels, but none has all of them", forever=True)
    others = sorted({room.labels[key] for key in nowhere[:1] for room in rooms if key in room.labels})
    known = f" (its values there: {', '.join(others[:5])})" if others else ""
    missing = f"{asked}, but no READY node has the label {nowhere[0]}={selector[nowhere[0]]}{known}"
    return Waits(f"{missing}. Start one with `penstock agent join --label`.", forever=True)


def lacks(selector: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Describe which label of `selector` a node lacks; empty if it has all."""
    for key, value in sorted(selector.items()):
        if key not in labels:
            return f"has no label {key}={value}"
        if labels[key] != value:
            return f"its label {key} is {labels[key]!r}; the job asks for {value!r}"
    return ""


def _labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def place(needs: Sequence[Need], rooms: Sequence[Room]) -> Chosen | Waits:
    """Place all needs, or explain why not. Deterministic. O(needs x rooms)."""
    if not rooms:
        return Waits("waits for a node: none is READY. Start one with `penstock agent join`.", forever=True)
    free = {room.node_id: room.free for room in rooms}
    has_ports = any(need.num_ports for need in needs)
    left = {room.node_id: dict.fromkeys(room.ports if has_ports else ()) for room in rooms}
    chosen: dict[int, str] = {}
    ports: dict[int, tuple[int, ...]] = {}
    order = sorted(range(len(needs)), key=lambda i: (_weight(needs[i].amounts), -i), reverse=True)
    for i in order:
        count = needs[i].num_ports
        fitting = [r for r in rooms if _fits(needs[i].amounts, free[r.node_id]) and len(left[r.node_id]) >= count]
        if not fitting:
            return _explain(needs, needs[i], rooms)
        best = min(fitting, key=lambda room: (_weight(free[room.node_id]), room.name, room.node_id))
        chosen[i] = best.node_id
        if count:
            ports[i] = tuple(islice(left[best.node_id], count))
            for port, room in product(ports[i], rooms):
                if room.host == best.host:
                    left[room.node_id].pop(port, None)
        free[best.node_id] = _minus(free[best.node_id], needs[i].amounts)
    return Chosen(tuple(chosen[i] for i in range(len(needs))), ports)


def could_hold(needs: Sequence[Need], room: Room) -> bool:
    """Whether a node would hold one of the needs if it held nothing else."""
    return any(_fits(need.amounts, room.total) and len(room.offered) >= need.num_ports for need in needs)


def take(rooms: Sequence[Room], needs: Sequence[Need], placed: Chosen) -> list[Room]:
    """Return the rooms as they are once the placement stands."""
    mine = {room.node_id: room for room in rooms if room.node_id in placed.node_ids}
    free = {node_id: room.free for node_id, room in mine.items()}
    for need, node_id in zip(needs, placed.node_ids, strict=True):
        free[node_id] = _minus(free[node_id], need.amounts)
    taken = {(mine[placed.node_ids[i]].host, port) for i, ports in placed.ports.items() for port in ports}
    hosts = {host for host, _ in taken}
    return [
        replace(room, free=free.get(room.node_id, room.free), ports=_free_ports(room, taken))
        if room.node_id in free or room.host in hosts
        else room
        for room in rooms
    ]


def verdicts(needs: Sequence[Need], rooms: Sequence[Room], answer: Chosen | Waits) -> dict[str, str]:
    """Describe for each node what it would take of a job, or why not, by node."""
    names: dict[str, list[str]] = {}
    if isinstance(answer, Chosen):
        for need, node_id in zip(needs, answer.node_ids, strict=True):
            names.setdefault(node_id, []).append(f"{need.role} {need.index}")
    is_placed = isinstance(answer, Chosen)
    return {room.node_id: _verdict(needs, room, names.get(room.node_id), is_placed=is_placed) for room in rooms}


def _verdict(needs: Sequence[Need], room: Room, taken: Sequence[str] | None, *, is_placed: bool) -> str:
    if taken:
        return "takes " + ", ".join(taken[:4]) + (f" and {len(taken) - 4} more" if len(taken) > 4 else "")
    stuck = next((need for need in needs if not _fits(need.amounts, room.free)), None)
    if stuck is not None:
        what = f"{stuck.role} {stuck.index} asks for {_amounts_text(stuck.amounts)}"
        if not _fits(stuck.amounts, room.total):
            return f"{what}; it has {_amounts_text(room.total)}"
        return f"{what}; free are {_amounts_text(room.free)} of {_amounts_text(room.total)}"
    if any(need.num_ports > len(room.ports) for need in needs):
        return f"{len(room.ports)} of its {len(room.offered)} ports are free"
    return "has room, and is not needed" if is_placed else f"has room, but not for all {len(needs)} replicas"


BEHIND = "waits behind others, the first of which waits for room"
"""Why a job waits that is not the first. It names no job: with each that is placed, all behind it would change."""


def disconnected(names: Sequence[str]) -> str:
    """Describe a job that waits for nodes that are READY, but whose agents are not connected now."""
    whose = "agent of node" if len(names) == 1 else "agents of nodes"
    return f"waits for a node: the {whose} {_shown(names)} {'is' if len(names) == 1 else 'are'} not connected"


def full_disks(names: Sequence[str]) -> str:
    """Describe a job that waits for nodes that are READY, but whose disks are full."""
    whose = "disk of node" if len(names) == 1 else "disks of nodes"
    return f"waits for a node: the {whose} {_shown(names)} {'is' if len(names) == 1 else 'are'} full"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (" …" if len(names) > 3 else "")


def _explain(needs: Sequence[Need], stuck: Need, rooms: Sequence[Room]) -> Waits:
    name, what = f"{stuck.role} {stuck.index}", _amounts_text(stuck.amounts)
    if not any(_fits(stuck.amounts, room.total) for room in rooms):
        largest = max(rooms, key=lambda room: _weight(room.total))
        return Waits(
            f"{name} asks for {what}, but no READY node has that; the largest, {largest.name!r}, "
            f"has {_amounts_text(largest.total)}. Ask for less, or join a larger node.",
            forever=True,
        )
    is_port = stuck.num_ports > 0 and isinstance(place([replace(need, num_ports=0) for need in needs], rooms), Chosen)
    if _is_placeable(needs, [replace(room, free=room.total, ports=room.offered) for room in rooms], rooms):
        free = f"asks for {what}; free are {_list_free(rooms)}"
        if is_port:
            free = f"needs a port, and those that READY nodes offer are taken ({_num_ports(needs, rooms)})"
        return Waits(f"waits for room: {name} {free}. It starts when others end.", forever=False)
    if is_port:
        return Waits(
            f"asks for more ports than READY nodes offer: {_num_ports(needs, rooms)}. "
            f"Ask for fewer {stuck.role}s, or join another node.",
            forever=True,
        )
    return Waits(
        f"asks for {len(needs)} replicas at once ({name}: {what}), more than the {len(rooms)} READY nodes hold "
        "together. Ask for fewer, or join another node.",
        forever=True,
    )


def _is_placeable(needs: Sequence[Need], whole: Sequence[Room], now: Sequence[Room]) -> bool:
    """Whether the needs fit nodes that hold nothing else. False at once if the nodes are like that already."""
    return whole != now and isinstance(place(needs, whole), Chosen)


def _num_ports(needs: Sequence[Need], rooms: Sequence[Room]) -> str:
    listeners = [need for need in needs if need.num_ports]
    wanted = sum(need.num_ports for need in listeners)
    offered = {(room.host, port) for room in rooms for port in room.offered}
    free = {(room.host, port) for room in rooms for port in room.ports}
    text = f"{len(listeners)} {listeners[0].role}{'s' if len(listeners) != 1 else ''}"
    text += "" if wanted == len(listeners) else f", which need {wanted} ports,"
    return f"{text} for {len(free)} free of {len(offered)} ports"


def _list_free(rooms: Sequence[Room]) -> str:
    shown = "; ".join(f"{_amounts_text(room.free)} on {room.name!r}" for room in rooms[:3])
    return shown + (f"; and {len(rooms) - 3} more nodes" if len(rooms) > 3 else "")


def _amounts_text(amounts: Amounts) -> str:
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


def _free_ports(room: Room, taken: Set[tuple[str, int]]) -> tuple[int, ...]:
    return tuple(port for port in room.ports if (room.host, port) not in taken)


def _minus(free: Amounts, need: Amounts) -> Amounts:
    return free[0] - need[0], free[1] - need[1], free[2] - need[2]
