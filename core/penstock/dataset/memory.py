"""InMemoryDataset: load files once, shuffle, train on them any number of passes.

Files are read by several threads in parts that begin at a line; rows lie in the order of files and lines whatever the
number of threads, and a shuffle moves references, so that the order is a function of files and seeds. Compressed and
piped files, and Parquet and Arrow ones, are one part each.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.dataset import arrow
from penstock.dataset.dataset_base import Dataset, Reading, Run, at_least_one
from penstock.dataset.faults import DataError, Skipped, file_error, line_error
from penstock.dataset.global_shuffle import exchanged
from penstock.dataset.peers import Peers, peers_of
from penstock.dataset.position import FilePlaces
from penstock.dataset.shuffles import Seed, Shuffles
from penstock.dataset.slots import Slot
from penstock.dataset.sources import Source, is_columnar, opened, size_of
from penstock.errors import SpecError
from penstock.native import _feed

_PART_BYTES = 32 << 20
_SIGNAL_S = 0.5  # longest delay of a signal's handler


def _over(fleet: Any, count: int) -> int:
    peers = None if fleet is None else peers_of(fleet, "the size of the data")
    return count if peers is None else sum(size for (size,) in peers.gather([count]))


@dataclass(frozen=True, slots=True)
class _Part:
    """The lines of a file of `size` bytes that begin from byte `begin` on, and before `end` if there is one."""

    file: int
    begin: int
    end: int | None
    size: int


class InMemoryDataset(Dataset):
    """Reads everything, then trains. Source: fluid.dataset.InMemoryDataset."""

    _feed_name = "MultiSlotInMemoryDataFeed"

    def __init__(self) -> None:
        super().__init__()
        self._store: _feed.Store | None = None
        self._loading: _Loading | None = None
        self._shuffles = Shuffles()
        self._run: MemoryRun | None = None
        self._under_way: weakref.WeakSet[MemoryRun] = weakref.WeakSet()
        self._rows_a_message = 1024
        self._complement: tuple[Any, int] | None = None

    def load_into_memory(self) -> None:
        """Read all files. Raises DataError; what was in memory before is retained then."""
        self.preload_into_memory()
        self.wait_preload_done()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Begin to read all files, with `thread_num` threads or those of `set_thread`."""
        if self._loading is not None:
            raise SpecError("preload_into_memory was called already; call wait_preload_done first")
        self._loading = _Loading(self._reading(), self.skipped, thread_num)

    def wait_preload_done(self) -> None:
        """Wait until all files were read. Raises DataError."""
        if self._loading is None:
            raise SpecError("wait_preload_done is called without preload_into_memory before it")
        loading, self._loading = self._loading, None
        self._store, self._run = loading.wait(), None
        self._shuffles.loaded()

    def local_shuffle(self, seed: int | None = None) -> None:
        """Put this process's samples in another order, one that `seed` gives; without it, a seed is drawn.

        What was left of the last pass is forgotten; raises SpecError while one is under way. After a restore, a shuffle
        that the interrupted pass began with is made again, by its seed; raises SpecError for another one.
        """
        self._still()
        for before in self._shuffles.before_next():
            self._again(before, None)
        wanted = self._shuffles.next_seed(None if seed is None else seed % (1 << 64))
        self._shuffle(int.from_bytes(os.urandom(8), "little") if wanted is None else wanted)

    def _shuffle(self, seed: int) -> None:
        self._still().shuffle(seed)
        self._shuffles.made(seed)
        self._is_changed()

    def _is_changed(self) -> None:
        self._run = None
        if self._shuffles.restored is None:
            self._count_from(0)

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12, seed: int | None = None) -> None:
        """Shuffle the samples of all trainers: each has as many as the others afterwards, or one more.

        All trainers call it, between passes: those of `fleet`, or (None) of the collective job that this process is in.
        In a process of its own this is `local_shuffle`. Needs memory for the samples twice. `thread_num` changes
        nothing: there is a thread for each other trainer. After a restore as `local_shuffle`. Raises SpecError,
        Unavailable.
        """
        peers = peers_of(fleet, "global_shuffle")
        if peers is None:
            self.local_shuffle(seed)
            return
        self._still()
        for before in self._shuffles.before_next():
            self._again(before, peers)
        wanted = self._shuffles.next_seed(None if seed is None else seed % (1 << 62), (peers.rank, peers.num))
        self._exchange(wanted, peers)

    def _exchange(self, seed: int | None, peers: Peers) -> None:
        before = self._shuffles.seeds
        self._store, used = exchanged(
            self._still(), self._slots, peers, seed, shuffle=self._shuffle, rows_a_message=self._rows_a_message
        )
        self._shuffles.seeds = [*before, [used, peers.rank, peers.num]]
        self._is_changed()

    def set_fleet_send_batch_size(self, fleet_send_batch_size: int = 1024) -> None:
        """Set how many samples `global_shuffle` sends at a time (1024)."""
        self._rows_a_message = at_least_one("set_fleet_send_batch_size", fleet_send_batch_size)

    def set_complement(self, is_on: bool = True, fleet: Any = None, seed: int = 0) -> None:
        """Let trainers with less data draw samples again, at random, until each has as many batches in a pass.

        Each pass of training then begins with a barrier of the trainers (of `fleet`, or of the collective job): all of
        them begin it. Every sample is trained on at least once. Nothing happens in a process of its own, or when
        inferring.
        """
        self._complement = (fleet, seed) if is_on else None

    def release_memory(self) -> None:
        """Forget the samples."""
        self._store, self._run = None, None
        self._shuffles.loaded()

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Return how many samples are in memory: of this process, or of all workers of a fleet, which all call this."""
        return _over(fleet, 0 if self._store is None else len(self._store))

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Return how many of them were shuffled: all, or none before the first shuffle."""
        return _over(fleet, self.get_memory_data_size() if self._shuffles.seeds else 0)

    @property
    def memory_bytes(self) -> int:
        """What the samples take."""
        return 0 if self._store is None else self._store.bytes

    def open(self) -> MemoryRun:
        return self._begin(Complement())

    def open_for_training(self) -> Run:
        if self._complement is None:
            return super().open_for_training()
        if self._batches_per_pass is not None:
            raise SpecError(
                "set_batches_per_pass and set_complement are two ways to the same number of batches: set one"
            )
        fleet, seed = self._complement
        peers = peers_of(fleet, "set_complement")
        self._catch_up()
        own = -(-len(self._loaded()) // self._batch_size)
        most = own if peers is None else max(count for (count,) in peers.gather([own]))
        if most and not own:
            raise SpecError("set_complement: this trainer has no samples to draw from; give each a file at least")
        return self._begin(Complement(most - own, zlib.crc32(repr((seed, self._shuffles.seeds)).encode()) << 32))

    def _begin(self, complement: Complement) -> MemoryRun:
        store = self._loaded()
        self._catch_up()
        restored = self._shuffles.restored
        first = 0 if restored is None else restored.samples
        if first > len(store) + complement.num_batches * self._batch_size:
            raise SpecError(f"the reader's position is sample {first}, and {len(store)} are in memory: other files?")
        self._shuffles.begin()
        self._run = self._pass(first, complement)
        return self._run

    def _pass(self, first: int, complement: Complement) -> MemoryRun:
        run = MemoryRun(self._slots, self._loaded(), self._batch_size, first, complement)
        self._under_way.add(run)
        return run

    def open_for_inference(self) -> MemoryRun:
        return self._pass(0, Complement())

    def position(self) -> dict[str, Any]:
        return self._counted(self._shuffles.as_position(self._run.used_samples if self._run else None))

    def between_passes(self) -> dict[str, Any] | None:
        return self._shuffles.between()

    def set_position(self, position: Mapping[str, Any]) -> None:
        """Let the next pass go on there, in the order of that time: the shuffles since the load are repeated.

        Those that the pass began with may be asked for again; whatever is not is made when the pass begins.
        """
        if position.get("kind") != "memory":
            raise SpecError(f"the position {dict(position)!r} is not one of an InMemoryDataset")
        self._shuffles.restore(position)
        self._run = None
        self._count_from(int(position.get("batches", 0)))

    def _catch_up(self) -> None:
        """Make the shuffles that the pass which goes on had begun with, unless they were made again."""
        for seed in self._shuffles.missing():
            self._again(seed, None)

    def _again(self, seed: Seed, peers: Peers | None) -> None:
        if isinstance(seed, int):
            self._shuffle(seed)
            return
        if peers is None or seed[1:] != [peers.rank, peers.num]:
            raise SpecError(
                "the position is one after a global_shuffle, for which all trainers are needed: call what was "
                f"called before the position was taken (the shuffle's seed, the rank, the number of trainers: {seed})"
            )
        self._exchange(seed[0], peers)

    def _still(self) -> _feed.Store:
        if any(not run.closed for run in self._under_way):
            raise SpecError("the samples cannot be put in another order while a pass over them is under way")
        return self._loaded()

    def _loaded(self) -> _feed.Store:
        if self._loading is not None:
            raise SpecError("samples are being loaded; call wait_preload_done first")
        if self._store is None:
            raise SpecError("no samples are in memory; call load_into_memory first")
        return self._store


@dataclass(frozen=True, slots=True)
class Complement:
    """Batches of samples that are drawn again, behind those of the data."""

    num_batches: int = 0
    seed: int = 0


class MemoryRun(Run):
    """One pass over what is in memory. Each trainer gathers its batches itself, without the interpreter lock.

    Places count samples: those of the data, then those drawn again.
    """

    def __init__(
        self, slots: tuple[Slot, ...], store: _feed.Store, batch_size: int, first: int, complement: Complement
    ) -> None:
        self.slots, self._store, self._batch_size, self._first = slots, store, batch_size, first
        self._complement = complement
        own = max(0, len(store) - first)
        self._num_own = -(-own // batch_size)
        self._drawn_before = max(0, first - len(store)) // batch_size
        self._num_batches = self._num_own + complement.num_batches - self._drawn_before
        self._next = 0
        self._lock = threading.Lock()
        self._places = FilePlaces(["memory"])
        self._taken: dict[int, tuple[int, int]] = {}
        self.closed = False

    def take(self) -> _feed.Batch | None:
        with self._lock:
            number = self._next
            if number >= self._num_batches or self.closed:
                return None
            self._next += 1
        if number < self._num_own:
            begin = self._first + number * self._batch_size
            batch = self._store.gather(begin, min(self._batch_size, len(self._store) - begin))
            end = begin + len(batch)
        else:
            drawn = self._drawn_before + number - self._num_own
            batch = self._store.draw(self._batch_size, (self._complement.seed + drawn) % (1 << 64))
            end = len(self._store) + (drawn + 1) * self._batch_size
        with self._lock:
            self._taken[id(batch)] = (number, end)
        return batch

    def used(self, batch: _feed.Batch) -> None:
        with self._lock:
            number, end = self._taken.pop(id(batch))
            self._places.used(0, number, [(0, end, end, False)])

    @property
    def used_samples(self) -> int:
        """How many samples from the first on were trained on, those of this pass before a resume included."""
        with self._lock:
            return max(self._first, self._places.files[0].offset)

    def fraction(self) -> float | None:
        before = self._first / self._batch_size
        return min(1.0, (before + self._next) / max(1.0, before + self._num_batches))

    def stop(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


class _Loading:
    """Threads that read parts of files, and the store that is made of them at the end."""

    def __init__(self, reading: Reading, skipped: Skipped, thread_num: int | None) -> None:
        self._reading, self._skipped = reading, skipped
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
        with opened(path, reading.command) as source:
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
            fault = chunk.read(source.descriptor, part.begin, part.end)
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
