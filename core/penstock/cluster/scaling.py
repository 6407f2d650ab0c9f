"""How many pilots there should be, and why: from what waits in the queue. Pure; `keeper` carries the answer out.

Waiting jobs are packed in their order, each all or nothing, into nodes that are idle, then into pilots that have not
joined yet, then into new ones. What a job is packed into is kept; a pilot that no job needs is cancelled while it is
pending, and drained when it has been idle for long enough. A drained pilot is cancelled, so none is cancelled at work.
Rooms that are used in part are not counted: had a waiting job fitted there, the server would have placed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.cluster.provisioner import Phase, Shape

Amounts = tuple[int, int, int]
"""CPUs, GPUs, bytes of memory."""


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that waits for room. `needs`: of each replica; `selector`: labels that each of its nodes must have."""

    name: str
    needs: tuple[Amounts, ...]
    selector: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as the server shows it. `idle_s`: how long it has run nothing."""

    state: str
    amounts: Amounts
    cpus_used: int = 0
    is_busy: bool = False
    idle_s: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether the whole node is free for jobs."""
        return self.state == "READY" and not self.is_busy


@dataclass(frozen=True, slots=True)
class PilotFacts:
    """A pilot. `why`: what it was launched for; `detail`: what its scheduler says. `node`: once it has joined."""

    name: str
    phase: Phase
    why: str
    detail: str = ""
    node: NodeFacts | None = None
    is_drained_by_us: bool = False

    @property
    def is_coming(self) -> bool:
        """Whether its agent has not joined yet; the node of a predecessor of its name may be there, down."""
        return self.node is None or self.node.state in ("JOINING", "DOWN")


