"""Gathers the sums of a job for `penstock.diagnosis`: its newest metrics, operators' sums and exchange. Reads only."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sqlalchemy import select

from penstock.diagnosis import Finding, OpSum, Sums, Trainer, Wait, diagnose
from penstock.errors import PeerError
from penstock.protocol.frames import FLAG_WHOLE_STEP, Column, Frame, Kind, decode
from penstock.protocol.states import TERMINAL_JOB
from penstock_server.db import Database
from penstock_server.schemas import api
from penstock_server.schemas.operators import OperatorTime, OperatorTimes
from penstock_server.services.exchange import Exchanges
from penstock_server.services.jobs import Jobs
from penstock_server.services.storage import JobStorage
from penstock_server.streams.recorder import Recorder
from penstock_server.tables import MetricRow, NodeRow

MAX_POINTS = 200
WINDOW_NS = 30 * 10**9
FRAMES_BYTES = 512 << 10
EXCHANGE_WINDOW_S = 15.0
MAX_JOBS = 64
MAX_GRAPHS = 32
_STEPS = re.compile(r"^step_ms(?:\.trainer(\d{1,6}))?$")


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a diagnosis needs of a graph document. `ops`: (name, role, module) by index."""

    ops: tuple[tuple[str, str, str], ...]
    num_threads: int
    trains: bool


@dataclass(slots=True)
class _Ops:
    """Sums of one stream since its graph came into use."""

    graph: str
    count: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    total_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    busy: list[float] = field(default_factory=list)  # threads that computed, in the mean over a sampled step


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """Cumulative exchange of a job at a time of the monotonic clock."""

    at_s: float
    attempt: int
    steps: Mapping[int, int]
    wait_ns: Mapping[tuple[int, int, str], int]


