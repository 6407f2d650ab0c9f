"""One executor's side of the telemetry: what the training thread calls, and what the drain thread takes from it.

The two threads meet in deques only, whose `append` and `popleft` are atomic.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.protocol.frames import MAX_FRAME_BYTES, Kind
from penstock.protocol.graphdoc import GraphDocument, GraphHash, Threads, canonical, graph_hash
from penstock.telemetry.collector import MARK, Collected, Collector, GraphPlan
from penstock.telemetry.events import Events, TraceSource
from penstock.telemetry.metrics import Thinner
from penstock.telemetry.outbox import message
from penstock.telemetry.unwatched import Watch

_log = logging.getLogger(__name__)
MAX_PLANS = 32  # documents whose preparation is remembered
_Mark = tuple[int, int, int, int, float]


class LiveWatch(Watch):
    """A watch of a managed or attached process. `close`, once done, also makes `step` and `graph` forget."""

    is_watched = True

    def __init__(
        self, source: TraceSource, collector: Collector, *, name: str, on_close: Callable[[LiveWatch], None],
        threads: Threads | None = None,
    ) -> None:  # fmt: skip
        self.name, self.threads = name, threads
        self.last_step = 0
        self.collector = collector
        self.thinner = Thinner()
        self._source = source
        self._on_close = on_close
        self._marks: deque[_Mark] = deque()
        self._graphs: deque[tuple[GraphDocument, int]] = deque()
        self._plans: dict[int, tuple[GraphDocument, GraphPlan]] = {}

    def graph(self, document: GraphDocument, from_step: int = 0) -> None:
        self._graphs.append((document, from_step))

    def step(self, *, step: int, start_ns: int, end_ns: int, samples: int, loss: float | None) -> None:
        self._marks.append((step, start_ns, end_ns, samples, math.nan if loss is None else loss))
        self.last_step = step

    def close(self) -> None:
        self._on_close(self)

    def forget(self) -> None:
        """Drop everything from now on: it is not drained any more."""
        self._marks = deque(maxlen=0)
        self._graphs = deque(maxlen=0)

    def collect(self, now_ns: int, announce: Callable[[GraphHash, GraphDocument], None]) -> Collected:
        """Take what happened since the last call. Drain thread.

        The order matters: a step that is marked has all its events in the source, so marks are taken before the
        source is drained; an event's graph was announced before its run, so graphs are taken after.
        """
        marks = np.array([self._marks.popleft() for _ in range(len(self._marks))], MARK)
        drained = self._source.drain()
        while self._graphs:
            document, from_step = self._graphs.popleft()
            self.collector.use(self._plan(document, announce), from_step=from_step)
        return self.collector.collect(Events.of(drained), lost=_lost(drained["lost"]), marks=marks, now_ns=now_ns)

    def _plan(self, document: GraphDocument, announce: Callable[[GraphHash, GraphDocument], None]) -> GraphPlan:
        known = self._plans.get(id(document))
        if known is not None and known[0] is document:
            return known[1]
        sent = _that_fits(document)
        graph = graph_hash(sent)
        announce(graph, sent)
        plan = GraphPlan.of(document, graph)
        if len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[id(document)] = (document, plan)
        return plan


def _that_fits(document: GraphDocument) -> GraphDocument:
    """Return a document without `passes` if only these make it too large for a frame. Cost: O(operators + edges)."""
    if document.passes is None or len(canonical(document)) < MAX_FRAME_BYTES // 2:
        return document
    try:
        message(Kind.GRAPH, document.model_dump(mode="json"))
    except ValueError:
        _log.warning("what passes changed in the graph of %s is not shown: it is too large to send", document.program)
        return document.model_copy(update={"passes": None})
    return document


def _lost(value: Any) -> int:
    return int(np.sum(value))  # a number, or one for each ring
