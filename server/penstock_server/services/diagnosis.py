"""Gathers the sums of a job for `penstock.diagnosis`: its newest metrics, operators' sums and exchange. Reads only."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from sqlalchemy import func, select

from penstock.diagnosis import Disk, Finding, Link, Sums, TableLoad, Trainer, Wait, diagnose
from penstock.protocol.frames import Kind
from penstock.protocol.states import LIVE_REPLICA, TERMINAL_JOB
from penstock_server.db import Database
from penstock_server.schemas import api
from penstock_server.schemas.operators import OperatorTime, OperatorTimes
from penstock_server.services.evidence import (
    GraphFacts,
    Point,
    Ran,
    decoded,
    facts_of,
    rank_of,
    summed,
    trainer_of,
    turn_of,
    unfinished_name,
    waits_of,
)
from penstock_server.services.exchange import Exchanges
from penstock_server.services.jobs import Jobs
from penstock_server.services.links import links_of, worked
from penstock_server.services.storage import JobStorage
from penstock_server.streams.agents import Agents
from penstock_server.streams.recorder import Recorder
from penstock_server.tables import MetricRow, NodeRow, ReplicaRow

MAX_POINTS = 200
WINDOW_NS = 4 * 10**9
"""How far back a diagnosis looks: a new cause counts from half of that on, as medians do."""
MIN_POINTS = 8
"""Points of a series that are looked at however long ago they were: steps may take seconds."""
WINDOW_TURNS = 4
"""Turns that operators' sums are of at least."""
FRAMES_BYTES = 512 << 10
MAX_GRAPHS = 32
_STEPS = re.compile(r"^step_ms(?:\.trainer(\d{1,6}))?$")


