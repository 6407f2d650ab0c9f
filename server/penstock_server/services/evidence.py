"""What the frames and metrics of a job say of its trainers, for `penstock.diagnosis`. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.advice.costs import split_share
from penstock.diagnosis import OpSum, Trainer, Wait
from penstock.errors import PeerError
from penstock.protocol.frames import FLAG_WHOLE_STEP, Array, Column, Frame, Kind, decode
from penstock.protocol.graphdoc import GraphDocument, Op, Threads
from penstock_server.schemas import api

Point = tuple[int, int, float]
"""(step, time_ns, step_ms)."""


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What a diagnosis needs of an operator: see `penstock.diagnosis.OpSum`."""

    name: str
    role: str
    module: str
    split: float = 0.0
    type: str = ""
    sizes: str = ""
    flops: int = 0


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a diagnosis needs of a graph document. `edges`: int32, [E, 2], by the operator that waits."""

    ops: tuple[OpFacts, ...]
    edges: Array
    trains: bool


@dataclass(slots=True)
class Ran:
    """What the operators of one stream did since its graph came into use. `threads`: None of an older process.

    `evaluates`: the newest graph in use is one that does not train. `sampled_step`: the newest whole one.
    """

    graph: str  # "" if none of them trains
    threads: Threads | None = None
    count: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    total_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    evaluates: bool = False
    sampled_step: int | None = None
    busy: list[float] = field(default_factory=list)  # threads that computed, in the mean over a sampled step
    sampled: list[tuple[Array, Array]] = field(default_factory=list)  # operators and durations in ns, of whole steps

    def durations_ns(self) -> dict[int, Array]:
        """Return the durations of each operator's runs in sampled steps, ascending."""
        if not self.sampled:
            return {}
        ops, spent = (np.concatenate(each) for each in zip(*self.sampled, strict=True))
        order = np.lexsort((spent, ops))
        found, begins = np.unique(ops[order], return_index=True)
        return dict(zip(found.tolist(), np.split(spent[order], begins[1:]), strict=True))


def waits_of(now: api.Exchange, before: api.Exchange | None) -> tuple[Wait, ...]:
    """Return the waits of each step between two states; since the attempt began if `before` knows nothing of it.

    Where no step has ended between them, all of the wait is of the one that has not.
    """
    earlier_steps = {} if before is None else before.steps
    earlier_ns = {} if before is None else {(c.trainer, c.pserver, c.block): c.wait_ns for c in before.cells}
    found = []
    for cell in now.cells:
        num_steps = now.steps.get(cell.trainer, 0) - earlier_steps.get(cell.trainer, 0)
        more = cell.wait_ns - earlier_ns.get((cell.trainer, cell.pserver, cell.block), 0)
        if more > 0 and cell.trainer in now.steps:
            found.append(Wait(cell.trainer, cell.pserver, cell.block, more / max(1, num_steps)))
    return tuple(found)


def rank_of(durations_ns: Array | None, share: float) -> int | None:
    """Return the duration that a share of runs does not exceed. `durations_ns`: ascending; None: no run."""
    if durations_ns is None or not len(durations_ns):
        return None
    return int(durations_ns[math.ceil(share * len(durations_ns)) - 1])


def decoded(raw: Sequence[bytes]) -> list[Frame]:
    """Decode frames, which were recorded as they came; those that are none are left out."""
    frames = []
    for data in raw:
        try:
            frames.append(decode(data))  # it was recorded undecoded
        except PeerError:
            continue
    return frames


def facts_of(text: str) -> GraphFacts:
    """Read a stored document. Cost: some 0.1 s for 20,000 operators."""
    document = GraphDocument.model_validate_json(text)
    ops = tuple(
        OpFacts(op.name, role_of(op), op.module, split_share(op), op.type, _sizes(op), op.flops) for op in document.ops
    )
    edges = np.array(document.edges, np.int32).reshape(-1, 2)
    edges = edges[edges[:, 0] < edges[:, 1]]
    return GraphFacts(
        ops, edges[np.argsort(edges[:, 1], kind="stable")], any(op.role in ("backward", "optimize") for op in ops)
    )


def _sizes(op: Op) -> str:
    return " ".join("x".join(map(str, value.shape)) for value in (*op.inputs, *op.outputs))


def role_of(op: Op) -> str:
    """Return the role of an operator as the dashboard colours it: its kind decides before its role."""
    if op.kind in ("all_reduce", "reduce", "broadcast", "gather", "rpc"):
        return "communication"
    if op.kind in ("feed", "fetch"):
        return "input"
    if op.kind == "scale_loss_grad":
        return "backward"
    return {"lr_sched": "optimize", "loss": "forward"}.get(op.role, op.role)


def summed(
    frames: Sequence[Frame], used: Mapping[int, str], graphs: Mapping[str, GraphFacts], window_ns: int | None = None
) -> dict[int, Ran]:
    """Add up what training graphs did, by stream; the GRAPH_USED before a stream's frames says which they index.

    `window_ns`: before the newest frame of a stream and kind; None: all of them.
    """
    newest = {(frame.stream, frame.kind): frame.t0_ns for frame in frames}
    current: dict[int, tuple[str, Threads | None]] = {}
    found: dict[int, Ran] = {}
    for frame in frames:
        if frame.kind is Kind.GRAPH_USED:
            current[frame.stream] = str(frame.body.get("hash")), Threads.of(frame.body)
            continue
        graph, threads = current.get(frame.stream) or (used.get(frame.stream, ""), None)
        facts = graphs.get(graph)
        if facts is None or not facts.trains:
            continue
        ran = found.get(frame.stream)
        if ran is None or ran.graph != graph:
            ran = found[frame.stream] = Ran(graph)
        ran.threads = threads or ran.threads
        if window_ns is None or frame.t0_ns >= newest[frame.stream, frame.kind] - window_ns:
            _add(ran, frame)
    for stream, (graph, _) in current.items():
        facts = graphs.get(graph)
        if facts is not None and not facts.trains:
            found.setdefault(stream, Ran("")).evaluates = True
    return found


