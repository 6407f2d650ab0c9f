"""What each operator of a process cost: count, total and maximum of all its runs, a distribution of the sampled ones.

Sums (OP_SUMS) are of every run; minimum and percentiles are of the runs in sampled steps (OP_EVENTS), which are
counted apart. Durations of an operator are counted in bins, 32 to a factor of two, so that memory does not grow with
the job; a percentile is the middle of its bin, at most 1.1 % from the true one. Pure but for reading the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from penstock.export.recording import Process, Recording
from penstock.protocol.frames import Column, Frame, Kind
from penstock.protocol.graphdoc import GraphDocument

KINDS = frozenset({Kind.OP_SUMS, Kind.OP_EVENTS})
BINS_PER_OCTAVE = 32
_BINS = 32 * BINS_PER_OCTAVE + 1  # durations are u32; bin 0 holds 0
_PART_OPS = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One operator of one replica in one process. Times in nanoseconds; None where no step was sampled.

    `op`: its index in the graph. `bytes`: of its inputs and outputs together, for one run. `replica`: -1 works for all.
    """

    attempt: int
    process: str
    graph: str
    op: int
    name: str
    type: str
    kind: str
    role: str
    replica: int
    module: str
    line: str
    bytes: int
    count: int
    total_ns: int
    mean_ns: float | None
    max_ns: int
    sampled: int
    min_ns: int | None
    p50_ns: float | None
    p99_ns: float | None


COLUMNS = tuple(field.name for field in fields(Row))


class Costs:
    """Costs of the operators of one graph, 40 bytes each, and 4,100 more once sampled.

    `num_ops`: rows of others are left out.
    """

    def __init__(self, num_ops: int) -> None:
        self._num_ops = num_ops
        self.count = np.zeros(num_ops, np.int64)
        self.total_ns = np.zeros(num_ops, np.int64)
        self.max_ns = np.zeros(num_ops, np.int64)
        self.min_ns = np.full(num_ops, np.iinfo(np.int64).max)
        self._row_of = np.full(num_ops, -1, np.int64)  # in _bins, which have rows of sampled operators only
        self._bins = np.zeros((0, _BINS), np.uint32)

    def add_sums(self, frame: Frame) -> None:
        """Add the runs that an OP_SUMS frame counts."""
        op = frame.columns[Column.OP].astype(np.int64)
        known = op < self._num_ops
        np.add.at(self.count, op[known], frame.columns[Column.COUNT][known].astype(np.int64))
        np.add.at(self.total_ns, op[known], frame.columns[Column.TOTAL_NS][known].astype(np.int64))
        np.maximum.at(self.max_ns, op[known], frame.columns[Column.MAX_NS][known].astype(np.int64))

    def add_events(self, frame: Frame) -> None:
        """Add the runs of a sampled step."""
        op = frame.columns[Column.OP].astype(np.int64)
        known = op < self._num_ops
        op, spent = op[known], frame.columns[Column.DURATION_NS][known].astype(np.int64)
        np.minimum.at(self.min_ns, op, spent)
        self._add_rows(np.unique(op[self._row_of[op] < 0]))
        np.add.at(self._bins, (self._row_of[op], bin_of(spent)), np.uint32(1))

    def _add_rows(self, op: npt.NDArray[np.int64]) -> None:
        if len(op):
            self._row_of[op] = np.arange(len(self._bins), len(self._bins) + len(op))
            self._bins = np.concatenate([self._bins, np.zeros((len(op), _BINS), np.uint32)])

    def sampled(self) -> npt.NDArray[np.int64]:
        """Return how many runs of each operator were sampled."""
        counts = np.zeros(self._num_ops, np.int64)
        op = np.flatnonzero(self._row_of >= 0)
        counts[op] = self._bins.sum(axis=1, dtype=np.int64)[self._row_of[op]]
        return counts

    def percentile(self, share: float) -> npt.NDArray[np.float64]:
        """Return the duration that `share` of an operator's sampled runs do not exceed; NaN without any."""
        found = np.full(self._num_ops, np.nan)
        sampled = np.flatnonzero(self._row_of >= 0)
        for begin in range(0, len(sampled), _PART_OPS):
            op = sampled[begin : begin + _PART_OPS]
            passed = np.cumsum(self._bins[self._row_of[op]], axis=1, dtype=np.int64)
            wanted = np.ceil(share * passed[:, -1:])
            found[op] = middle_of((passed >= wanted).argmax(axis=1))
        return found


def bin_of(duration_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bins of durations from 0 to 2^32 - 1 ns."""
    exponent = np.log2(np.maximum(duration_ns, 1)) * BINS_PER_OCTAVE
    return np.where(duration_ns > 0, 1 + np.floor(exponent).astype(np.int64), 0)


def middle_of(number: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Return the duration in the middle of bins, nanoseconds."""
    return np.where(number > 0, np.exp2((number - 0.5) / BINS_PER_OCTAVE), 0.0)


def statistics(recording: Recording) -> Iterator[list[Row]]:
    """Yield the rows of each process and graph: operators that ran.

    In memory are the costs of all graphs of one process, which may return to any of them until it ends, and the
    documents of all graphs. The costs of a graph are freed once its rows have been yielded.
    Frames of a graph that is not known are left out: their operators have no names.
    """
    for process in recording.processes:
        costs: dict[str, Costs] = {}
        for one in recording.frames(process, KINDS):
            if one.graph is None:
                continue
            if one.graph not in costs:
                costs[one.graph] = Costs(len(recording.document(one.graph).ops))
            if one.frame.kind is Kind.OP_SUMS:
                costs[one.graph].add_sums(one.frame)
            else:
                costs[one.graph].add_events(one.frame)
        for graph in list(costs):
            yield rows_of(process, graph, recording.document(graph), costs.pop(graph))


def rows_of(process: Process, graph: str, document: GraphDocument, costs: Costs) -> list[Row]:
    """Return the operators of a graph that ran, by total time, the largest first."""
    sampled, p50, p99 = costs.sampled(), costs.percentile(0.5), costs.percentile(0.99)
    rows = []
    for at, op in enumerate(document.ops):
        count, samples = int(costs.count[at]), int(sampled[at])
        if not count and not samples:
            continue
        total_ns = int(costs.total_ns[at])
        rows.append(
            Row(
                process.attempt, process.name, graph, at, op.name, op.type, op.kind, op.role, op.replica, op.module,
                op.source, op.bytes, count, total_ns, total_ns / count if count else None, int(costs.max_ns[at]),
                samples, int(costs.min_ns[at]) if samples else None,
                float(p50[at]) if samples else None, float(p99[at]) if samples else None,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row.total_ns)
