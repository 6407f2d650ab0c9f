"""Files into memory, on several threads: parts that begin at a line, in the order of files and lines at the end."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from penstock.dataset import arrow
from penstock.dataset.dataset_base import Reading
from penstock.dataset.faults import DataError, Skipped, file_error, line_error
from penstock.dataset.headings import ID_SLOT, taken
from penstock.dataset.sources import Source, is_columnar, opened, size_of
from penstock.native import _feed

_PART_BYTES = 32 << 20
_SIGNAL_S = 0.5  # longest delay of a signal's handler


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of a file of `size` bytes that begin from byte `begin` on, and before `end` if there is one."""

    file: int
    begin: int
    end: int | None
    size: int


class Loading:
    """Threads that read parts of files, and the store that is made of them at the end."""

    def __init__(self, reading: Reading, skipped: Skipped, thread_num: int | None) -> None:
        self._reading, self._skipped = reading, skipped
        self.has_ids = ID_SLOT in reading.slots
        self._parts = list(_parts(reading))
        self._todo = deque(range(len(self._parts)))
        self._chunks: list[_feed.Chunk | None] = [None] * len(self._parts)
        self._errors: dict[int, Exception] = {}
        self._lock = threading.Lock()
        self._open: dict[_Part, Source] = {}
        self._stopped = False
        self._ended = threading.Event()
        threads = reading.threads if thread_num is None else thread_num
        self._threads = [
            threading.Thread(target=self._read_all, name=f"penstock-loader-{number}", daemon=True)
            for number in range(max(1, min(threads, len(self._parts))))
        ]
        self._left = len(self._threads)
        for thread in self._threads:
            thread.start()
        atexit.register(self.stop)  # a thread that comes back from native code into an interpreter at its end aborts

    def stop(self) -> None:
        """End the threads, finished or not. Idempotent."""
        with self._lock:
            self._stopped = True
            sources = list(self._open.values())
        for source in sources:
            source.interrupt()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.stop)

    def wait(self) -> _feed.Store:
        try:
            # No join: CPython 3.11 takes a thread for ended whose join was interrupted. With a limit: a signal that
            # comes just before the main thread sleeps, or to another thread, does not wake it.
            while not self._ended.wait(_SIGNAL_S):
                pass
        finally:  # an interrupt ends what it has waited for
            self.stop()
        self._skipped.log()
        if self._errors:
            raise self._errors[min(self._errors)]
        store = _feed.Store([slot.native for slot in self._reading.slots])
        for chunk in self._chunks:
            assert chunk is not None  # no error: each was read
            store.add(chunk)
        return store

    def _read_all(self) -> None:
        try:
            self._read_parts()
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._ended.set()

    def _read_parts(self) -> None:
        while not self._errors and not self._stopped:
            try:
                number = self._todo.popleft()
            except IndexError:
                return
            try:
                self._chunks[number] = self._read(self._parts[number])
            except Exception as error:  # noqa: BLE001 - the thread's boundary: `wait` raises it
                self._errors[number] = error

    def _read(self, part: _Part) -> _feed.Chunk:
        reading, path = self._reading, self._reading.files[part.file]
        slots = [slot.native for slot in reading.slots]
        chunk = _feed.Chunk(slots=slots, skips_bad_lines=reading.policy == "skip")
        if is_columnar(path):
            self._skipped.add(*arrow.read_into(chunk, part.file, path, reading.slots, reading))
            return chunk
        with opened(path, reading.command_for(path)) as source:
            source.expect(part.size)
            with self._lock:
                self._open[part] = source
            try:
                if not self._stopped:
                    self._parse(chunk, source, part)
            finally:
                with self._lock:
                    del self._open[part]
        return chunk

    def _parse(self, chunk: _feed.Chunk, source: Source, part: _Part) -> None:
        if part.begin:
            source.skip(part.begin)
        try:
            with taken(self._reading.headings, source.descriptor) as lines:
                fault = chunk.read(lines, part.begin, part.end)
        except (OSError, ValueError) as error:
            raise file_error(source.path, f"cannot be read: {error}") from error
        if fault is None:
            source.check()
            fault = chunk.read_rest()
        self._skipped.add(chunk.skipped, self._line_errors(source.path, part, chunk.take_faults()))
        if fault is not None:
            source.check_after_fault()
            raise self._line_errors(source.path, part, [fault])[0]

    def _line_errors(self, path: str, part: _Part, faults: list[_feed.Fault]) -> list[DataError]:
        before = _lines_before(path, part.begin) if faults and part.begin else 0
        return [line_error(path, fault, self._reading.slots, before) for fault in faults]


def _parts(reading: Reading) -> list[_Part]:
    parts: list[_Part] = []
    for file, path in enumerate(reading.files):
        size = size_of(path)
        starts = _line_starts(path, size) if reading.is_plain(path) else [0]
        ends = [*starts[1:], None]
        parts += [_Part(file, begin, end, size) for begin, end in zip(starts, ends, strict=True)]
    return parts


def _line_starts(path: str, size: int) -> list[int]:
    """Return bytes where lines begin, some `_PART_BYTES` from each other, from 0 on."""
    starts = [0]
    with Path(path).open("rb") as file:
        for wanted in range(_PART_BYTES, size, _PART_BYTES):
            file.seek(wanted - 1)
            # The line that holds the byte before: if it ends there, the next begins at `wanted`.
            if not file.readline(_PART_BYTES).endswith(b"\n"):
                continue  # a line over all of the part, or the last
            begin = file.tell()
            if starts[-1] < begin < size:
                starts.append(begin)
    return starts


def _lines_before(path: str, end: int) -> int:
    lines = 0
    with Path(path).open("rb") as file:
        while end > 0 and (piece := file.read(min(end, 1 << 20))):
            lines += piece.count(b"\n")
            end -= len(piece)
    return lines