def _add(ran: Ran, frame: Frame) -> None:
    index = frame.columns[Column.OP]
    if frame.kind is Kind.OP_SUMS:
        counts, totals = frame.columns[Column.COUNT], frame.columns[Column.TOTAL_NS]
        for op, count, total in zip(index.tolist(), counts.tolist(), totals.tolist(), strict=True):
            ran.count[op] += count
            ran.total_ns[op] += total
    elif frame.flags & FLAG_WHOLE_STEP and len(index):
        start, duration = frame.columns[Column.START_NS].astype("i8"), frame.columns[Column.DURATION_NS].astype("i8")
        span = int((start + duration).max() - start.min())
        ran.sampled_step = frame.step
        ran.sampled.append((index, duration))
        if span > 0:
            ran.busy.append(int(duration.sum()) / span)


def trainer_of(
    index: int, points: Sequence[Point], ran: Ran | None, graphs: Mapping[str, GraphFacts],
    *, node: str = "", cores: int = 0, silent_s: float = 0.0,
) -> Trainer:  # fmt: skip
    """Return a trainer of late. `points`: ascending; `cores`: of its node, which the job may use; 0 if unknown."""
    if not points:
        return Trainer(index, 0.0)
    step_ns = statistics.median(value for _, _, value in points) * 1e6
    facts = None if ran is None else graphs.get(ran.graph)
    if ran is None or facts is None:
        return Trainer(
            index, step_ns, between_ns=between_of(points), silent_s=silent_s, last_step=points[-1][0], node=node,
            num_cores=cores, evaluates=ran is not None and ran.evaluates,
        )  # fmt: skip
    ops = tuple(_op_sum(at, facts.ops[at], ran) for at in ran.count if at < len(facts.ops))
    threads = ran.threads or Threads(1, 0)
    has_more_cores = 2 * threads.workers * threads.intra_op <= cores
    return Trainer(
        index, step_ns, between_ns=between_of(points), silent_s=silent_s, last_step=points[-1][0],
        workers=threads.workers, intra_op_threads=threads.intra_op, node=node, num_cores=cores,
        idle=max(0.0, 1 - statistics.median(ran.busy) / threads.workers) if ran.threads and ran.busy else None,
        graph=ran.graph, ops=ops, evaluates=ran.evaluates, sampled_step=ran.sampled_step,
        matrix_gflops=threads.matrix_gflops, unfinished=unfinished_of(facts, ran.count) if silent_s else (),
        path_ns=_path_ns(facts, ops) if has_more_cores else 0.0,
    )  # fmt: skip


def _op_sum(at: int, facts: OpFacts, ran: Ran) -> OpSum:
    return OpSum(
        at, facts.name, facts.role, facts.module, ran.count[at], ran.total_ns[at], split=facts.split, type=facts.type,
        sizes=facts.sizes, flops=facts.flops,
    )  # fmt: skip


def unfinished_of(facts: GraphFacts, count: Mapping[int, int]) -> tuple[int, ...]:
    """Return the operators that have run once less than everything that they wait for: those a step is at.

    `count`: runs since any moment. An operator whose inputs ran before it, and itself after it, looks finished.
    """
    if not len(facts.edges):
        return ()
    counts = np.zeros(len(facts.ops), np.int64)
    for op, number in count.items():
        if op < len(counts):
            counts[op] = number
    waiting, begins = np.unique(facts.edges[:, 1], return_index=True)
    fewest = np.minimum.reduceat(counts[facts.edges[:, 0]], begins)
    at = waiting[(counts[waiting] == fewest - 1) & (counts[waiting] > 0)]
    return tuple(at.tolist())


def unfinished_name(facts: GraphFacts, count: Mapping[int, int]) -> str:
    """Return the name of the operator that a step is at, '' if that is unknown; what computes before exchanges."""
    ops = [facts.ops[op] for op in unfinished_of(facts, count)]
    return min(ops, key=lambda op: op.role == "communication").name if ops else ""


def _path_ns(facts: GraphFacts, ops: Sequence[OpSum]) -> float:
    """Nanoseconds of the longest chain of operators of a step, at their means."""
    mean_ns = [0.0] * len(facts.ops)
    for op in ops:
        mean_ns[op.index] = op.total_ns / max(1, op.count)
    begins = [0.0] * len(facts.ops)
    for before, op_index in facts.edges.tolist():
        begins[op_index] = max(begins[op_index], begins[before] + mean_ns[before])
    return max((at + ns for at, ns in zip(begins, mean_ns, strict=True)), default=0.0)


def turn_of(points: Sequence[Point]) -> float:
    """Nanoseconds from the beginning of a step to that of the next, the median."""
    return between_of(points) + statistics.median(ms for _, _, ms in points) * 1e6 if points else 0.0


def between_of(points: Sequence[Point]) -> float:
    """Nanoseconds between two steps, the median over (step, time_ns, step_ms): a test pass in between counts once."""
    found = []
    for (step, at, _), (next_step, next_at, step_ms) in pairwise(points):
        if next_step > step:
            found.append(max(0.0, (next_at - at) / (next_step - step) - step_ms * 1e6))
    return statistics.median(found) if found else 0.0
