"""Segment files: the telemetry frames of a job, as they came, kept for replay.

A segment is a magic number and records `{u32 length, u32 crc32, frame}`; a new one begins when the next
record would pass the size limit. What lies in each is indexed in memory by stream, kind, seq and time,
and read back from the files when a job is first looked at after a start. A torn or damaged record ends
its file: what follows in that file is not trusted, and appending goes on in a new one.

Over the quota the oldest segment goes. An EXCHANGE frame that is the newest of its stream may be the last for ever, and
contains all that those before it did: from a removed segment it is moved to segment 0, which is written anew. Rows of
the kinds that are counted (`protocol.completeness`) are counted when they go (`removed`).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import structlog

from penstock.errors import PeerError
from penstock.protocol.completeness import NAMES
from penstock.protocol.frames import HEADER_BYTES, MAX_FRAME_BYTES, Header, Kind, decode_header
from penstock_server.streams import removed
from penstock_server.streams.removed import RowsByStream

log = structlog.get_logger(__name__)

MAGIC = b"PSSEG\x00\x00\x01"
RECORD = struct.Struct("<II")
MOVED = 0
"""The segment of frames that were saved from others."""
_COUNTED = frozenset(NAMES.values())


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Where one frame lies, and what it is."""

    segment: int
    offset: int
    size_bytes: int
    stream: int
    kind: Kind
    seq: int
    t0_ns: int
    count: int


