"""Segment files and logs on disk: what was written is read, damage is bounded, quotas hold; and the slow ladder."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.harness import FakeClock

from penstock.protocol.frames import COLUMNS, Frame, Kind, decode_header, encode
from penstock.protocol.stream import JobChanged
from penstock_server.services.series import min_max
from penstock_server.streams.live import LiveJob
from penstock_server.streams.logstore import LogStore, whole_characters
from penstock_server.streams.queue import BrowserQueue
from penstock_server.streams.recorder import MAX_FILES, MAX_READ, Recorder
from penstock_server.streams.segments import MAGIC, Segments


def frame(seq: int, kind: Kind = Kind.OP_SUMS, rows: int = 1, stream: int = 1) -> bytes:
    columns = {name: np.arange(rows) for name in COLUMNS.get(kind, ())}
    body = {"hash": "h"} if kind is Kind.GRAPH_USED else None
    return encode(Frame(kind, stream, 1, seq, columns={} if body else columns, body=body))


def segments(folder: Path, **changes: int) -> Segments:
    return Segments(folder, **{"segment_bytes": 1 << 16, "quota_bytes": 1 << 24, **changes})


def write(store: Segments, frames: list[bytes]) -> None:
    for one in frames:
        store.append(decode_header(one), one)


def test_frames_are_read_back_after_a_restart_in_order(tmp_path: Path) -> None:
    frames = [frame(i, rows=200) for i in range(60)]
    store = segments(tmp_path)
    write(store, frames)
    store.close()
    again = segments(tmp_path)
    assert num_files(tmp_path, "*.seg") > 1
    assert list(again.read(again.entries)) == frames
    chosen = again.select(stream=1, kinds={Kind.OP_SUMS}, after_seq=57, limit_bytes=1 << 20)
    assert [entry.seq for entry in chosen] == [58, 59]
    assert len(again.select(stream=None, kinds=set(Kind), after_seq=None, limit_bytes=1)) == 1


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_damaged_record_ends_its_file_and_appending_goes_on(tmp_path: Path, damage: str) -> None:
    frames = [frame(i) for i in range(4)]
    store = segments(tmp_path)
    write(store, frames)
    store.close()
    [path] = tmp_path.glob("*.seg")
    content = bytearray(path.read_bytes())
    if damage == "torn":
        content = content[:-5]
    else:
        content[-5] ^= 0xFF
    path.write_bytes(content)
    again = segments(tmp_path)
    assert [entry.seq for entry in again.entries] == [0, 1, 2]
    write(again, frames[3:])
    assert list(again.read(again.entries)) == frames


def test_oldest_segments_go_when_the_quota_is_used_up(tmp_path: Path) -> None:
    store = segments(tmp_path, segment_bytes=4096, quota_bytes=16384)
    write(store, [frame(i, rows=20) for i in range(200)])
    kept = sum(path.stat().st_size for path in tmp_path.glob("*.seg"))
    assert kept <= 16384 + 4096
    assert store.entries[0].seq > 0
    assert store.entries[-1].seq == 199
    assert len(list(store.read(store.entries))) == len(store.entries)


def exchange(seq: int, stream: int, pad: int = 0) -> bytes:
    return encode(Frame(Kind.EXCHANGE, stream, 1, seq, body={"rows": [], "pad": "x" * pad}))


def test_last_sums_of_an_exchange_outlive_the_quota(tmp_path: Path) -> None:
    """A pserver that has ended tells nothing more, and its trainers go on for long."""
    store = segments(tmp_path, segment_bytes=4096, quota_bytes=16384)
    last = exchange(1, stream=2)
    write(store, [exchange(0, stream=2), last, exchange(0, stream=3)])
    write(store, [frame(i, rows=20) for i in range(200)])
    assert list(store.read(store.newest(Kind.EXCHANGE))) == [last, exchange(0, stream=3)]
    newer = exchange(9, stream=3)
    write(store, [newer, *[frame(i, rows=20) for i in range(200, 400)]])
    store.close()
    for found in (store, segments(tmp_path, segment_bytes=4096, quota_bytes=16384)):
        assert list(found.read(found.newest(Kind.EXCHANGE))) == [last, newer]
        assert list(found.read(found.last({Kind.EXCHANGE}, limit_bytes=0))) == [last, newer]
        assert len(list(found.read(found.entries))) == len(found.entries)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 16384 + 2 * 4096


def test_sums_moved_after_a_read_began_are_left_out(tmp_path: Path) -> None:
    store = segments(tmp_path, segment_bytes=4096, quota_bytes=16384)
    write(store, [exchange(0, stream) for stream in (2, 3)])
    write(store, [frame(i, rows=20) for i in range(200)])
    before = store.newest(Kind.EXCHANGE)
    write(store, [exchange(1, stream=3), *[frame(i, rows=20) for i in range(200, 400)], exchange(2, stream=3)])
    write(store, [frame(i, rows=20) for i in range(400, 600)])
    assert {decode_header(one).seq for one in store.read(before)} <= {0}


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 300)), max_size=120))
def test_newest_sums_of_every_stream_are_there_whatever_came(steps: list[tuple[int, bool, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        limits = {"segment_bytes": 4096, "quota_bytes": 8192}
        store, newest = segments(Path(folder), **limits), dict[int, bytes]()
        for seq, (stream, is_exchange, size) in enumerate(steps):
            one = exchange(seq, stream, pad=size) if is_exchange else frame(seq, rows=size, stream=stream)
            write(store, [one])
            newest |= {stream: one} if is_exchange else {}
        for found in (store, segments(Path(folder), **limits)):
            assert list(found.read(found.newest(Kind.EXCHANGE))) == [newest[stream] for stream in sorted(newest)]
        store.close()


def test_last_frames_bring_the_graph_that_they_rest_on(tmp_path: Path) -> None:
    store = segments(tmp_path)
    graph = frame(0, Kind.GRAPH_USED)
    frames = [frame(i) for i in range(1, 30)]
    write(store, [graph, *frames])
    chosen = store.last({Kind.OP_SUMS}, limit_bytes=len(frames[0]) * 3)
    assert list(store.read(chosen)) == [graph, *frames[-3:]]


def test_last_frames_have_a_step_larger_than_the_limit(tmp_path: Path) -> None:
    store = segments(tmp_path)
    small, step, newer = frame(1), frame(2, Kind.OP_EVENTS, rows=5000), frame(3)
    write(store, [small, step, newer])
    chosen = store.last({Kind.OP_SUMS, Kind.OP_EVENTS}, limit_bytes=len(newer) * 2)
    assert list(store.read(chosen)) == [step, newer]
    assert list(store.read(store.last({Kind.OP_SUMS}, limit_bytes=len(newer) * 2))) == [small, newer]


@pytest.mark.asyncio
async def test_job_that_ends_while_its_files_are_read_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, segment_bytes=1 << 16, quota_bytes=1 << 24)
    async with asyncio.TaskGroup() as group:
        for one in (frame(0), frame(1)):
            group.create_task(recorder.append("j", decode_header(one), one))
        await asyncio.sleep(0)  # the first reads the files, the second waits for it
        recorder.release("j")
    await asyncio.sleep(0)
    await recorder.append("j", decode_header(frame(2)), frame(2))
    recorder.close()
    found = [[entry.segment, entry.seq] for entry in segments(tmp_path / "j" / "segments").entries]
    assert found == [[1, 0], [1, 1], [2, 2]], "a job that was closed begins a file"


def test_foreign_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "000001.seg").write_bytes(b"something else" + MAGIC)
    store = segments(tmp_path)
    assert store.entries == []
    write(store, [frame(0)])
    assert (tmp_path / "000001.seg").read_bytes().startswith(b"something else")


def num_files(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


@pytest.mark.asyncio
async def test_more_recording_jobs_than_files_do_not_thrash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    whole = Segments.__init__

    def counted(self: Segments, folder: Path, **given: int) -> None:
        opened.append(folder)
        whole(self, folder, **given)

    monkeypatch.setattr(Segments, "__init__", counted)
    recorder = Recorder(tmp_path, segment_bytes=1 << 16, quota_bytes=1 << 24)
    num_jobs = MAX_FILES + 40
    for seq in range(5):
        for job in range(num_jobs):
            data = frame(seq, stream=job)
            await recorder.append(f"job{job}", decode_header(data), data)
    assert len(opened) == num_jobs  # each was looked at once
    assert num_files(tmp_path, "*/segments/*.seg") == num_jobs
    for job in (0, num_jobs - 1):
        assert [decode_header(one).seq for one in await recorder.last(f"job{job}", {Kind.OP_SUMS}, 1 << 20)] == [
            *range(5)
        ]
    for job in range(num_jobs):
        recorder.release(f"job{job}")
    data = frame(9, stream=0)
    await recorder.append("job0", decode_header(data), data)
    assert num_files(tmp_path, "job0/segments/*.seg") == 2
    recorder.close()


@pytest.mark.asyncio
async def test_reading_many_ended_jobs_closes_none_that_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, segment_bytes=1 << 16, quota_bytes=1 << 24)
    for seq in range(2):
        data = frame(seq)
        await recorder.append("live", decode_header(data), data)
        for job in range(MAX_READ + 5):
            assert await recorder.last(f"ended{job}", {Kind.OP_SUMS}, 1 << 20) == []
    assert num_files(tmp_path, "live/segments/*.seg") == 1
    recorder.close()


@given(st.binary(min_size=1, max_size=80), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=30))
def test_log_is_whole_whatever_pieces_come_in_what_order(content: bytes, pieces: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = LogStore(Path(folder), FakeClock(), quota_bytes=1 << 20)
        acknowledged = 0
        for start, length in pieces:
            if start < len(content):
                acknowledged = store.append("j", "r", start, content[start : start + length]).next_offset
        store.append("j", "r", acknowledged, content[acknowledged:])
        assert (Path(folder) / "j" / "logs" / "r.log").read_bytes() == content


def test_log_beyond_its_quota_is_cut_visibly_and_acknowledged(tmp_path: Path) -> None:
    store = LogStore(tmp_path, FakeClock(), quota_bytes=10)
    assert store.append("j", "r", 0, b"12345678901234").next_offset == 14
    assert store.append("j", "r", 14, b"more").next_offset >= 18
    text = store.read("j", "r", 0, 1000).text
    assert text.startswith("1234567890\n[penstock: log cut here")
    assert "more" not in text


def test_tail_is_the_last_lines(tmp_path: Path) -> None:
    store = LogStore(tmp_path, FakeClock(), quota_bytes=1 << 20)
    store.append("j", "r", 0, "".join(f"line {i}\n" for i in range(5000)).encode())
    lines = store.tail("j", "r").splitlines()
    assert lines == [f"line {i}" for i in range(4988, 5000)]
    assert store.tail("j", "none") == ""


@given(st.text(max_size=30), st.integers(0, 8))
def test_cut_text_loses_at_most_the_character_that_is_cut(text: str, cut: int) -> None:
    content = text.encode()[: max(0, len(text.encode()) - cut)]
    whole = content[: whole_characters(content)]
    assert text.startswith(whole.decode())
    assert len(content) - len(whole) <= 3


@given(st.lists(st.floats(-1e9, 1e9), max_size=200), st.integers(4, 50))
def test_thinned_series_keeps_ends_and_extremes(values: list[float], limit: int) -> None:
    kept = min_max(values, limit)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(limit, 4)
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
        shown = [values[i] for i in kept]
        assert (min(shown), max(shown)) == (min(values), max(values))


def test_the_expected_end_follows_the_rate_of_this_attempt() -> None:
    live = LiveJob()
    second = 10**9
    assert live.advance({"done": 0, "total": 100}, 0)
    assert live.eta_s is None
    live.advance({"done": 10, "total": 100}, 5 * second)
    assert live.eta_s == pytest.approx(45.0)
    live.advance({"done": 0, "total": 100}, 6 * second)
    assert live.eta_s is None
    live.advance({"done": 100, "total": 100}, 7 * second)
    assert live.eta_s == 0.0
    assert not live.advance({"done": "x"}, 0)


class Ladder:
    """A queue with tiny limits, and the time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.queue = BrowserQueue(1000, 4000, 5.0, self.clock.monotonic, lambda: None)

    def events(self, size: int = 300, rows: int = 10) -> None:
        self.queue.put_frame(1, Kind.OP_EVENTS, rows, b"e" * size)

    def sums(self, size: int = 300) -> None:
        self.queue.put_frame(1, Kind.OP_SUMS, 1, b"s" * size)

    def take(self) -> list[Any]:
        now = self.queue.take()
        return [] if now is None else [*now.messages, *now.stream]