@dataclass(frozen=True, slots=True)
class Limits:
    """`most`: pilots at once; `least`: so many are kept although no job waits. `once`: a pilot takes one job.

    `labels`: of the nodes of pilots.
    """

    shape: Shape
    most: int
    least: int = 0
    idle_s: float = 60.0
    once: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """Submit a gang."""

    count: int
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do. `drain`, `cancel`: names of pilots. `reasons`: a sentence for each; `unmet`: of jobs that wait on."""

    launches: tuple[Launch, ...] = ()
    drain: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    unmet: tuple[str, ...] = ()


@dataclass(slots=True)
class _Room:
    pilot: str
    free: Amounts
    job: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def decide(
    jobs: Sequence[WaitingJob], pilots: Sequence[PilotFacts], others: Sequence[NodeFacts], limits: Limits
) -> Answer:
    """Return what to launch, drain and cancel. `others`: nodes that are no pilots of this cluster. Deterministic."""
    live = [pilot for pilot in pilots if pilot.phase is not Phase.ENDED]
    rooms = _rooms(live, others, limits)
    budget = limits.most - len(live)
    launches: list[Launch] = []
    unmet: list[str] = []
    for job in jobs:
        new = _pack(job, rooms, limits, budget)
        if isinstance(new, str):
            unmet.append(new)
        elif new > budget:
            unmet.append(f"job {job.name!r} needs {new} more {_pilots(new)}, and {max(budget, 0)} may be launched")
            break  # those behind it would take what it waits for
        elif new:
            launches.append(Launch(new, f"for job {job.name!r}"))
            budget -= new
    spare = len(live) + sum(launch.count for launch in launches)
    if spare < limits.least:
        launches.append(Launch(limits.least - spare, f"kept: {limits.least} at least"))
    needed = {room.pilot for room in rooms if room.job and room.pilot}
    return _answer(live, needed, launches, unmet, limits)


def _rooms(live: Sequence[PilotFacts], others: Sequence[NodeFacts], limits: Limits) -> list[_Room]:
    idle = [_Room("", node.amounts, labels=node.labels) for node in others if node.is_idle]
    joined = [
        _Room(p.name, p.node.amounts, labels=p.node.labels) for p in live if p.node is not None and p.node.is_idle
    ]
    coming = [_Room(pilot.name, _amounts(limits.shape), labels=limits.labels) for pilot in live if pilot.is_coming]
    return [*idle, *joined, *coming]


def _pack(job: WaitingJob, rooms: list[_Room], limits: Limits, budget: int) -> int | str:
    """Return how many new pilots a job takes besides the rooms, or why it never fits. Takes the rooms if it may."""
    shape = _amounts(limits.shape)
    trial = [_Room(room.pilot, room.free, room.job, room.labels) for room in rooms]
    new = 0
    for need in sorted(job.needs, reverse=True):
        room = next((room for room in trial if _takes(room, need, job, once=limits.once)), None)
        if room is None:
            if not _has(limits.labels, job.selector):
                asked = ", ".join(f"{key}={value}" for key, value in sorted(job.selector.items()))
                return f"job {job.name!r} asks for nodes with {asked}, and pilots are launched without (--label)"
            if not _fits(need, shape):
                return f"job {job.name!r} asks for {_text(need)} on one node, and a pilot has {_text(shape)}"
            room = _Room("", shape, labels=limits.labels)
            trial.append(room)
            new += 1
        room.free = (room.free[0] - need[0], room.free[1] - need[1], room.free[2] - need[2])
        room.job = job.name
    if new <= max(budget, 0):
        rooms[:] = trial
    return new


def _takes(room: _Room, need: Amounts, job: WaitingJob, *, once: bool) -> bool:
    is_free = not once or room.job in ("", job.name)
    return is_free and _fits(need, room.free) and _has(room.labels, job.selector)


def _has(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _answer(
    live: Sequence[PilotFacts], needed: set[str], launches: list[Launch], unmet: list[str], limits: Limits
) -> Answer:
    drain: list[str] = []
    cancel: list[str] = []
    reasons: dict[str, str] = {}
    left = len(live)
    for pilot in live:
        reasons[pilot.name] = _reason(pilot, limits)
        if pilot.node is not None and pilot.is_drained_by_us and pilot.node.state in ("DRAINED", "DOWN"):
            cancel.append(pilot.name)
            reasons[pilot.name] = "drained, and cancelled: no job needs it"
        elif pilot.name in needed or left <= limits.least or pilot.is_drained_by_us:
            continue
        elif pilot.is_coming and pilot.phase is Phase.PENDING:
            cancel.append(pilot.name)
            reasons[pilot.name] = "cancelled while pending: no job needs it any more"
            left -= 1
        elif pilot.node is not None and pilot.node.is_idle and pilot.node.idle_s >= limits.idle_s:
            drain.append(pilot.name)
            reasons[pilot.name] = f"drains: idle for {pilot.node.idle_s:.0f} s"
            left -= 1
    return Answer(tuple(launches), tuple(drain), tuple(cancel), reasons, tuple(unmet))


def _reason(pilot: PilotFacts, limits: Limits) -> str:
    where = f" ({pilot.detail})" if pilot.detail else ""
    node = pilot.node
    if pilot.phase is Phase.PENDING:
        return f"{pilot.why}: waits in its queue{where}"
    if node is None or pilot.is_coming:
        return f"{pilot.why}: started{where}, its agent has not joined yet"
    if pilot.is_drained_by_us or node.state in ("DRAINING", "DRAINED"):
        return f"drains{where}: {'runs its last job' if node.is_busy else 'idle'}"
    if node.state != "READY":
        return f"its node is {node.state}{where}"
    if node.is_busy:
        return f"serves jobs on {node.cpus_used} of {node.amounts[0]} CPUs{where}"
    return f"idle for {node.idle_s:.0f} s of {limits.idle_s:g} s{where}"


def _amounts(shape: Shape) -> Amounts:
    return shape.cpus, shape.gpus, shape.memory_bytes


def _fits(need: Amounts, free: Amounts) -> bool:
    return all(n <= f for n, f in zip(need, free, strict=True))


def _pilots(count: int) -> str:
    return "pilot" if count == 1 else "pilots"


def _text(amounts: Amounts) -> str:
    gpus = f", {amounts[1]} GPUs" if amounts[1] else ""
    return f"{amounts[0]} CPUs{gpus}, {amounts[2] / (1 << 30):.3g} GiB"
