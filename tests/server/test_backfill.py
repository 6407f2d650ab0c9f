"""Jobs start on nodes that those before them cannot use, and delay none of these by a single step of time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.jobspec import JobSpec
from penstock_server.services.backfill import decide, usable
from penstock_server.services.placement import BEHIND, Chosen, Need, Room, Waits

ZONES = ("east", "west", "")
END = 60
"""Steps of time, after which all that can start has started."""


@dataclass(frozen=True)
class Asked:
    """A job: of so many replicas of so many CPUs, on nodes of a zone (or any), that lasts for some steps."""

    cpus: int
    replicas: int
    zone: str
    lasts: int
    listens: bool = False

    @property
    def needs(self) -> list[Need]:
        return [Need("trainer", i, (self.cpus, 0, 1), num_ports=int(self.listens)) for i in range(self.replicas)]

    @property
    def spec(self) -> JobSpec:
        labels = {"zone": self.zone} if self.zone else {}
        return JobSpec(name="job", entrypoint=["true"], node_selector=labels)


def node(number: int, zone: str, cpus: int, host: str) -> Room:
    labels = {"zone": zone} if zone else {}
    ports = (1, 2)
    return Room(f"n{number}", f"n{number}", (cpus, 0, 99), (cpus, 0, 99), host, ports, ports, labels)


def rooms_now(nodes: Sequence[Room], running: dict[int, Chosen], jobs: Sequence[Asked]) -> list[Room]:
    """Nodes with what running jobs hold taken from them."""
    used: Counter[str] = Counter()
    taken: set[tuple[str, int]] = set()
    host_of = {one.node_id: one.host for one in nodes}
    for number, chosen in running.items():
        for node_id in chosen.node_ids:
            used[node_id] += jobs[number].cpus
        taken |= {(host_of[chosen.node_ids[i]], port) for i, ports in chosen.ports.items() for port in ports}
    return [
        replace(
            one,
            free=(one.total[0] - used[one.node_id], 0, 99),
            ports=tuple(port for port in one.offered if (one.host, port) not in taken),
        )
        for one in nodes
    ]


def starts(jobs: Sequence[Asked], nodes: Sequence[Room]) -> dict[int, int]:
    """When each job starts, by its number: a pass over those that wait, in their order, at each step of time."""
    found: dict[int, int] = {}
    running: dict[int, Chosen] = {}
    for now in range(END):
        running = {number: one for number, one in running.items() if found[number] + jobs[number].lasts > now}
        reserved: set[str] = set()
        for number, job in enumerate(jobs):
            if number in found:
                continue
            rooms = rooms_now(nodes, running, jobs)
            answer = decide(job.needs, rooms, reserved, {}, str(number), job.spec)
            if isinstance(answer, Chosen):
                assert reserved.isdisjoint(answer.node_ids)
                found[number], running[number] = now, answer
            elif not answer.forever:
                reserved |= usable(job.needs, rooms, {}, str(number), job.spec)
    return found


JOBS = st.lists(
    st.builds(
        Asked, cpus=st.integers(0, 3), replicas=st.integers(1, 3), zone=st.sampled_from(ZONES),
        lasts=st.integers(1, 5), listens=st.booleans(),
    ),
    min_size=1, max_size=7,
)  # fmt: skip
NODES = st.lists(
    st.tuples(st.sampled_from(ZONES), st.integers(1, 4), st.sampled_from(["h1", "h2"])), min_size=1, max_size=4
).map(lambda found: [node(i, *one) for i, one in enumerate(found)])


@settings(max_examples=60, deadline=None)
@given(JOBS, NODES)
def test_no_job_delays_one_before_it(jobs: list[Asked], nodes: list[Room]) -> None:
    together = starts(jobs, nodes)
    for number in range(len(jobs)):
        assert together.get(number) == starts(jobs[: number + 1], nodes).get(number), number


@settings(max_examples=60, deadline=None)
@given(JOBS, NODES)
def test_a_job_starts_at_once_where_none_before_it_can_run(jobs: list[Asked], nodes: list[Room]) -> None:
    together = starts(jobs, nodes)
    for number, job in enumerate(jobs):
        mine = usable(job.needs, nodes, {}, "", job.spec)
        before: set[str] = set().union(*(usable(one.needs, nodes, {}, "", one.spec) for one in jobs[:number]))
        if mine.isdisjoint(before) and isinstance(decide(job.needs, nodes, set(), {}, "", job.spec), Chosen):
            assert together[number] == 0


def test_what_is_open_is_explained_only_where_room_is_waited_for() -> None:
    nodes = [node(0, "east", 2, "h1"), replace(node(1, "west", 2, "h2"), free=(0, 0, 99))]
    behind = decide(Asked(1, 1, "", 1).needs, nodes, {"n0"}, {}, "j", Asked(1, 1, "", 1).spec)
    own = decide(Asked(1, 1, "west", 1).needs, nodes, {"n0"}, {}, "j", Asked(1, 1, "west", 1).spec)
    never = decide(Asked(9, 1, "", 1).needs, nodes, {"n0"}, {}, "j", Asked(9, 1, "", 1).spec)
    assert behind == Waits(BEHIND, forever=False)
    assert isinstance(own, Waits)
    assert ("trainer 0 asks for 1 CPU" in own.why, own.forever) == (True, False)
    assert isinstance(never, Waits)
    assert never.forever
