"""A job's trace holds every recorded slice, as Perfetto's own messages read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.export.recorded import CREATED, T0_NS, RecordedJob, events, graph, used
from tests.export.trace_reader import Trace, read

from penstock.errors import SpecError
from penstock.export.files import whole_file
from penstock.export.trace import Summary, write_trace
from penstock.protocol.exchange import Sums, body_of
from penstock.protocol.frames import FIRST_READER, Column, Frame, Kind, Work

MAIN = graph("relu_0", "allreduce_0")
STEP = [(0, 500, 0, 0), (10, 300, 0, 1), (500, 70_000, 1, 0), (310, 0, 1, 1)]


def written(job: RecordedJob, folder: Path, name: str = "out.perfetto-trace") -> tuple[Trace, Summary]:
    with whole_file(folder / name) as file:
        summary = write_trace(job.recording(), file.write)
    return read(folder / name), summary


def operators(trace: Trace) -> list[tuple[str, ...]]:
    return [one.track for one in trace.slices if one.track[-1].startswith("thread")]


def test_every_slice_is_there_with_name_category_and_duration(tmp_path: Path) -> None:
    later = events(2, STEP, t0_ns=T0_NS + 1_000_000)
    job = RecordedJob(trainer_0=[used(MAIN), events(1, STEP), later], trainer_1=[used(MAIN), events(1, STEP[:2])])
    trace, summary = written(job.knows(MAIN), tmp_path)
    assert (summary.processes, summary.slices, summary.steps) == (2, 10, 3)
    assert len(operators(trace)) == 10
    assert {pid: name for pid, (name, _) in trace.processes.items()} == {1: "trainer 0", 2: "trainer 1"}
    assert trace.processes[2][1] == ["attempt 1", "host host-a", "pid 112"]
    assert len(trace.threads) == 4
    [one] = [s for s in trace.slices if s.start_ns == T0_NS + 500]
    assert one.track == ("trainer 0", "thread 0")
    assert (one.name, one.category, one.duration_ns, one.depth) == ("allreduce_0", "communication", 70_000, 0)
    assert one.args == {
        "step": 1, "operator": 1, "type": "aten.relu.default", "role": "backward", "replica": "all",
        "module": "tower.fc", "line": "a.py:1", "bytes": 1000,
    }  # fmt: skip
    steps = [(s.name, s.start_ns - T0_NS, s.duration_ns) for s in trace.slices if s.track == ("trainer 0", "steps")]
    assert steps == [("step 1", 0, 70_500), ("step 2", 1_000_000, 70_500)]


def test_step_in_two_frames_is_one_slice_and_unfinished_says_so(tmp_path: Path) -> None:
    parts = [events(7, STEP), events(7, [(0, 5, 0, 0)], t0_ns=T0_NS + 90_000), events(8, STEP, t0_ns=2 * T0_NS)]
    unfinished = events(9, STEP[:1], t0_ns=3 * T0_NS, whole=False)
    trace, summary = written(RecordedJob(trainer_0=[used(MAIN), *parts, unfinished]).knows(MAIN), tmp_path)
    steps = [(s.name, s.duration_ns, s.args["complete"]) for s in trace.slices if s.track[-1] == "steps"]
    assert steps == [("step 7", 90_005, "yes"), ("step 8", 70_500, "yes"), ("step 9", 500, "no")]
    assert summary.slices == len(operators(trace)) == 10


def test_overlapping_operators_of_a_thread_keep_their_durations(tmp_path: Path) -> None:
    rows = [(0, 100, 0, 0), (50, 100, 1, 0), (60, 10, 0, 0)]
    trace, _ = written(RecordedJob(trainer_0=[used(MAIN), events(1, rows)]).knows(MAIN), tmp_path)
    found = sorted((s.start_ns - T0_NS, s.duration_ns, s.track[-1], s.depth) for s in trace.slices if len(s.track) == 2)
    assert found[1:] == [(0, 150, "steps", 0), (50, 100, "thread 0, overlapping 2", 0), (60, 10, "thread 0", 1)]
    assert found[0] == (0, 100, "thread 0", 0)


def test_slices_whose_graph_is_unknown_are_there_without_a_name(tmp_path: Path) -> None:
    trace, summary = written(RecordedJob(trainer_0=[events(1, STEP)]), tmp_path)
    assert summary.slices == len(operators(trace)) == 4
    assert {(s.name, s.args["operator"]) for s in trace.slices if s.category == "unknown"} == {
        ("unknown operator", 0), ("unknown operator", 1)
    }  # fmt: skip


def test_only_graph_names_slices_whose_beginning_is_lost(tmp_path: Path) -> None:
    job = RecordedJob(trainer_0=[events(1, STEP)]).knows(MAIN)
    [known] = job.documents
    job.uses = [{"hash": known, "program": "main", "first_seen_at": CREATED, "replica_id": "replica-trainer_0"}]
    trace, _ = written(job, tmp_path)
    assert {s.name for s in trace.slices if s.track[-1] != "steps"} == {"relu_0", "allreduce_0"}


def exchanged(at_ns: int, **peers: int) -> Frame:
    rows = {(peer.replace("_", " "), "w"): Sums(calls=n, sent_bytes=10 * n) for peer, n in peers.items()}
    return Frame(Kind.EXCHANGE, 0, 1, 0, t0_ns=at_ns, body=body_of(rows))


def test_exchange_with_each_peer_is_a_slice_for_each_report(tmp_path: Path) -> None:
    frames = [exchanged(T0_NS, trainer_0=3), exchanged(T0_NS + 500, trainer_0=5, trainer_1=1)]
    endpoint = Frame(
        Kind.EXCHANGE, 0, 1, 0, t0_ns=T0_NS, body=body_of({("10.0.0.1:6170", "w"): Sums(calls=2)}, ["10.0.0.1:6170"])
    )
    trace, summary = written(RecordedJob(pserver_0=frames, trainer_0=[endpoint]), tmp_path)
    assert summary.exchanges == 4
    found = {(s.track, s.name, s.args["calls"], s.args["sent_bytes"]) for s in trace.slices}
    track = ("pserver 0", "exchange with trainer 0")
    assert {(track, track[1], 3, 30), (track, track[1], 2, 20)} <= found
    assert (("trainer 0", "exchange with pserver 0"), "exchange with pserver 0", 2, 0) in found
    [second] = [s for s in trace.slices if s.track == track and s.args["calls"] == 2]
    assert (second.start_ns, second.duration_ns) == (T0_NS, 500)


def test_work_of_the_data_feed_has_tracks_of_its_own(tmp_path: Path) -> None:
    columns = {
        Column.START_NS: np.array([0, 100, 900]),
        Column.DURATION_NS: np.array([800, 700, 50]),
        Column.WORK: np.array([Work.READ, Work.WAIT, Work.BATCH]),
        Column.THREAD: np.array([FIRST_READER + 3, 0, 0]),
    }
    feed = Frame(Kind.INPUT_EVENTS, 1, 1, 9, T0_NS, 1, 0, columns)
    trace, summary = written(RecordedJob(trainer_0=[used(MAIN), events(1, STEP), feed]).knows(MAIN), tmp_path)
    found = [(s.track[-1], s.name, s.start_ns - T0_NS, s.duration_ns) for s in trace.slices if s.category == "input"]
    assert sorted(found) == [
        ("batches 0", "make tensors", 900, 50),
        ("batches 0", "wait for a batch", 100, 700),
        ("reader 3", "read a batch", 0, 800),
    ]
    assert (summary.inputs, summary.slices) == (3, 4)


def test_metrics_are_counters_and_changes_of_state_are_instants(tmp_path: Path) -> None:
    gap = Frame(Kind.GAP, 0, 1, 0, t0_ns=T0_NS, body={"OP_EVENTS": 40})
    job = RecordedJob(trainer_0=[gap])
    job.metrics_of = {"loss": {"step": [1, 2], "time_ns": [T0_NS, T0_NS + 7], "value": [0.5, -1e-300]}}
    change = {"id": "1", "kind": "job", "reason": "user", "detail": "bye", "at": "2026-09-21T14:13:20.123456Z"}
    job.events_of = [
        {**change, "subject": "job-1", "from": None, "to": "QUEUED"},  # type: ignore[typeddict-item]
        {**change, "subject": "replica-trainer_0", "from": "RUNNING", "to": "EXITED"},  # type: ignore[typeddict-item]
    ]
    trace, summary = written(job, tmp_path)
    assert trace.counters == {"loss": [(T0_NS, 0.5), (T0_NS + 7, -1e-300)]}
    assert (summary.points, summary.events, summary.dropped) == (2, 2, {"OP_EVENTS": 40})
    at_ns = 1_790_000_000_123_456_000
    assert (("job ctr",), "QUEUED", at_ns, {"reason": "user", "detail": "bye"}) in trace.instants
    assert (("trainer 0",), "RUNNING → EXITED", at_ns, {"reason": "user", "detail": "bye"}) in trace.instants
    assert (("trainer 0",), "dropped", T0_NS, {"OP_EVENTS": "40 rows"}) in trace.instants


def test_gzipped_trace_is_the_same_and_failed_leaves_nothing(tmp_path: Path) -> None:
    job = RecordedJob(trainer_0=[used(MAIN), events(1, STEP)]).knows(MAIN)
    assert written(job, tmp_path, "out.gz")[0].slices == written(job, tmp_path)[0].slices
    job.sent[11].append(b"PS\x01\x03 no frame")
    with pytest.raises(Exception, match="frame"), whole_file(tmp_path / "failed") as file:
        write_trace(job.recording(), file.write)
    assert {path.name for path in tmp_path.iterdir()} == {"out.gz", "out.perfetto-trace"}
    with pytest.raises(SpecError, match="--output"), whole_file(tmp_path / "no" / "folder") as file:
        file.write(b"")