class Diagnoses:
    """Answers why a job is as fast as it is. Exchanges of jobs that were asked about are kept for a while, so that the
    next answer is about the seconds between.
    """

    def __init__(
        self, database: Database, jobs: Jobs, storage: JobStorage, exchanges: Exchanges, recorder: Recorder
    ) -> None:
        self._db, self._jobs, self._storage = database, jobs, storage
        self._exchanges, self._recorder = exchanges, recorder
        self._before: OrderedDict[str, deque[_Exchanged]] = OrderedDict()
        self._graphs: OrderedDict[str, GraphFacts] = OrderedDict()

    async def of(self, job_id: str) -> api.Diagnosis:
        """Return the findings about a job. Raises NotFound."""
        job = await self._jobs.get(job_id)
        series = await self.step_times(job_id)
        ops = await self._operators(job)
        cores = await self.cores(job)
        trainers = [
            _trainer(
                index, points, ops.get(index), self._graphs, cores=cores.get(index, 0), running=job.state == "RUNNING"
            )
            for index, points in sorted(series.items())
        ]
        sums = Sums(tuple(trainers), await self._waits(job), running=job.state == "RUNNING")
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
        found = await self._operators(job)
        if not found:
            return OperatorTimes(job_id=job.id, attempt=job.attempt, trainer=None, graph=None, operators=[])
        index = min(found)
        ops = found[index]
        operators = [
            OperatorTime(op=op, name=name, role=role, module=module, count=ops.count[op], total_ns=ops.total_ns[op])
            for op, (name, role, module) in enumerate(self._graphs[ops.graph].ops)
            if ops.count.get(op)
        ]
        return OperatorTimes(job_id=job.id, attempt=job.attempt, trainer=index, graph=ops.graph, operators=operators)

    async def cores(self, job: api.Job) -> dict[int, int]:
        """Return the cores of each trainer's machine, 0 where that is unknown."""
        async with self._db.read() as session:
            rows = (await session.execute(select(NodeRow.id, NodeRow.cpus))).all()
        nodes = {row.id: row.cpus for row in rows}
        return {r.index: nodes.get(r.node_id or "", 0) for r in job.replicas if r.role == "trainer"}

    async def step_times(self, job_id: str) -> dict[int, list[tuple[int, int, float]]]:
        """Return (step, time_ns, step_ms) of each trainer, newest points, ascending."""
        async with self._db.read() as session:
            names = select(MetricRow.series).where(MetricRow.job_id == job_id, MetricRow.series.like("step_ms%"))
            found: dict[int, list[tuple[int, int, float]]] = {}
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
                recent = [row for row in rows if row[1] >= rows[0][1] - WINDOW_NS] if rows else []
                found[int(named[1] or 0)] = recent[::-1]
        return found

    async def _operators(self, job: api.Job) -> dict[int, _Ops]:
        kinds = {Kind.OP_SUMS, Kind.OP_EVENTS, Kind.GRAPH_USED}
        raw = await self._recorder.last(job.id, kinds, FRAMES_BYTES)
        frames = await asyncio.to_thread(_decoded, raw)
        hashes = {str(frame.body.get("hash")) for frame in frames if frame.kind is Kind.GRAPH_USED}
        hashes |= {r.graph_hash for r in job.replicas if r.graph_hash is not None}
        for graph in hashes - self._graphs.keys():
            text = await self._storage.graph(graph)
            self._graphs[graph] = await asyncio.to_thread(_facts, text)
        graphs = {graph: self._graphs[graph] for graph in hashes if graph in self._graphs}
        for graph in graphs:
            self._graphs.move_to_end(graph)
        while len(self._graphs) > max(MAX_GRAPHS, len(graphs)):  # what is answered of this job is looked up there
            self._graphs.popitem(last=False)
        used = {r.stream: r.graph_hash for r in job.replicas if r.graph_hash is not None}
        streams = {r.stream: r.index for r in job.replicas if r.role == "trainer" and r.attempt == job.attempt}
        by_stream = _summed(frames, used, graphs)
        return {index: by_stream[stream] for stream, index in streams.items() if stream in by_stream}

    async def _waits(self, job: api.Job) -> tuple[Wait, ...]:
        answer = await self._exchanges.of(job.id)
        wait_ns = {(c.trainer, c.pserver, c.block): c.wait_ns for c in answer.cells if c.wait_ns}
        now = _Exchanged(time.monotonic(), answer.attempt, answer.steps, wait_ns)
        kept = self._before.setdefault(job.id, deque())
        self._before.move_to_end(job.id)
        while len(self._before) > MAX_JOBS:
            self._before.popitem(last=False)
        while kept and (kept[0].at_s < now.at_s - EXCHANGE_WINDOW_S or kept[0].attempt != now.attempt):
            kept.popleft()
        before = kept[0] if kept and job.state == "RUNNING" else None
        kept.append(now)
        if before is None:
            return waits_of(now.wait_ns, now.steps, {}, {})
        return waits_of(now.wait_ns, now.steps, before.wait_ns, before.steps)


def waits_of(
    wait_ns: Mapping[tuple[int, int, str], int], steps: Mapping[int, int],
    earlier_ns: Mapping[tuple[int, int, str], int], earlier_steps: Mapping[int, int],
) -> tuple[Wait, ...]:  # fmt: skip
    """Return the waits of each step between two states; since the beginning if no step lies between them."""
    if any(steps[trainer] <= earlier_steps.get(trainer, 0) for trainer in steps):
        earlier_ns, earlier_steps = {}, {}
    found = []
    for (trainer, pserver, block), ns in wait_ns.items():
        num_steps = steps.get(trainer, 0) - earlier_steps.get(trainer, 0)
        more = ns - earlier_ns.get((trainer, pserver, block), 0)
        if num_steps > 0 and more > 0:
            found.append(Wait(trainer, pserver, block, more / num_steps))
    return tuple(found)


def _decoded(raw: Sequence[bytes]) -> list[Frame]:
    frames = []
    for data in raw:
        try:
            frames.append(decode(data))  # it was recorded undecoded
        except PeerError:
            continue
    return frames


def _facts(text: str) -> GraphFacts:
    document: Any = json.loads(text)
    ops = tuple((op["name"], role_of(op), op["module"]) for op in document["ops"])
    trains = any(role in ("backward", "optimize") for _, role, _ in ops)
    return GraphFacts(ops, document["num_threads"], trains)