class Diagnoses:
    """Answers why a job is as fast as it is, from what was recorded in the newest `WINDOW_NS`."""

    def __init__(
        self, database: Database, jobs: Jobs, storage: JobStorage, exchanges: Exchanges, recorder: Recorder,
        agents: Agents, *, silent_s: Callable[[int, datetime | None], float],
    ) -> None:  # fmt: skip
        self._agents = agents
        self._db, self._jobs, self._storage, self._silent_s = database, jobs, storage, silent_s
        self._exchanges, self._recorder = exchanges, recorder
        self._graphs: OrderedDict[str, GraphFacts] = OrderedDict()

    async def of(self, job_id: str) -> api.Diagnosis:
        """Return the findings about a job. Raises NotFound."""
        job = await self._jobs.get(job_id)
        series = await self.step_times(job_id, WINDOW_NS)
        window_ns = max(WINDOW_NS, *(int(WINDOW_TURNS * turn_of(points)) for points in series.values()), 0)
        ran = await self._operators(job, window_ns)
        replicas = {r.index: r for r in job.replicas if r.role == "trainer"}
        cores = await self._cores_for(job, {r.node_id for r in replicas.values() if r.node_id})
        running = job.state == "RUNNING"
        trainers = [
            trainer_of(
                index, points, ran.get(index), self._graphs, node=replicas[index].node_id or "",
                cores=cores.get(replicas[index].node_id or "", 0),
                silent_s=self._silent_s(replicas[index].stream, replicas[index].started_at) if running else 0.0,
            )
            for index, points in sorted(series.items())
            if index in replicas
        ]  # fmt: skip
        waits, links = await self._exchanged(job, trainers, window_ns)
        sums = Sums(
            tuple(trainers), waits, running=running, tables=await self._tables(job), disks=await self._disks_of(job),
            links=links,
        )  # fmt: skip
        findings = diagnose(sums)
        return api.Diagnosis(
            job_id=job.id,
            attempt=job.attempt,
            over=job.state in {state.value for state in TERMINAL_JOB},
            findings=[_answer(finding) for finding in findings],
        )

    async def operators_of(self, job_id: str) -> OperatorTimes:
        """Return how long the operators of one trainer ran, as its newest recorded sums have it. Raises NotFound."""
        job = await self._jobs.get(job_id)
        ran = await self._operators(job)
        found = {index: one for index, one in ran.items() if one.graph in self._graphs}  # one that only evaluates: none
        if not found:
            return OperatorTimes(job_id=job.id, attempt=job.attempt, trainer=None, graph=None, operators=[])
        index = min(found)
        ops = found[index]
        sampled = await asyncio.to_thread(ops.durations_ns)
        operators = [
            OperatorTime(
                op=op, name=facts.name, role=facts.role, module=facts.module, count=ops.count[op],
                total_ns=ops.total_ns[op], sampled=len(sampled.get(op, ())),
                p50_ns=rank_of(sampled.get(op), 0.5), p99_ns=rank_of(sampled.get(op), 0.99),
            )
            for op, facts in enumerate(self._graphs[ops.graph].ops)
            if ops.count.get(op)
        ]  # fmt: skip
        return OperatorTimes(job_id=job.id, attempt=job.attempt, trainer=index, graph=ops.graph, operators=operators)

    async def unfinished(self, job_id: str) -> dict[int, str]:
        """Return the operator that each trainer was last reported in, where that is known. Raises NotFound."""
        ran = await self._operators(await self._jobs.get(job_id), WINDOW_NS)
        found = {
            index: unfinished_name(self._graphs[one.graph], one.count)
            for index, one in ran.items()
            if one.graph in self._graphs
        }
        return {index: name for index, name in found.items() if name}

    async def cores(self, job: api.Job) -> dict[int, int]:
        """Return the cores of each trainer's machine, 0 where that is unknown."""
        async with self._db.read() as session:
            rows = (await session.execute(select(NodeRow.id, NodeRow.cpus))).all()
        nodes = {row.id: row.cpus for row in rows}
        return {r.index: nodes.get(r.node_id or "", 0) for r in job.replicas if r.role == "trainer"}

    async def _cores_for(self, job: api.Job, nodes: set[str]) -> dict[str, int]:
        """Return the cores of nodes that others than this job's trainers have not reserved."""
        others = (ReplicaRow.job_id != job.id) | (ReplicaRow.role != "trainer")
        reserved = (
            select(ReplicaRow.node_id, func.sum(ReplicaRow.cpus))
            .where(ReplicaRow.state.in_(LIVE_REPLICA), ReplicaRow.node_id.in_(nodes), others)
            .group_by(ReplicaRow.node_id)
        )
        async with self._db.read() as session:
            taken = {node: int(cpus) for node, cpus in await session.execute(reserved)}
            rows = (await session.execute(select(NodeRow.id, NodeRow.cpus).where(NodeRow.id.in_(nodes)))).all()
        return {row.id: max(0, row.cpus - taken.get(row.id, 0)) for row in rows}

    async def _tables(self, job: api.Job) -> tuple[TableLoad, ...]:
        if not any(r.role == "pserver" for r in job.replicas):
            return ()
        found = (await self._exchanges.tables_of(job.id)).tables
        return tuple(
            TableLoad(
                one.name, {part.pserver: part.pulled + part.pushed for part in one.parts},
                one.hot[0].id if one.hot else "", one.hot[0].share if one.hot else 0.0,
            )
            for one in found
        )  # fmt: skip

    async def _disks_of(self, job: api.Job) -> tuple[Disk, ...]:
        nodes = {r.node_id for r in job.replicas if r.node_id is not None}
        disks = {node: disk for node in nodes if (disk := self._agents.disk_of(node)) is not None}
        if not disks:
            return ()
        async with self._db.read() as session:
            names = (await session.execute(select(NodeRow.id, NodeRow.name).where(NodeRow.id.in_(disks)))).all()
        return tuple(Disk(row.name, disks[row.id].free_bytes, disks[row.id].total_bytes) for row in names)

    async def step_times(self, job_id: str, window_ns: int) -> dict[int, list[Point]]:
        """Return the points of each trainer, ascending: the newest of `window_ns`, and at least `MIN_POINTS`."""
        async with self._db.read() as session:
            names = select(MetricRow.series).where(MetricRow.job_id == job_id, MetricRow.series.like("step_ms%"))
            found: dict[int, list[Point]] = {}
            for name in (await session.execute(names.distinct())).scalars():
                named = _STEPS.match(name)
                if named is None:
                    continue
                newest = (
                    select(MetricRow.step, MetricRow.time_ns, MetricRow.value)
                    .where(MetricRow.job_id == job_id, MetricRow.series == name)
                    .order_by(MetricRow.time_ns.desc(), MetricRow.step.desc())
                    .limit(MAX_POINTS)
                )
                rows = [(row.step, row.time_ns, row.value) for row in await session.execute(newest)]
                recent = [row for at, row in enumerate(rows) if at < MIN_POINTS or row[1] >= rows[0][1] - window_ns]
                found[int(named[1] or 0)] = recent[::-1]
        return found

    async def _operators(self, job: api.Job, window_ns: int | None = None) -> dict[int, Ran]:
        kinds = {Kind.OP_SUMS, Kind.OP_EVENTS, Kind.GRAPH_USED}
        raw = await self._recorder.last(job.id, kinds, FRAMES_BYTES)
        frames = await asyncio.to_thread(decoded, raw)
        hashes = {str(frame.body.get("hash")) for frame in frames if frame.kind is Kind.GRAPH_USED}
        hashes |= {r.graph_hash for r in job.replicas if r.graph_hash is not None}
        for graph in hashes - self._graphs.keys():
            text = await self._storage.graph(graph)
            self._graphs[graph] = await asyncio.to_thread(facts_of, text)
        graphs = {graph: self._graphs[graph] for graph in hashes if graph in self._graphs}
        for graph in graphs:
            self._graphs.move_to_end(graph)
        while len(self._graphs) > max(MAX_GRAPHS, len(graphs)):  # what is answered of this job is looked up there
            self._graphs.popitem(last=False)
        used = {r.stream: r.graph_hash for r in job.replicas if r.graph_hash is not None}
        streams = {r.stream: r.index for r in job.replicas if r.role == "trainer" and r.attempt == job.attempt}
        by_stream = summed(frames, used, graphs, window_ns)
        return {index: by_stream[stream] for stream, index in streams.items() if stream in by_stream}

    async def _exchanged(
        self, job: api.Job, trainers: Sequence[Trainer], window_ns: int
    ) -> tuple[tuple[Wait, ...], tuple[Link, ...]]:
        """Return what trainers waited for servers, and what passed between them."""
        now = await self._exchanges.as_of(job)
        if not now.cells:
            return (), ()
        # Of a job that is over all counts: in its last seconds it may have saved its parameters.
        before = await self._exchanges.as_of(job, age_ns=window_ns) if job.state == "RUNNING" else None
        frames = await asyncio.to_thread(decoded, await self._recorder.recent(job.id, Kind.INPUT_EVENTS, FRAMES_BYTES))
        servers = {
            r.index: worked([frame for frame in frames if frame.stream == r.stream], window_ns)
            for r in job.replicas
            if r.role == "pserver" and r.attempt == job.attempt
        }
        turns_ns = {one.index: one.turn_ns for one in trainers}
        nodes = await self._node_names({one.index: one.node for one in trainers})
        return waits_of(now, before), links_of(now, before, servers, turns_ns, nodes)

    async def _node_names(self, nodes: Mapping[int, str]) -> dict[int, str]:
        async with self._db.read() as session:
            rows = (await session.execute(select(NodeRow.id, NodeRow.name).where(NodeRow.id.in_(nodes.values())))).all()
        names = {row.id: row.name for row in rows}
        return {index: names.get(node, "") for index, node in nodes.items()}


def _answer(finding: Finding) -> api.Finding:
    return api.Finding(
        cause=finding.cause, sentence=finding.sentence, share=finding.share, ms=finding.ms, place=finding.place,
        tab=finding.tab, op=finding.op, graph=finding.graph, query=dict(finding.query),
    )  # fmt: skip
