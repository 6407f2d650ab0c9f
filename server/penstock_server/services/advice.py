"""Gathers the recorded steps of a job for `penstock.advice`: its newest graph, events, step times. Reads only."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.advice.budget import affordable
from penstock.advice.ranked import Option, advise
from penstock.advice.recorded import Event, Recorded, recorded
from penstock.advice.setting import Setting
from penstock.errors import PeerError
from penstock.protocol.frames import FLAG_WHOLE_STEP, Column, Frame, Kind, decode
from penstock.protocol.graphdoc import GraphDocument
from penstock_server.problems import Conflict
from penstock_server.schemas import api
from penstock_server.services import advised_clusters
from penstock_server.services.advised_clusters import Heard, clusters_of
from penstock_server.services.diagnosis import Diagnoses
from penstock_server.services.evidence import between_of
from penstock_server.services.jobs import Jobs
from penstock_server.services.storage import JobStorage
from penstock_server.streams.recorder import Recorder

WINDOW_NS = 30 * 10**9
"""Of steps whose times are looked at."""
FRAMES_BYTES = 4 << 20
MOST_OPERATORS = 20_000
"""A graph that has more is not simulated at all; `penstock.advice.budget` bounds what is."""
MOST_GRAPHS = 8
"""Of one job, to be read until one is found that trains."""
MOST_KEPT = 16
REST = 4.0
"""So one job's advice takes a fifth of the time at most."""


_Result = api.Advice | Conflict
"""A refusal is kept as an answer is: it may have cost as much."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Whole steps of one graph of one trainer. `newest`: the number of the last."""

    graph: str
    steps: list[list[Event]]
    newest: int


@dataclass(frozen=True, slots=True)
class _Source:
    """What an answer is computed from. Equal: the same recording of the same attempt, so the same answer."""

    job_id: str
    attempt: int
    stream: int
    graph: str
    num_steps: int
    newest: int
    step_ns: float | None
    cores: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """An answer. Until `rests_until` of the monotonic clock it is given without a look at the recording."""

    source: _Source | None
    answer: _Result
    rests_until: float


class Advices:
    """Answers under which setting a job would be faster. One answer is computed at a time, and shared by all that ask
    for it meanwhile and for `REST` times as long as it took; later too if no step has been recorded since.
    """

    def __init__(self, jobs: Jobs, storage: JobStorage, recorder: Recorder, diagnoses: Diagnoses) -> None:
        self._jobs, self._storage, self._recorder, self._diagnoses = jobs, storage, recorder, diagnoses
        self._turn = asyncio.Lock()
        self._asked: dict[tuple[str, int], asyncio.Task[_Result]] = {}
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()

    async def of(self, job_id: str) -> api.Advice:
        """Return the settings of a job, ranked.

        Raises NotFound, and Conflict if nothing has been recorded yet or the graph is too large to be simulated.
        """
        job = await self._jobs.get(job_id)
        key = job.id, job.attempt
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = asyncio.create_task(self._in_turn(key, job), name="advice")
        result = await asyncio.shield(asked)  # a caller that leaves must not end it for the others
        if isinstance(result, Conflict):
            raise result.with_traceback(None)
        return result

    async def _in_turn(self, key: tuple[str, int], job: api.Job) -> _Result:
        try:
            async with self._turn:
                kept = self._kept.get(key)
                if kept is not None and time.monotonic() < kept.rests_until:
                    return kept.answer
                began = time.monotonic()
                source, answer = await self._answer(job, kept)
                now = time.monotonic()
                self._kept[key] = _Kept(source, answer, now + REST * (now - began))
                self._kept.move_to_end(key)
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
                return answer
        finally:
            del self._asked[key]

    async def _answer(self, job: api.Job, kept: _Kept | None) -> tuple[_Source | None, _Result]:
        raw = await self._recorder.last(job.id, {Kind.OP_EVENTS, Kind.GRAPH_USED}, FRAMES_BYTES)
        used = {r.stream: r.graph_hash for r in job.replicas if r.graph_hash is not None}
        by_stream = await asyncio.to_thread(_whole_steps, raw, used)
        times = await self._diagnoses.step_times(job.id, WINDOW_NS)
        of_nodes = await self._diagnoses.cores(job)
        cores = cores_of(job, of_nodes)
        trainers = sorted((r for r in job.replicas if r.role == "trainer"), key=lambda r: (-r.attempt, r.index))
        found = [(trainer, steps) for trainer in trainers for steps in by_stream.get(trainer.stream, [])]
        passed: set[str] = set()  # graphs without training
        for trainer, steps in found:
            if steps.graph in passed or len(passed) == MOST_GRAPHS:
                continue
            points = times.get(trainer.index, [])
            source = _Source(
                job.id, job.attempt, trainer.stream, steps.graph, len(steps.steps), steps.newest,
                statistics.median(ms for _, _, ms in points) * 1e6 if points else None, cores.get(trainer.index, 0),
            )  # fmt: skip
            if kept is not None and source == kept.source:
                return source, kept.answer
            document = await self._storage.graph(steps.graph)
            heard = await self._heard(job, between_of(points), of_nodes.get(trainer.index, 0))
            answer = await asyncio.to_thread(_computed, source, document, steps.steps, heard)
            if answer is not None:
                return source, answer
            passed.add(steps.graph)
        return None, Conflict(
            "nothing_recorded",
            f"no step of job {job.name!r} has been recorded operator by operator, so there is nothing to simulate",
            hint="wait until the job has trained for a second or so; a job without a graph has no advice",
        )

    async def _heard(self, job: api.Job, between_ns: float, cores: int) -> Heard | None:
        """Return what the processes of a job with parameter servers have exchanged of late."""
        replicas = [one for one in job.replicas if one.attempt == job.attempt]
        if not any(one.role == "pserver" for one in replicas):
            return None
        raw = await self._recorder.recent(job.id, Kind.EXCHANGE, advised_clusters.FRAMES_BYTES)
        return Heard(raw, replicas, between_ns, cores)