class Segments:
    """The segment files of one job. Used from one thread; `read` may run in another.

    `recorded`: rows that were ever appended, `removed`: those of them that are gone; by stream and kind.
    """

    def __init__(self, folder: Path, *, segment_bytes: int, quota_bytes: int) -> None:
        self._folder, self._segment_bytes, self._quota_bytes = folder, segment_bytes, quota_bytes
        self._sizes: dict[int, int] = {}
        self.entries: list[SegmentEntry] = []
        self._fd: int | None = None
        self._paused = False
        through, self.removed = removed.read(folder)
        self.recorded: RowsByStream = Counter(self.removed)
        self._current = through
        for path in sorted(folder.glob("*.seg")) if folder.is_dir() else ():
            if MOVED < int(path.stem) <= through:
                path.unlink()
                continue
            self._current = max(self._current, int(path.stem))
            self._sizes[int(path.stem)] = path.stat().st_size
            self.entries.extend(_scan(path))
        self.recorded += _rows(self.entries)

    def append(self, header: Header, frame: bytes) -> SegmentEntry:
        """Append one frame. Raises OSError when the disk does."""
        needed = RECORD.size + len(frame)
        if self._paused:
            self._resume()
        if self._fd is None or self._sizes[self._current] + needed > self._segment_bytes:
            self._begin()
        assert self._fd is not None
        at = self._sizes[self._current]
        record = RECORD.pack(len(frame), zlib.crc32(frame)) + frame
        written = os.write(self._fd, record)
        if written != len(record):
            self.close()  # the torn record ends this file
            raise OSError(f"wrote {written} of {len(record)} bytes to {self._path(self._current)}")
        self._sizes[self._current] = at + needed
        entry = _entry(self._current, at + RECORD.size, header, len(frame))
        self.entries.append(entry)
        if entry.kind in _COUNTED:
            self.recorded[entry.stream, entry.kind] += entry.count
        return entry

    def read(self, entries: Iterable[SegmentEntry]) -> Iterator[bytes]:
        """Read frames back. One that was deleted or moved by the quota in the meantime is left out."""
        for entry in entries:
            try:
                with self._path(entry.segment).open("rb") as file:
                    file.seek(entry.offset - RECORD.size)
                    record = file.read(RECORD.size + entry.size_bytes)
            except FileNotFoundError:
                continue
            frame = record[RECORD.size :]
            if record[: RECORD.size] == RECORD.pack(entry.size_bytes, zlib.crc32(frame)) and _is_of(entry, frame):
                yield frame

    def select(
        self, *, stream: int | None, kinds: Collection[Kind], after_seq: int | None, limit_bytes: int
    ) -> list[SegmentEntry]:
        """Return the oldest entries that fit the filter, together at most `limit_bytes` (but at least one)."""
        chosen: list[SegmentEntry] = []
        size = 0
        for entry in self.entries:
            if (stream is not None and entry.stream != stream) or entry.kind not in kinds:
                continue
            if after_seq is not None and entry.seq <= after_seq:
                continue
            size += entry.size_bytes + 4
            if chosen and size > limit_bytes:
                break
            chosen.append(entry)
        return chosen

    def last(self, kinds: Collection[Kind], limit_bytes: int) -> list[SegmentEntry]:
        """Return the newest entries of these kinds, oldest first, together at most `limit_bytes`.

        The newest OP_EVENTS frame is taken even above that, as the last: a step may be larger than the limit. Before
        them stands the GRAPH_USED of each stream that says which graph they index. The newest EXCHANGE frame of each
        stream is there however old it is, because it holds sums since the start.
        """
        pinned = self.newest(Kind.EXCHANGE) if Kind.EXCHANGE in kinds else []
        chosen = self._last(frozenset(kinds) - {Kind.EXCHANGE}, limit_bytes)
        return sorted([*pinned, *chosen], key=lambda entry: (entry.segment, entry.offset))

    def recent(self, kind: Kind, limit_bytes: int) -> list[SegmentEntry]:
        """Return the newest entries of a kind, oldest first, together at most `limit_bytes`."""
        return self._last({kind}, limit_bytes)

    def newest(self, kind: Kind) -> list[SegmentEntry]:
        """Return the newest entry of this kind of each stream, by stream. O(entries)."""
        found = {entry.stream: entry for entry in self.entries if entry.kind is kind}
        return [found[stream] for stream in sorted(found)]

    def earlier(self, kind: Kind, age_ns: int) -> list[SegmentEntry]:
        """Return the newest entry of this kind of each stream that is `age_ns` older than its newest. O(entries)."""
        newest = {entry.stream: entry.t0_ns for entry in self.newest(kind)}
        found = {
            entry.stream: entry
            for entry in self.entries
            if entry.kind is kind and entry.t0_ns <= newest[entry.stream] - age_ns
        }
        return [found[stream] for stream in sorted(found)]

    def _last(self, kinds: Collection[Kind], limit_bytes: int) -> list[SegmentEntry]:
        chosen: list[SegmentEntry] = []
        size = 0
        open_streams: set[int] = set()
        needs_step = limit_bytes > 0
        for entry in reversed(self.entries):
            if needs_step and size <= limit_bytes and entry.kind is Kind.OP_EVENTS and entry.kind in kinds:
                needs_step, limit_bytes = False, max(limit_bytes, size + entry.size_bytes)
            if entry.kind is Kind.GRAPH_USED and entry.stream in open_streams:
                chosen.append(entry)
                open_streams.discard(entry.stream)
            elif entry.kind in kinds and size + entry.size_bytes <= limit_bytes:
                size += entry.size_bytes
                chosen.append(entry)
                open_streams.add(entry.stream)
            elif entry.kind in kinds:
                limit_bytes = 0  # nothing older is taken, so that no gap is hidden in the middle
                if not open_streams:
                    break
        return chosen[::-1]

    def close(self) -> None:
        """Close the file that is being written; the next append begins a new one."""
        self.pause()
        self._paused = False

    def pause(self) -> None:
        """Close the file that is being written; the next append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd, self._paused = None, True

    def _resume(self) -> None:
        path, self._paused = self._path(self._current), False
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if os.fstat(fd).st_size == self._sizes[self._current]:
            self._fd = fd
        else:  # not ours alone: a new file is safe
            os.close(fd)

    def _begin(self) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._current += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(self._path(self._current), flags, 0o600)
        os.write(self._fd, MAGIC)
        self._sizes[self._current] = len(MAGIC)
        while sum(self._sizes.values()) > self._quota_bytes and len(self._sizes.keys() - {MOVED}) > 1:
            self._drop(min(self._sizes.keys() - {MOVED}))

    def _drop(self, oldest: int) -> None:
        """Delete a segment. What has to stay is moved before, so that a crash between the two leaves it twice."""
        rows = _rows(entry for entry in self.entries if entry.segment == oldest)
        left = [entry for entry in self.entries if entry.segment not in (MOVED, oldest)]
        staying = [entry for entry in self.newest(Kind.EXCHANGE) if entry.segment in (MOVED, oldest)]
        if any(entry.segment == oldest for entry in staying):
            self.entries = [*self._move(staying), *left]
        else:
            self.entries = [entry for entry in self.entries if entry.segment != oldest]
        self._count_removed(oldest, rows)  # after the move, which a full disk may refuse: then nothing is removed
        del self._sizes[oldest]
        self._path(oldest).unlink(missing_ok=True)

    def _count_removed(self, oldest: int, rows: RowsByStream) -> None:
        self.removed += rows
        try:
            removed.write(self._folder, oldest, self.removed)
        except OSError:  # a full disk, which the deletion relieves; the next one writes these rows, too
            log.warning("rows that are removed are counted in memory alone", folder=str(self._folder), exc_info=True)

    def _move(self, staying: Sequence[SegmentEntry]) -> list[SegmentEntry]:
        """Write segment 0 anew; return its entries. Of many streams the newest, as many as one segment holds."""
        content, moved = bytearray(MAGIC), []
        for entry in _newest_that_fit(staying, self._segment_bytes):
            for frame in self.read([entry]):
                content += RECORD.pack(len(frame), zlib.crc32(frame)) + frame
                moved.append(replace(entry, segment=MOVED, offset=len(content) - len(frame)))
        part = self._path(MOVED).with_suffix(".part")
        part.write_bytes(content)
        part.chmod(0o600)
        part.replace(self._path(MOVED))
        self._sizes[MOVED] = len(content)
        return moved

    def _path(self, segment: int) -> Path:
        return self._folder / f"{segment:06d}.seg"


def _rows(entries: Iterable[SegmentEntry]) -> RowsByStream:
    rows: RowsByStream = Counter()
    for entry in entries:
        if entry.kind in _COUNTED:
            rows[entry.stream, entry.kind] += entry.count
    return rows


def _newest_that_fit(entries: Sequence[SegmentEntry], room_bytes: int) -> Sequence[SegmentEntry]:
    """Leave out the first, as many as there is no room for. `entries`: one of each stream, by stream."""
    ends = list(accumulate(RECORD.size + entry.size_bytes for entry in reversed(entries)))
    return entries[len(entries) - sum(end <= room_bytes for end in ends) :]


def _is_of(entry: SegmentEntry, frame: bytes) -> bool:
    try:
        header = decode_header(frame)
    except PeerError:
        return False
    return (header.stream, header.seq) == (entry.stream, entry.seq)


def _entry(segment: int, offset: int, header: Header, size: int) -> SegmentEntry:
    return SegmentEntry(segment, offset, size, header.stream, header.kind, header.seq, header.t0_ns, header.count)


def _scan(path: Path) -> list[SegmentEntry]:
    """Return the entries of one file, up to its end or its first damaged record."""
    content = path.read_bytes()
    entries: list[SegmentEntry] = []
    if not content.startswith(MAGIC):
        log.warning("segment is not readable", path=str(path))
        return entries
    at = len(MAGIC)
    while at + RECORD.size <= len(content):
        size, crc = RECORD.unpack_from(content, at)
        frame = content[at + RECORD.size : at + RECORD.size + size]
        if not HEADER_BYTES <= size <= MAX_FRAME_BYTES or len(frame) != size or zlib.crc32(frame) != crc:
            break
        try:
            entries.append(_entry(int(path.stem), at + RECORD.size, decode_header(frame), size))
        except PeerError:
            break
        at += RECORD.size + size
    if at != len(content):
        log.warning("segment ends in a damaged record", path=str(path), good_bytes=at, bytes=len(content))
    return entries