def role_of(op: Mapping[str, Any]) -> str:
    """The role of an operator as the dashboard colours it: its kind decides before its role."""
    if op["kind"] in ("all_reduce", "reduce", "broadcast", "gather", "rpc"):
        return "communication"
    if op["kind"] in ("feed", "fetch"):
        return "input"
    if op["kind"] == "scale_loss_grad":
        return "backward"
    return str({"lr_sched": "optimize", "loss": "forward"}.get(op["role"], op["role"]))


def _summed(frames: Sequence[Frame], used: Mapping[int, str], graphs: Mapping[str, GraphFacts]) -> dict[int, _Ops]:
    """Add up what training graphs did, by stream; the GRAPH_USED before a stream's frames says which they index."""
    current: dict[int, str] = {}
    found: dict[int, _Ops] = {}
    for frame in frames:
        if frame.kind is Kind.GRAPH_USED:
            current[frame.stream] = str(frame.body.get("hash"))
            continue
        graph = current.get(frame.stream) or used.get(frame.stream, "")
        facts = graphs.get(graph)
        if facts is None or not facts.trains:
            continue
        ops = found.get(frame.stream)
        if ops is None or ops.graph != graph:
            ops = found[frame.stream] = _Ops(graph)
        _add(ops, frame)
    return found


def _add(ops: _Ops, frame: Frame) -> None:
    index = frame.columns[Column.OP]
    if frame.kind is Kind.OP_SUMS:
        counts, totals = frame.columns[Column.COUNT], frame.columns[Column.TOTAL_NS]
        for op, count, total in zip(index.tolist(), counts.tolist(), totals.tolist(), strict=True):
            ops.count[op] += count
            ops.total_ns[op] += total
    elif frame.flags & FLAG_WHOLE_STEP and len(index):
        start, duration = frame.columns[Column.START_NS].astype("i8"), frame.columns[Column.DURATION_NS].astype("i8")
        span = int((start + duration).max() - start.min())
        if span > 0:
            ops.busy.append(int(duration.sum()) / span)


def _trainer(
    index: int, points: Sequence[tuple[int, int, float]], ops: _Ops | None, graphs: Mapping[str, GraphFacts],
    *, cores: int, running: bool,
) -> Trainer:  # fmt: skip
    if not points:
        return Trainer(index, 0.0)
    step_ns = statistics.median(value for _, _, value in points) * 1e6
    facts = None if ops is None else graphs.get(ops.graph)
    sums: tuple[OpSum, ...] = ()
    if ops is not None and facts is not None:
        sums = tuple(
            OpSum(op, *facts.ops[op], ops.count[op], ops.total_ns[op]) for op in ops.count if op < len(facts.ops)
        )
    threads = 1 if facts is None else facts.num_threads
    threads = min(threads, cores) if cores > 0 else threads  # as many operators run at once as there are cores
    return Trainer(
        index, step_ns, between_ns=between_of(points),
        silent_s=max(0.0, time.time() - points[-1][1] / 1e9) if running else 0.0,
        last_step=points[-1][0], num_threads=threads, num_cores=cores,
        idle=max(0.0, 1 - statistics.median(ops.busy) / threads) if ops is not None and ops.busy else None,
        graph=None if ops is None else ops.graph, ops=sums,
    )  # fmt: skip


def between_of(points: Sequence[tuple[int, int, float]]) -> float:
    """Nanoseconds between two steps, the median over (step, time_ns, step_ms): a test pass in between counts once."""
    found = []
    for (step, at, _), (next_step, next_at, step_ms) in pairwise(points):
        if next_step > step:
            found.append(max(0.0, (next_at - at) / (next_step - step) - step_ms * 1e6))
    return statistics.median(found) if found else 0.0


def _answer(finding: Finding) -> api.Finding:
    return api.Finding(
        cause=finding.cause, sentence=finding.sentence, share=finding.share, ms=finding.ms, place=finding.place,
        tab=finding.tab, op=finding.op, graph=finding.graph,
    )  # fmt: skip