def cores_of(job: api.Job, of_nodes: Mapping[int, int]) -> dict[int, int]:
    """Return the cores that advice gives each trainer, by index; 0 where they are unknown.

    Those of its node; beside other replicas of the job those that it reserves, as the others compute too.
    """
    current = [r for r in job.replicas if r.attempt == job.attempt and r.node_id is not None]
    on_node = Counter(r.node_id for r in {(r.role, r.index): r for r in current}.values())
    shared = {r.index for r in current if r.role == "trainer" and on_node[r.node_id] > 1}
    reserved = job.spec.trainers.cpus
    return {index: min(n, reserved) if index in shared and reserved else n for index, n in of_nodes.items()}


def _computed(source: _Source, document: str, steps: Sequence[Sequence[Event]], heard: Heard | None) -> _Result | None:
    """Return the answer, or None if the graph does not train. Takes seconds at most: see `penstock.advice.budget`."""
    graph = GraphDocument.model_validate_json(document)
    if not any(op.role in ("backward", "optimize") for op in graph.ops):
        return None
    if len(graph.ops) > MOST_OPERATORS:
        return _too_large(graph)
    threads = 1 + max(thread for events in steps for _, thread, _, _ in events)
    spans = [max(s + d for _, _, s, d in one) - min(s for _, _, s, _ in one) for one in steps]
    step_ns = statistics.median(spans) if source.step_ns is None else source.step_ns
    run = recorded(graph, steps, step_ns=step_ns, cores=source.cores or threads)
    if run is None:
        return None
    settings, left_out = affordable(run)
    if not settings:
        return _too_large(graph)
    clusters, note = clusters_of(heard, run, steps)
    made = _answer(source, run, advise(run, settings), left_out)
    return made.model_copy(update={"clusters": clusters, "clusters_note": note})


def _too_large(graph: GraphDocument) -> Conflict:
    return Conflict(
        "too_large_to_simulate",
        f"the graph has {len(graph.ops)} operators on {graph.num_replicas} replicas, more than the server simulates",
        hint="record the job with fewer replicas (CPU_NUM)",
    )


def _whole_steps(raw: Sequence[bytes], used: Mapping[int, str]) -> dict[int, list[_Steps]]:
    """Return by stream the whole steps of each graph, the newest graph first."""
    current: dict[int, str] = {}
    found: dict[int, dict[str, _Steps]] = {}
    for data in raw:
        try:
            frame = decode(data)  # it was recorded undecoded
        except PeerError:
            continue
        if frame.kind is Kind.GRAPH_USED:
            current[frame.stream] = str(frame.body.get("hash"))
        elif frame.flags & FLAG_WHOLE_STEP and len(frame.columns[Column.OP]):
            graph = current.get(frame.stream) or used.get(frame.stream)
            if graph is not None:
                graphs = found.setdefault(frame.stream, {})
                before = graphs.pop(graph, None)
                steps = [] if before is None else before.steps
                steps.append(_events(frame))
                graphs[graph] = _Steps(graph, steps, frame.step)
    return {stream: list(reversed(graphs.values())) for stream, graphs in found.items()}


def _events(frame: Frame) -> list[Event]:
    columns = (Column.OP, Column.THREAD, Column.START_NS, Column.DURATION_NS)
    op, thread, start, duration = (frame.columns[column].tolist() for column in columns)
    return list(zip(op, thread, start, duration, strict=True))


def _answer(source: _Source, run: Recorded, options: Sequence[Option], left_out: Sequence[Setting]) -> api.Advice:
    return api.Advice(
        job_id=source.job_id, attempt=source.attempt, graph=source.graph, sampled_steps=source.num_steps,
        cores=run.cores, step_ms=round(run.step_ns / 1e6, 4), options=[_option(option) for option in options],
        left_out=[setting.name for setting in left_out], clusters=[], clusters_note="",
    )  # fmt: skip


def _option(option: Option) -> api.AdvisedSetting:
    setting = option.setting
    return api.AdvisedSetting(
        name=setting.name, num_threads=setting.num_threads, cpu_num=setting.cpu_num,
        reduce_strategy="AllReduce" if setting.exchange == "all_reduce" else "Reduce",
        bucket_mb=setting.bucket_bytes / 2**20, workers=option.workers, intra_op_threads=option.intra_op,
        step_ms=round(option.step_ns / 1e6, 4), samples_per_s=round(option.samples_per_s, 1),
        busy=round(option.busy, 4), busy_ms=[round(ns / 1e6, 4) for ns in option.busy_ns], path=list(option.path),
        current=option.is_current, reason=option.reason, env=setting.environment(),
    )  # fmt: skip
