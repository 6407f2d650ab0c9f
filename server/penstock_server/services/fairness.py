"""Whose job is placed next: fair share between projects, priority within a project, quotas. Pure.

A project's use is its dominant share: the largest part of the READY nodes' CPUs, GPUs or memory that its replicas hold.
The project that uses least for its share is next, with its job of the highest priority; among equals the job that was
submitted first. A priority counts within its project alone, so that no project outbids another by it. A job that waits
for room holds back those that come after it from the nodes that it could use (`backfill`), and one that waits for its
project's quota those of its project.

Source: Ghodsi et al., "Dominant Resource Fairness" (NSDI 2011).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_server.services.placement import Amounts, Need, Room, Waits


@dataclass(frozen=True, slots=True)
class Terms:
    """What an administrator gives a project. `max_…`: of what its replicas hold at once, None without a limit."""

    share: float = 1.0
    max_cpus: int | None = None
    max_gpus: int | None = None
    max_jobs: int | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """What the jobs of a project hold now."""

    amounts: Amounts = (0, 0, 0)
    jobs: int = 0


@dataclass(frozen=True, slots=True)
class Head:
    """The first job in the line of a project. `job_id`: grows with the time of submission."""

    project: str
    priority: int
    job_id: str


@dataclass(frozen=True, slots=True)
class Line:
    """Why a job that is submitted now waits, as far as the last pass says it. `burdens`: of each project.

    `everyone`: why every job waits, or ''. `blocked`: the job by which all nodes are reserved, and what those behind it
    wait for. `held`: of projects that wait for their quota, or have many jobs that wait for room, the priority of the
    last that was looked at, and the same for those behind it. `reserved`: nodes, by the first job that reserves each.
    """

    everyone: str = ""
    blocked: tuple[Head, str] | None = None
    held: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    burdens: Mapping[str, float] = field(default_factory=dict)
    reserved: Mapping[str, Head] = field(default_factory=dict)

    def why(self, project: str, priority: int) -> str | None:
        """Return why a new job waits, or None if the scheduler has to look at it."""
        if self.everyone:
            return self.everyone
        least, text = self.held.get(project, (None, ""))
        if least is not None and priority <= least:
            return text
        if self.blocked is None:
            return None
        head, text = self.blocked
        before = {head, *self.reserved.values()}
        return text if all(self._is_behind(one, project, priority) for one in before) else None

    def reserved_before(self, project: str, priority: int) -> set[str]:
        """Return the nodes that jobs before a new one reserve."""
        return {node_id for node_id, head in self.reserved.items() if self._is_behind(head, project, priority)}

    def _is_behind(self, head: Head, project: str, priority: int) -> bool:
        if project == head.project:
            return priority <= head.priority
        return self.burdens.get(project, 0.0) >= self.burdens.get(head.project, 0.0)


class Turns:
    """One pass over the jobs that wait. `heads`: the first of each project; `capacity`: of all nodes that take jobs."""

    def __init__(
        self, heads: Iterable[Head], uses: Mapping[str, Use], terms: Mapping[str, Terms], capacity: Amounts
    ) -> None:
        self._heads = {head.project: head for head in heads}
        self._uses, self._terms, self._capacity = dict(uses), terms, capacity

    def next(self) -> Head | None:
        """Return the job to look at; None if there is no more."""
        return min(self._heads.values(), key=lambda head: (self.burden(head.project), head.job_id), default=None)

    def follow(self, project: str, head: Head | None) -> None:
        """Go on with the next job of a project; None: with none of it in this pass."""
        self._heads.pop(project, None)
        if head is not None:
            self._heads[project] = head

    def place(self, project: str, needs: Sequence[Need]) -> None:
        """Note that a job was placed."""
        use = self._uses.get(project, Use())
        self._uses[project] = Use(_plus(use.amounts, total(needs)), use.jobs + 1)

    def over_quota(self, project: str, needs: Sequence[Need]) -> Waits | None:
        """Return why a job waits for the quota of its project, or None if that holds it."""
        return over_quota(project, needs, self._uses.get(project, Use()), self._terms.get(project, Terms()))

    def burden(self, project: str) -> float:
        """Return what a project uses for its share: it is next if this is the least."""
        parts = zip(self._uses.get(project, Use()).amounts, self._capacity, strict=True)
        return max(used / whole if whole else 0.0 for used, whole in parts) / self._terms.get(project, Terms()).share

    def left(self) -> list[Head]:
        """Return the jobs that would be next, of each project."""
        return list(self._heads.values())

    def burdens(self) -> dict[str, float]:
        """Return the burden of each project that uses anything."""
        return {project: self.burden(project) for project in self._uses}


def over_quota(project: str, needs: Sequence[Need], use: Use, terms: Terms) -> Waits | None:
    """Return why a job waits for its project's quota, or None. For ever if it alone is beyond that."""
    cpus, gpus, _ = total(needs)
    limits = (
        ("CPUs", cpus, use.amounts[0], terms.max_cpus),
        ("GPUs", gpus, use.amounts[1], terms.max_gpus),
        ("jobs", 1, use.jobs, terms.max_jobs),
    )
    for what, wanted, used, limit in limits:
        if limit is not None and wanted > limit:
            why = (
                f"asks for {wanted} {what}, but the quota of project {project!r} is {limit}. Ask for less, or for more"
            )
            return Waits(f"{why} quota.", forever=True)
        if limit is not None and wanted and wanted + used > limit:
            why = f"waits for the quota of project {project!r}: {used} of {limit} {what} are in use, and it asks for"
            return Waits(f"{why} {wanted}", forever=False)
    return None


def behind_quota(project: str) -> str:
    """Describe a job that waits for one of its project before it, which waits for the quota."""
    return f"waits behind others of project {project!r}, the first of which waits for its quota"


def total(needs: Sequence[Need]) -> Amounts:
    """Return what all replicas of a job need together."""
    amounts: Amounts = (0, 0, 0)
    for need in needs:
        amounts = _plus(amounts, need.amounts)
    return amounts


def capacity_of(rooms: Sequence[Room]) -> Amounts:
    """Return what nodes have in all."""
    amounts: Amounts = (0, 0, 0)
    for room in rooms:
        amounts = _plus(amounts, room.total)
    return amounts


def _plus(one: Amounts, other: Amounts) -> Amounts:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
