"""The log: every whole record comes back in order; a torn end is cut off; damage in the middle is an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Bug, PeerError
from penstock.native.channels import crc32
from penstock.ps.durability.wal import WriteAheadLog, log_files, recover
from penstock.ps.wire import Message, WireTensor


def update(number: int, size: int = 100) -> Message:
    """Return an update that says which one it is."""
    values = np.full(size, number, np.float32)
    tensor = WireTensor("w.block0", "float32", (size,), memoryview(values.tobytes()))
    return Message("answer", {"round": number, "staleness": 0}, [tensor])


def numbers(folder: Path, since: int = 0) -> list[int]:
    """Return what the log holds, checked."""
    found = []
    for record in recover(folder, since=since):
        (tensor,) = record.message.tensors
        assert set(np.frombuffer(tensor.data, np.float32)) == {float(record.sequence)}
        assert record.message.fields["round"] == record.sequence
        found.append(record.sequence)
    return found


def written(folder: Path, count: int, *, rotate_at: int = -1) -> WriteAheadLog:
    """Return a log with `count` records."""
    log = WriteAheadLog(folder, next_sequence=0)
    for number in range(count):
        if number == rotate_at:
            log.rotate()
        log.append(update(number))
    return log


def test_what_was_appended_comes_back(tmp_path: Path) -> None:
    written(tmp_path, 5, rotate_at=3).close()
    assert len(log_files(tmp_path)) == 2
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    assert numbers(tmp_path, since=2) == [2, 3, 4]
    assert numbers(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("lost", range(1, 600, 37))
def test_a_torn_end_is_cut_off_and_the_log_goes_on(tmp_path: Path, lost: int) -> None:
    written(tmp_path, 3).close()
    ((_, path),) = log_files(tmp_path)
    record = path.stat().st_size // 3
    os.truncate(path, path.stat().st_size - lost)
    kept = numbers(tmp_path)
    assert kept == ([0, 1] if lost <= record else [0])
    log = WriteAheadLog(tmp_path, next_sequence=len(kept))
    log.append(update(len(kept)))
    log.close()
    assert numbers(tmp_path) == [*kept, len(kept)]


def test_a_damaged_middle_is_an_error_not_a_gap(tmp_path: Path) -> None:
    written(tmp_path, 4, rotate_at=2).close()
    (_, first), _ = log_files(tmp_path)
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(bytes(data))
    with pytest.raises(PeerError, match="is damaged at byte"):
        numbers(tmp_path)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    log = written(tmp_path, 4, rotate_at=2)
    log.rotate()
    log.append(update(4))
    log.close()
    log_files(tmp_path)[1][1].unlink()
    with pytest.raises(PeerError, match="record 2 is missing; the log goes on with 4"):
        numbers(tmp_path)


def test_drop_without_a_folder_counts_back() -> None:
    log = WriteAheadLog(None, next_sequence=3)
    log.drop(log.append(update(3)))
    assert log.next_sequence == 3


def test_a_record_may_be_longer_than_4_gib(tmp_path: Path) -> None:
    values: Any = np.empty((1 << 30) + 1, np.float32)  # memory that nobody touches is none
    log = WriteAheadLog(tmp_path, next_sequence=0)
    taken, given = os.pipe()
    log.file.open(given)
    prefixes: list[bytes] = []

    def take_prefix() -> None:
        prefixes.append(os.read(taken, 28))
        os.close(taken)

    reader = threading.Thread(target=take_prefix)
    reader.start()
    with pytest.raises(OSError, match=r"pipe"):  # it has gone when the prefix is there
        log.append(
            Message("round", {"round": 0}, [WireTensor("values:w", "float32", values.shape, memoryview(values))])
        )
    reader.join()
    log.close()
    assert values.nbytes.to_bytes(8, "little") in prefixes[0]


def test_a_log_is_not_read_as_a_whole(tmp_path: Path) -> None:
    log = WriteAheadLog(tmp_path, next_sequence=0)
    for number in range(40):
        log.append(update(number, 50_000))
    log.close()
    tracemalloc.start()
    try:
        assert numbers(tmp_path) == list(range(40))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < log_files(tmp_path)[0][1].stat().st_size // 2


def test_a_log_of_another_version_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 2).close()
    ((_, path),) = log_files(tmp_path)
    path.write_bytes(b"PSJ1" + path.read_bytes()[4:])
    with pytest.raises(PeerError, match="version b'PSJ1'"):
        numbers(tmp_path)


def test_a_dropped_record_leaves_what_came_before_and_after(tmp_path: Path) -> None:
    log = written(tmp_path, 4)
    log.append(Message("left", {"trainer": 7}))
    log.append(update(6))
    log.drop(3)
    log.append(Message("left", {"trainer": 8}))
    with pytest.raises(Bug, match="no record 9"):
        log.drop(9)
    log.close()
    records = list(recover(tmp_path, since=0))
    assert [r.sequence for r in records] == [0, 1, 2, 3, 4, 5]
    assert [r.message.kind for r in records] == [*["answer"] * 3, "left", "answer", "left"]
    assert [r.message.fields["trainer"] for r in records if r.message.kind == "left"] == [7, 8]
    (tensor,) = records[4].message.tensors
    assert set(np.frombuffer(tensor.data, np.float32)) == {6.0}


def test_files_that_a_snapshot_holds_are_removed(tmp_path: Path) -> None:
    log = written(tmp_path, 4, rotate_at=2)
    log.rotate()
    log.append(update(4))
    log.forget_before(3)
    assert [first for first, _ in log_files(tmp_path)] == [2, 4]
    log.forget_before(4)
    assert [first for first, _ in log_files(tmp_path)] == [4]
    log.close()
    assert numbers(tmp_path, since=4) == [4]


_WRITER = """
import sys
from pathlib import Path
import numpy as np
from penstock.ps.durability.wal import WriteAheadLog
from penstock.ps.wire import Message, WireTensor
log = WriteAheadLog(Path(sys.argv[1]), next_sequence=0)
for number in range(10**9):
    data = memoryview(np.full(5000, number, np.float32).tobytes())
    tensor = WireTensor("w.block0", "float32", (5000,), data)
    log.append(Message("answer", {"round": number, "staleness": 0}, [tensor]))
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 200:
                os.kill(writer.pid, signal.SIGKILL)
                break
        acknowledged = max([200, *(int(line) for line in writer.stdout if line.endswith("\n"))])
    kept = numbers(tmp_path)
    assert kept == list(range(len(kept)))
    assert len(kept) > acknowledged


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(0, 200))
def test_checksums_are_those_of_zlib(parts: list[bytes], begin: int) -> None:
    ours = expected = 0
    for part in parts:
        data = memoryview(part * 9)[begin:]
        ours, expected = crc32(data, ours), zlib.crc32(data, expected)
    assert ours == expected