def test_oldest_operator_events_go_first_and_are_counted() -> None:
    ladder = Ladder()
    ladder.sums()
    for _ in range(5):
        ladder.events()
    gap, *frames = ladder.take()
    assert gap == {"type": "gap", "id": 1, "dropped": {"OP_EVENTS": 30}}
    assert [f[:1] for f in frames] == [b"s", b"e", b"e"]


def test_browser_behind_for_a_second_is_told_and_gets_no_events() -> None:
    ladder = Ladder()
    for _ in range(5):
        ladder.events()
    ladder.clock.advance(1.5)
    ladder.events()
    ladder.events()
    messages = ladder.take()
    assert messages[0]["type"] == "degraded"
    assert messages[1]["dropped"]["OP_EVENTS"] >= 30
    ladder.events()  # it has caught up: all is as before
    assert ladder.take() == [b"e" * 300]


def test_browser_at_the_limit_or_behind_for_long_is_to_be_closed() -> None:
    full = Ladder()
    while not full.queue.slow:
        full.sums()
    assert 4000 < full.queue.frame_bytes <= 4300
    late = Ladder()
    for _ in range(5):
        late.sums()
    late.clock.advance(5)
    late.sums()
    assert late.queue.slow


def test_state_is_merged_and_metrics_are_appended() -> None:
    queue = Ladder().queue
    for i in range(3):
        queue.put_state("job:1", JobChanged(type="job", id=1, job={"n": i}))
        queue.put_metrics(1, {"loss": {"step": [i], "time_ns": [i], "value": [float(i)]}})
    now = queue.take()
    assert now is not None
    series = {"loss": {"step": [0, 1, 2], "time_ns": [0, 1, 2], "value": [0.0, 1.0, 2.0]}}
    assert now.messages == [{"type": "job", "id": 1, "job": {"n": 2}}, {"type": "metrics", "id": 1, "series": series}]
    assert queue.take() is None


def test_rows_that_the_quota_removes_are_counted_over_restarts(tmp_path: Path) -> None:
    store = segments(tmp_path, segment_bytes=2000, quota_bytes=5000)
    for seq in range(40):
        write(store, [frame(seq, Kind.OP_EVENTS, rows=20, stream=1 + seq % 2)])
        if seq % 9 == 0:
            store.close()
            store = segments(tmp_path, segment_bytes=2000, quota_bytes=5000)
    here = Counter[tuple[int, Kind]]()
    for entry in store.entries:
        here[entry.stream, entry.kind] += entry.count
    assert store.removed.total() > 0
    assert store.recorded == {(1, Kind.OP_EVENTS): 400, (2, Kind.OP_EVENTS): 400}
    assert store.recorded - store.removed == here


def test_segment_counted_as_removed_goes_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = segments(tmp_path, segment_bytes=1000, quota_bytes=2500)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # killed before it deletes the first
        while not store.removed:
            write(store, [frame(len(store.entries), Kind.OP_EVENTS, rows=20)])
    store.close()
    again = segments(tmp_path, segment_bytes=1000, quota_bytes=2500)
    assert again.recorded == store.recorded
    assert again.removed == store.removed
    assert again.entries == store.entries
