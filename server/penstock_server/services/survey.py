"""What a pass of the scheduler reads before it decides: rooms of nodes, stays of pilots, uses and terms of projects.

Reads only, and holds up no writer. So what was read may have changed once it is acted on: `starting` looks again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from penstock.protocol.states import ACTIVE_JOB, LIVE_REPLICA, NodeState
from penstock_server.diskspace import is_full
from penstock_server.services.fairness import Terms, Use
from penstock_server.services.pilots import Stay
from penstock_server.services.placement import Amounts, Room, Waits, disconnected, full_disks, place
from penstock_server.streams.agents import AgentLink, Agents
from penstock_server.tables import JobRow, NodeRow, ProjectRow, ReplicaRow

_ROOMS = select(  # columns: an object of each node would be most of what a pass takes
    NodeRow.id,
    NodeRow.name,
    NodeRow.host,
    NodeRow.cpus,
    NodeRow.gpus,
    NodeRow.memory_bytes,
    NodeRow.ports,
    NodeRow.labels,
)


@dataclass(frozen=True, slots=True)
class Absent:
    """Names of READY nodes that take no job now: their agents are not connected (yet), or their disks are full."""

    disconnected: list[str]
    full: list[str]


async def rooms_of(session: AsyncSession, agents: Agents) -> tuple[list[Room], Absent]:
    """Return the READY nodes whose agents are connected and whose disks have room, and the names of the others."""
    found = await session.execute(_ROOMS.where(NodeRow.state == NodeState.READY).order_by(NodeRow.id))
    ready = found.all()
    connected = [node for node in ready if agents.get(node.id) is not None]
    nodes = [node for node in connected if not is_full(agents.disk_of(node.id))]
    absent = Absent(
        [node.name for node in ready if agents.get(node.id) is None],
        [node.name for node in connected if is_full(agents.disk_of(node.id))],
    )
    if not nodes:
        return [], absent
    used: dict[str | None, Amounts] = defaultdict(lambda: (0, 0, 0))
    sums = (func.sum(ReplicaRow.cpus), func.sum(ReplicaRow.gpus), func.sum(ReplicaRow.memory_bytes))
    statement = select(ReplicaRow.node_id, sums[0], sums[1], sums[2]).where(ReplicaRow.state.in_(LIVE_REPLICA))
    for node_id, cpus, gpus, memory in await session.execute(statement.group_by(ReplicaRow.node_id)):
        used[node_id] = (int(cpus), int(gpus), int(memory))
    taken = await _ports_in_use(session)
    rooms = []
    for node in nodes:
        total = (node.cpus, node.gpus, node.memory_bytes)
        mine = used[node.id]
        free = (total[0] - mine[0], total[1] - mine[1], total[2] - mine[2])
        ports = tuple(port for port in node.ports if (node.host, port) not in taken)
        rooms.append(Room(node.id, node.name, total, free, node.host, ports, tuple(node.ports), node.labels))
    return rooms, absent


async def _ports_in_use(session: AsyncSession) -> set[tuple[str, int]]:
    """Return (host, port) of every port that a job holds: while it goes on, also those of attempts before.

    So a pserver that is down finds its port free, and an attempt that failed because of a port gets another.
    """
    ports_of = (
        select(NodeRow.host, ReplicaRow.port, ReplicaRow.meeting_port)
        .join(NodeRow, NodeRow.id == ReplicaRow.node_id)
        .where(ReplicaRow.port.is_not(None))
    )
    live = ports_of.where(ReplicaRow.state.in_(LIVE_REPLICA))
    of_active_jobs = ports_of.where(ReplicaRow.job_id.in_(select(JobRow.id).where(JobRow.state.in_(ACTIVE_JOB))))
    found = await session.execute(union_all(live, of_active_jobs))  # two indexes; one OR would be read by none
    return {(host, port) for host, *ports in found for port in ports if port is not None}


async def stays_of(session: AsyncSession, links: Sequence[AgentLink], now: float) -> dict[str, Stay]:
    """Return how long the pilots that are connected stay. Other nodes are not in it. `now`: on the monotonic clock."""
    links = [link for link in links if link.once or link.ends_at is not None or link.leaving]
    of_one_job = [link.node_id for link in links if link.once]
    statement = select(ReplicaRow.node_id, JobRow.id).join(JobRow, JobRow.id == ReplicaRow.job_id)
    statement = statement.join(NodeRow, NodeRow.id == ReplicaRow.node_id).where(
        ReplicaRow.node_id.in_(of_one_job), ReplicaRow.created_at >= NodeRow.joined_at
    )
    found = await session.execute(statement.distinct()) if of_one_job else ()
    jobs: dict[str, str] = {node_id: job_id for node_id, job_id in found if node_id is not None}
    return {
        link.node_id: Stay(
            None if link.ends_at is None else link.ends_at - now,
            link.once,
            bool(link.leaving),
            jobs.get(link.node_id),
        )
        for link in links
    }


async def uses(session: AsyncSession) -> dict[str, Use]:
    """Return what each project holds."""
    sums = (func.sum(ReplicaRow.cpus), func.sum(ReplicaRow.gpus), func.sum(ReplicaRow.memory_bytes))
    statement = select(JobRow.project, *sums, func.count(ReplicaRow.job_id.distinct())).join(
        JobRow, JobRow.id == ReplicaRow.job_id
    )
    found = await session.execute(
        statement.where(ReplicaRow.state.in_(LIVE_REPLICA), JobRow.kind == "managed").group_by(JobRow.project)
    )
    return {project: Use((int(cpus), int(gpus), int(memory)), jobs) for project, cpus, gpus, memory, jobs in found}


async def terms(session: AsyncSession) -> dict[str, Terms]:
    """Return the terms of the projects that have some of their own."""
    rows = await session.execute(
        select(ProjectRow.name, ProjectRow.share, ProjectRow.max_cpus, ProjectRow.max_gpus, ProjectRow.max_jobs)
    )
    return {name: Terms(share, cpus, gpus, jobs) for name, share, cpus, gpus, jobs in rows}


def nowhere(absent: Absent) -> str:
    """Describe why no job is placed."""
    none = place((), ())
    assert isinstance(none, Waits)  # without a node
    if absent.full:
        return full_disks(absent.full)
    return disconnected(absent.disconnected) if absent.disconnected else none.why
