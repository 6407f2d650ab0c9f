"""Gathers the recorded steps of a job for `penstock.advice`: its newest graph, events, step times. Reads only."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.advice.ranked import Option, advise
from penstock.advice.recorded import Event, Recorded, recorded
from penstock.errors import PeerError
from penstock.protocol.frames import FLAG_WHOLE_STEP, Column, Frame, Kind, decode
from penstock.protocol.graphdoc import GraphDocument
from penstock_server.problems import Conflict
from penstock_server.schemas import api
from penstock_server.services.diagnosis import Diagnoses
from penstock_server.services.jobs import Jobs
from penstock_server.services.storage import JobStorage
from penstock_server.streams.recorder import Recorder

FRAMES_BYTES = 4 << 20
MOST_OPERATORS = 20_000
"""Of a larger graph a simulation of all settings takes more than some seconds."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Whole steps of one graph of one trainer."""

    graph: str
    steps: list[list[Event]]


class Advices:
    """Answers under which setting a job would be faster."""

    def __init__(self, jobs: Jobs, storage: JobStorage, recorder: Recorder, diagnoses: Diagnoses) -> None:
        self._jobs, self._storage, self._recorder, self._diagnoses = jobs, storage, recorder, diagnoses

    async def of(self, job_id: str) -> api.Advice:
        """Return the settings of a job, ranked. Raises NotFound, and Conflict if nothing has been recorded yet."""
        job = await self._jobs.get(job_id)
        raw = await self._recorder.last(job_id, {Kind.OP_EVENTS, Kind.GRAPH_USED}, FRAMES_BYTES)
        used = {r.stream: r.graph_hash for r in job.replicas if r.graph_hash is not None}
        by_stream = await asyncio.to_thread(_whole_steps, raw, used)
        times = await self._diagnoses.step_times(job_id)
        cores = await self._diagnoses.cores(job)
        trainers = sorted((r for r in job.replicas if r.role == "trainer"), key=lambda r: (-r.attempt, r.index))
        for trainer in trainers:
            for found in by_stream.get(trainer.stream, []):
                run = await self._recorded(found, times.get(trainer.index, []), cores.get(trainer.index, 0))
                if run is not None:
                    options = await asyncio.to_thread(advise, run)
                    return _answer(job, found, run, options)
        raise Conflict(
            "nothing_recorded",
            f"no step of job {job.name!r} has been recorded operator by operator, so there is nothing to simulate",
            hint="wait until the job has trained for a second or so; a job without a graph has no advice",
        )

    async def _recorded(self, found: _Steps, points: Sequence[tuple[int, int, float]], cores: int) -> Recorded | None:
        graph = GraphDocument.model_validate_json(await self._storage.graph(found.graph))
        if len(graph.ops) > MOST_OPERATORS or not any(op.role in ("backward", "optimize") for op in graph.ops):
            return None
        threads = 1 + max(thread for events in found.steps for _, thread, _, _ in events)
        spans = [max(s + d for _, _, s, d in one) - min(s for _, _, s, _ in one) for one in found.steps]
        step_ns = statistics.median(ms for _, _, ms in points) * 1e6 if points else statistics.median(spans)
        return recorded(graph, found.steps, step_ns=step_ns, cores=cores or threads)


def _whole_steps(raw: Sequence[bytes], used: Mapping[int, str]) -> dict[int, list[_Steps]]:
    """Return by stream the whole steps of each graph, the newest graph first."""
    current: dict[int, str] = {}
    found: dict[int, dict[str, list[list[Event]]]] = {}
    for data in raw:
        try:
            frame = decode(data)  # it was recorded undecoded
        except PeerError:
            continue
        if frame.kind is Kind.GRAPH_USED:
            current[frame.stream] = str(frame.body.get("hash"))
        elif frame.flags & FLAG_WHOLE_STEP:
            graph = current.get(frame.stream) or used.get(frame.stream)
            if graph is not None:
                graphs = found.setdefault(frame.stream, {})
                steps = graphs.pop(graph, [])
                steps.append(_events(frame))
                graphs[graph] = steps
    return {
        stream: [_Steps(graph, steps) for graph, steps in reversed(graphs.items())] for stream, graphs in found.items()
    }


def _events(frame: Frame) -> list[Event]:
    columns = (Column.OP, Column.THREAD, Column.START_NS, Column.DURATION_NS)
    op, thread, start, duration = (frame.columns[column].tolist() for column in columns)
    return list(zip(op, thread, start, duration, strict=True))


def _answer(job: api.Job, found: _Steps, run: Recorded, options: Sequence[Option]) -> api.Advice:
    return api.Advice(
        job_id=job.id, attempt=job.attempt, graph=found.graph, sampled_steps=len(found.steps), cores=run.cores,
        step_ms=round(run.step_ns / 1e6, 4), options=[_option(option) for option in options],
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
