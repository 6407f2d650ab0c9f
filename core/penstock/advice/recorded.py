"""What one recorded run tells: its graph, the times of its operators in sampled steps, and of its steps. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.advice.setting import DEFAULT_BUCKET_BYTES, THREADS_OF_A_REPLICA, Exchange, Setting
from penstock.protocol.graphdoc import GraphDocument

Event = tuple[int, int, int, int]
"""(operator, thread, start in ns, duration in ns)."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One run. `op_ns`: by operator of `graph`, the median; `outside_ns`: of a step, before and after its operators.

    `cores`: of the machine.
    """

    graph: GraphDocument
    setting: Setting
    cores: int
    step_ns: float
    outside_ns: float
    op_ns: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return sum(self.graph.batch)


def recorded(
    graph: GraphDocument, steps: Sequence[Sequence[Event]], *, step_ns: float, cores: int, quantile: float = 0.5
) -> Recorded | None:
    """Return what whole steps of one graph say; None if there is none. `step_ns`: that `quantile` of a step's time.

    On a busy machine a lower quantile than the median tells more, since interference only adds. An operator that no
    step has counts as nothing. The setting is the one that the graph and the threads in use show.
    """
    whole = [events for events in steps if events]
    if not whole:
        return None
    durations: dict[int, list[int]] = defaultdict(list)
    for events in whole:
        for op, _, _, duration in events:
            durations[op].append(duration)
    op_ns = tuple(_at(durations[op], quantile) if op in durations else 0.0 for op in range(len(graph.ops)))
    spans = [max(s + d for _, _, s, d in events) - min(s for _, _, s, _ in events) for events in whole]
    outside = max(0.0, step_ns - _at(spans, quantile))
    threads = 1 + max(thread for events in whole for _, thread, _, _ in events)
    return Recorded(graph, setting_of(graph, threads), max(1, cores), step_ns, outside, op_ns)


def _at(values: Sequence[int], quantile: float) -> float:
    """Return a quantile as one of the values."""
    return float(sorted(values)[min(len(values) - 1, int(quantile * len(values)))])


def setting_of(graph: GraphDocument, threads: int) -> Setting:
    """Return the setting of a graph that ran on `threads`: four a replica, as in its document, is the default."""
    is_default = graph.num_threads == THREADS_OF_A_REPLICA * graph.num_replicas and threads <= graph.num_replicas
    exchange: Exchange = "all_reduce" if graph.mode == "all_reduce" else "reduce"
    bucket = bucket_of(graph) if exchange == "all_reduce" else DEFAULT_BUCKET_BYTES
    return Setting(0 if is_default else graph.num_threads, graph.num_replicas, exchange, bucket).canonical()


def bucket_of(graph: GraphDocument) -> int:
    """Return the default's bytes, or 0 where one bucket holds more gradients than buckets of that size would."""
    sizes: dict[int, list[int]] = defaultdict(list)
    for sync in graph.syncs:
        if not sync.sparse and len(sync.ops) == 1:
            sizes[sync.ops[0]].append(sync.bytes)
    closes = [sum(found[:-1]) for found in sizes.values() if len(found) > 1]
    return 0 if any(before >= DEFAULT_BUCKET_BYTES for before in closes) else DEFAULT_BUCKET_BYTES
