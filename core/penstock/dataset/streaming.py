"""QueueDataset: files to batches as they are read, over a bounded queue of many producers and many consumers.

A reader is a thread that takes files from a shared list, one after the other, and a native stream that parses them into
batches; a batch goes on with the reader's next file, so a pass has at most one short batch a reader. With one reader,
batches come in the order of files and lines. Trainers take whatever is ready: there may be more of them than files.
The first error of a reader stops all, and the next take raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock import telemetry
from penstock.dataset import arrow
from penstock.dataset.dataset_base import Dataset, Reading, Run
from penstock.dataset.faults import DataError, Skipped, file_error, line_error
from penstock.dataset.position import FilePlaces
from penstock.dataset.sources import Source, is_columnar, opened, size_of
from penstock.native import _feed
from penstock.protocol.frames import Work
from penstock.telemetry.input import EVENT, Events

_BATCHES_AHEAD = 4  # of each reader
_LOOK_S = 0.2  # how long a thread waits natively, before it looks for signals


class QueueDataset(Dataset):
    """Reads files while it trains; nothing is retained. Source: fluid.dataset.QueueDataset."""

    def __init__(self) -> None:
        super().__init__()
        self._run: StreamingRun | None = None
        self._restored: Mapping[str, Any] | None = None

    def open(self) -> StreamingRun:
        position, self._restored = self._restored, None
        self._run = StreamingRun(self._reading(), self.skipped, position)
        return self._run

    def open_for_inference(self) -> StreamingRun:
        return StreamingRun(self._reading(), self.skipped)

    def position(self) -> dict[str, Any]:
        if self._run is not None:
            return self._counted(self._run.position())
        return self._counted(FilePlaces(self._files(), self._restored).as_position())

    def set_position(self, position: Mapping[str, Any]) -> None:
        FilePlaces(self._files(), position)  # refuses one of other files
        self._restored, self._run = position, None
        self._count_from(int(position.get("batches", 0)))

    def local_shuffle(self) -> None:
        """Refuse: nothing is in memory."""
        raise NotImplementedError(
            "a QueueDataset keeps nothing in memory, so it cannot shuffle; use an InMemoryDataset"
        )

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """Refuse: nothing is in memory."""
        self.local_shuffle()


class StreamingRun(Run):
    """One pass."""

    def __init__(self, reading: Reading, skipped: Skipped, position: Mapping[str, Any] | None = None) -> None:
        self.slots = reading.slots
        self._reading, self._skipped = reading, skipped
        self._places = FilePlaces(reading.files, position)
        self._todo = deque(i for i, file in enumerate(self._places.files) if not file.ended)
        sizes = [size_of(path) for path in reading.files]
        self._before = sum(min(file.offset, size) for file, size in zip(self._places.files, sizes, strict=True))
        self._total = sum(sizes) if all(map(reading.is_plain, reading.files)) else 0  # 0: what comes is not known
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._closed = False
        self._open_sources: dict[int, Source] = {}
        num_readers = max(1, min(reading.threads, len(self._todo)))
        self._queue = _feed.Queue(_BATCHES_AHEAD * num_readers)
        self._streams = [self._stream(number) for number in range(num_readers)]
        self._trace = telemetry.input_trace()
        self._lanes: list[int] = []
        if self._trace is not None:
            self._lanes = self._trace.claim(num_readers)
            for stream in self._streams:
                stream.trace_reads()
            self._trace.add_reader(self._reads)
        self._left = num_readers
        self._threads = [
            threading.Thread(target=self._read_all, args=(number,), name=f"penstock-reader-{number}", daemon=True)
            for number in range(num_readers)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread that comes back from native code into an interpreter at its end aborts

    @property
    def num_readers(self) -> int:
        """How many threads read: as many as were set, but not more than files."""
        return len(self._threads)

    def take(self) -> _feed.Batch | None:
        while True:
            batch = self._queue.pop(_LOOK_S)
            finished = batch is None and self._queue.finished  # before the error, which is set before the queue stops
            if self._error is not None:
                raise self._error
            if finished:
                return None
            if batch is None:
                continue
            if len(batch):
                return batch
            self.used(batch)  # marks only: files without lines

    def used(self, batch: _feed.Batch) -> None:
        with self._lock:
            self._places.used(batch.producer, batch.number, batch.marks)

    def position(self) -> dict[str, Any]:
        """Return the files' places in plain types."""
        with self._lock:
            return self._places.as_position()

    def fraction(self) -> float | None:
        if not self._total:
            return None
        return min(1.0, (self._before + sum(stream.bytes for stream in self._streams)) / self._total)

    def stop(self) -> None:
        self._queue.stop()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sources = list(self._open_sources.values())
        self._queue.stop()
        for source in sources:
            source.interrupt()
        for thread in self._threads:
            thread.join()
        if self._trace is not None:
            self._trace.remove_reader(self._reads)
            self._trace.release(self._lanes)
            self._trace = None
        atexit.unregister(self.close)
        self._skipped.log()

    def _reads(self) -> Events:
        """Take the reads of all readers since the last call."""
        parts = []
        for lane, stream in zip(self._lanes, self._streams, strict=True):
            reads = stream.take_reads()
            part = np.empty(len(reads), EVENT)
            part["begin_ns"], part["end_ns"] = reads.T
            part["work"], part["thread"] = Work.READ, lane
            parts.append(part)
        return np.concatenate(parts)

    # -- readers -----------------------------------------------------------------------------------

    def _stream(self, number: int) -> _feed.Stream:
        return _feed.Stream(
            producer=number,
            slots=[slot.native for slot in self.slots],
            batch_size=self._reading.batch_size,
            skips_bad_lines=self._reading.policy == "skip",
            queue=self._queue,
        )

    def _read_all(self, number: int) -> None:
        stream = self._streams[number]
        try:
            while not stream.stopped and not self._closed:
                try:
                    file = self._todo.popleft()
                except IndexError:
                    stream.finish()
                    break
                self._read(number, stream, file)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: the next take raises it
            with self._lock:
                self._error = self._error or error
            self._queue.stop()
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._queue.close()

    def _read(self, number: int, stream: _feed.Stream, file: int) -> None:
        place = self._places.files[file]
        if is_columnar(place.path):
            skipped = arrow.read_into(stream, file, place.path, self.slots, self._reading, begin=place.offset)
            self._skipped.add(*skipped)
            return
        with opened(place.path, self._reading.command_for(place.path)) as source, self._interruptible(number, source):
            if not self._closed:
                self._parse(stream, file, source, place.offset, place.lines)

    @contextlib.contextmanager
    def _interruptible(self, number: int, source: Source) -> Iterator[None]:
        """Let `close` end a command. Closed already: look after this begins."""
        with self._lock:
            self._open_sources[number] = source
        try:
            yield
        finally:
            with self._lock:
                del self._open_sources[number]

    def _parse(self, stream: _feed.Stream, file: int, source: Source, offset: int, lines: int) -> None:
        before = stream.skipped
        if offset:
            source.skip(offset)
        try:
            fault = stream.read(source.descriptor, file=file, offset=offset, lines=lines)
        except (OSError, ValueError) as error:
            raise file_error(source.path, f"cannot be read: {error}") from error
        if fault is None and not stream.stopped and not self._closed:
            source.check()
            fault = stream.read_rest()
        self._skipped.add(stream.skipped - before, self._errors(source, stream.take_faults()))
        if fault is not None:
            source.check_after_fault()
            raise self._errors(source, [fault])[0]

    def _errors(self, source: Source, faults: list[_feed.Fault]) -> list[DataError]:
        return [line_error(source.path, fault, self.slots) for fault in faults]


class FileInstantDataset(QueueDataset):
    """Fluid's data set that reads a file whenever it is needed: as a QueueDataset."""

    _feed_name = "MultiSlotFileInstantDataFeed"
