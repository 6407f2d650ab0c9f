"""When lines of a log came: marks go on whatever the clock is set to and whatever a crash left."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock_server.clock import SystemClock
from penstock_server.streams.logstore import LogStore
from penstock_server.streams.logtimes import MARK, LogTimes

START = datetime(2026, 1, 1, tzinfo=UTC)
START_MS = int(START.timestamp() * 1000)


class SetClock(SystemClock):
    """The clock of a machine whose wall time a test sets."""

    def __init__(self) -> None:
        self.passed_s, self.set_s = 0.0, 0.0
        super().__init__()

    def now(self) -> datetime:
        return START + timedelta(seconds=self.passed_s + self.set_s)

    def monotonic(self) -> float:
        return self.passed_s


def append(store: LogStore, clock: SetClock, count: int) -> None:
    for _ in range(count):
        clock.passed_s += 1
        store.append("j", "r", store.size("j", "r"), b"line\n")


def seconds(store: LogStore) -> list[float]:
    return [(time_ms - START_MS) / 1000 for _, time_ms in store.times("j", "r", 0, 1 << 30)]


def test_marks_go_on_when_the_clock_is_set(tmp_path: Path) -> None:
    clock = SetClock()
    store = LogStore(tmp_path, clock, quota_bytes=1 << 20)
    append(store, clock, 2)
    clock.set_s = -3600.0
    append(store, clock, 2)
    clock.set_s = 100.0
    append(store, clock, 2)
    assert seconds(store) == [1.0, 2.0, 3.0, 4.0, 105.0, 106.0]


def test_marks_of_a_server_that_starts_with_the_clock_behind(tmp_path: Path) -> None:
    clock = SetClock()
    append(LogStore(tmp_path, clock, quota_bytes=1 << 20), clock, 2)
    clock = SetClock()
    clock.set_s = -3600.0
    store = LogStore(tmp_path, clock, quota_bytes=1 << 20)
    append(store, clock, 2)
    assert [offset for offset, _ in store.times("j", "r", 0, 1 << 30)] == [0, 5, 10, 15]
    assert seconds(store) == [1.0, 2.0, 2.0, 2.0]


def test_part_of_a_mark_that_a_crash_left_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.times"
    path.write_bytes(MARK.pack(0, 1000) + MARK.pack(10, 2000)[:7])
    times = LogTimes()
    times.note(path, 10, 3000)
    times.note(path, 20, 4000)
    assert times.between(path, 0, 100) == [(0, 1000), (10, 3000), (20, 4000)]


@pytest.mark.parametrize(
    ("offset", "end", "found"), [(0, 5, [0]), (15, 30, [10, 20]), (20, 31, [20, 30]), (95, 200, [90])]
)
def test_marks_of_a_piece(tmp_path: Path, offset: int, end: int, found: list[int]) -> None:
    path = tmp_path / "r.times"
    path.write_bytes(b"".join(MARK.pack(at, at) for at in range(0, 100, 10)))
    assert [at for at, _ in LogTimes().between(path, offset, end)] == found


def test_many_marks_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.times"
    path.write_bytes(b"".join(MARK.pack(at, at) for at in range(6500)))
    reads, read = [0], os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        reads[0] += 1
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert len(LogTimes().between(path, 0, 6500)) == 6500
    assert reads[0] <= 40
