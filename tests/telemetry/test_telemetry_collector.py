"""What a watch makes of drained events and marks: nothing invented, nothing lost, whole steps whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.frames import FLAG_WHOLE_STEP, Array, Column, Kind
from penstock.protocol.graphdoc import GraphDocument, graph_hash
from penstock.telemetry.collector import MARK, Collected, Collector, Draft, GraphPlan, Marks
from penstock.telemetry.events import Events, concatenate
from penstock.telemetry.outbox import pack
from penstock.telemetry.sampling import Sampler

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "frames" / "graph.json").read_text())["body"]
T0 = 1_790_000_000_000_000_000


def plan(program: str = "p") -> GraphPlan:
    """The golden document: operators 0 and 1 make a gradient, 2 exchanges it; 64 bytes on two replicas."""
    document = GraphDocument.model_validate({**GOLDEN, "program": program})
    return GraphPlan.of(document, graph_hash(document))


def events(*rows: tuple[int, int, int, int]) -> Events:
    """Rows are (step, operator, start ns after T0, duration ns)."""
    step, op, start, took = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Events(start + T0, took, op, step, step % 2)


def marks(*steps: int, took: int = 1000) -> Marks:
    return np.array([(step, T0, T0 + took, 8, math.nan) for step in steps], MARK)


def step_of(step: int) -> Events:
    at = step * 1000
    return events((step, 0, at, 100), (step, 1, at, 200), (step, 2, at + 250, 50))


NONE = events((0, 0, 0, 0)).select(slice(0, 0))
NO_MARKS = marks()


def of_kind(drafts: list[Draft], kind: Kind) -> list[Draft]:
    return [draft for draft in drafts if draft.kind is kind]


def take(collector: Collector, what: Events, which: Marks, *, lost: int = 0) -> Collected:
    return collector.collect(what, lost=lost, marks=which, now_ns=T0)


def unpack(draft: Draft) -> list[tuple[int, int, int, int]]:
    """Return (step, operator, start ns after T0, duration ns) of an OP_EVENTS draft."""
    start = (draft.columns[Column.START_NS].astype(np.int64) + draft.t0_ns - T0).tolist()
    return [
        (draft.step, int(o), s, int(d))
        for o, s, d in zip(draft.columns[Column.OP], start, draft.columns[Column.DURATION_NS], strict=True)
    ]


def started() -> Collector:
    collector = Collector(Sampler())
    collector.use(plan(), from_step=0)
    return collector


def test_a_step_is_sent_whole_once_its_mark_is_there() -> None:
    collector = started()
    early = take(collector, step_of(0).select(slice(0, 2)), NO_MARKS)
    assert [draft.kind for draft in early.drafts] == [Kind.OP_SUMS]
    got = take(collector, step_of(0).select(slice(2, 3)), marks(0))
    (sample,) = of_kind(got.drafts, Kind.OP_EVENTS)
    assert sample.flags == FLAG_WHOLE_STEP
    assert unpack(sample) == [(0, 0, 0, 100), (0, 1, 0, 200), (0, 2, 250, 50)]


def test_exchange_and_metrics_of_a_step_come_from_its_events() -> None:
    got = take(started(), concatenate([step_of(0), step_of(1)]), marks(0, 1, took=900))
    (sync,) = of_kind(got.drafts, Kind.SYNC)
    values = {column.name: array.tolist() for column, array in sync.columns.items()}
    assert values == {"PARAM": [0], "COUNT": [2], "BYTES": [128], "TOTAL_NS": [100], "WAIT_NS": [300]}
    assert got.rows[["step", "samples", "step_ns", "sync_bytes", "sync_ns"]].tolist() == [
        (0, 8, 900, 64, 50),
        (1, 8, 900, 64, 50),
    ]


def test_each_frame_names_the_graph_that_its_step_ran() -> None:
    collector, odd = started(), plan("odd batch")
    collector.use(odd, from_step=1)
    collector.use(plan(), from_step=2)
    got = take(collector, concatenate([step_of(0), step_of(1), step_of(2)]), marks(0, 1, 2))
    graphs = {draft.step: draft.graph for draft in of_kind(got.drafts, Kind.OP_EVENTS)}
    assert graphs == {0: plan().hash, 1: odd.hash, 2: plan().hash}
    assert {draft.graph for draft in of_kind(got.drafts, Kind.OP_SUMS)} == {plan().hash, odd.hash}
    assert sum(int(draft.columns[Column.COUNT].sum()) for draft in of_kind(got.drafts, Kind.OP_SUMS)) == 9


def test_before_any_graph_only_metrics_are_sent() -> None:
    got = take(Collector(Sampler()), step_of(0), marks(0))
    assert got.drafts == []
    assert len(got.rows) == 1


def test_a_failed_step_is_sent_once_a_later_one_is_complete() -> None:
    collector = started()
    take(collector, concatenate([step_of(0), step_of(1).select(slice(0, 1))]), marks(0))
    got = take(collector, step_of(2), marks(2))
    torn = [draft for draft in of_kind(got.drafts, Kind.OP_EVENTS) if draft.flags == 0]
    assert [unpack(draft) for draft in torn] == [[(1, 0, 1000, 100)]]


def test_after_a_failure_the_last_and_the_torn_steps_are_sent() -> None:
    collector = Collector(Sampler(budget_bytes_per_s=1e-9))
    collector.use(plan(), from_step=0)
    take(collector, step_of(0), marks(0))  # takes the whole budget
    for step in range(1, 7):
        assert of_kind(take(collector, step_of(step), marks(step)).drafts, Kind.OP_EVENTS) == []
    take(collector, step_of(7).select(slice(0, 2)), NO_MARKS)
    assert [(draft.step, draft.flags) for draft in collector.last_words(failed=True)] == [
        (4, 1),
        (5, 1),
        (6, 1),
        (7, 0),
    ]
    assert collector.last_words(failed=False) == []


def test_nothing_is_sent_twice_at_the_end() -> None:
    collector = started()
    take(collector, step_of(0), marks(0))
    assert collector.last_words(failed=True) == []


def test_steps_that_may_have_lost_events_give_no_exchange() -> None:
    collector = started()
    got = take(collector, concatenate([step_of(0), step_of(1)]), marks(0), lost=5)
    assert [draft.kind for draft in got.drafts] == [Kind.OP_SUMS]
    assert got.lost == 5
    assert got.rows["sync_bytes"].tolist() == [0]
    assert [draft.kind for draft in take(collector, NONE, marks(1)).drafts] == []
    healthy = take(collector, step_of(2), marks(2))
    assert {draft.kind for draft in healthy.drafts} == {Kind.OP_SUMS, Kind.SYNC, Kind.OP_EVENTS}


def test_operators_beyond_a_frames_range_are_counted_as_lost() -> None:
    got = take(started(), events((0, 0, 0, 1), (0, 65536, 0, 1)), marks(0))
    assert got.lost == 1
    assert [unpack(draft) for draft in of_kind(got.drafts, Kind.OP_EVENTS)] == [[(0, 0, 0, 1)]]


def test_a_step_longer_than_a_frame_can_express_is_split() -> None:
    far = 5_000_000_000  # ns; START_NS ends at 4.29 s
    got = take(started(), events((0, 0, 0, 100), (0, 1, far, 200), (0, 2, far + 300, 50)), marks(0))
    samples = of_kind(got.drafts, Kind.OP_EVENTS)
    assert [unpack(draft) for draft in samples] == [[(0, 0, 0, 100)], [(0, 1, far, 200), (0, 2, far + 300, 50)]]
    assert all(len(pack(draft).data) for draft in samples)


def test_a_step_larger_than_a_frame_is_split_into_several() -> None:
    many = 400_000
    column: Array = np.arange(many)
    big = Events(column + T0, np.ones(many, np.int64), column % 3, np.zeros(many, np.int64), np.zeros(many, np.int64))
    samples = of_kind(take(started(), big, marks(0)).drafts, Kind.OP_EVENTS)
    assert len(samples) == 2
    assert sum(pack(draft).rows for draft in samples) == many


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_events_are_summed_once_however_they_are_batched(
    data: st.DataObject,
) -> None:
    num_steps = data.draw(st.integers(1, 12))
    failed = data.draw(st.sets(st.integers(0, num_steps - 1)))
    everything = concatenate([step_of(step) for step in range(num_steps)])
    budget = data.draw(st.sampled_from([1e-9, 300.0, 1e9]))
    collector = Collector(Sampler(budget_bytes_per_s=budget))
    for step in sorted({0, *data.draw(st.sets(st.integers(0, num_steps)))}):
        collector.use(plan(str(step)), from_step=step)
    drafts: list[Draft] = []
    at, told = 0, -1
    while at < len(everything) or told < num_steps - 1:
        until = min(at + data.draw(st.integers(1, 9)), len(everything))
        ready = until // 3 - 1  # the newest step all of whose events are drained now
        upto = ready if at == len(everything) else data.draw(st.integers(told, ready))
        ended = [step for step in range(told + 1, upto + 1) if step not in failed]
        got = take(collector, everything.select(slice(at, until)), marks(*ended))
        drafts += got.drafts
        assert got.rows["step"].tolist() == ended
        at, told = until, upto
    drafts += collector.last_words(failed=data.draw(st.booleans()))
    sums = of_kind(drafts, Kind.OP_SUMS)
    assert sum(int(draft.columns[Column.COUNT].sum()) for draft in sums) == len(everything)
    assert sum(int(draft.columns[Column.TOTAL_NS].sum()) for draft in sums) == int(everything.duration_ns.sum())
    sampled = [row for draft in of_kind(drafts, Kind.OP_EVENTS) for row in unpack(draft)]
    assert len(sampled) == len(set(sampled))
    whole = [draft for draft in of_kind(drafts, Kind.OP_EVENTS) if draft.flags == FLAG_WHOLE_STEP]
    assert all(len(unpack(draft)) == 3 and draft.step not in failed for draft in whole)
