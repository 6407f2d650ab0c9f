"""Segment files by job, opened when needed. A disk that fails costs the recording, never the live view.

A job that is being recorded keeps its index until it ends, however many there are: to read it again costs a pass over
all of its files. Of the others, and of open files, the ones used last are kept.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from penstock.protocol.frames import Header, Kind
from penstock_server.streams.removed import RowsByStream
from penstock_server.streams.segments import Segments

log = structlog.get_logger(__name__)


MAX_READ = 64
"""Indices of jobs that are not being recorded."""
MAX_FILES = 64
"""Files open for writing; a job beyond them costs an open and a close for each run of frames."""


class Recorder:
    """The recordings of all jobs, under `root/<job id>/segments/`."""

    def __init__(self, root: Path, *, segment_bytes: int, quota_bytes: int) -> None:
        self._root, self._segment_bytes, self._quota_bytes = root, segment_bytes, quota_bytes
        self._jobs: dict[str, Segments] = {}  # by last use
        self._writing: dict[str, None] = {}  # jobs with an open file, by last use
        self._recorded: set[str] = set()
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()  # calls of `_of` by job
        self._ended: set[str] = set()  # to be released when no call of `_of` is left
        self._failed: set[str] = set()

    async def append(self, job_id: str, header: Header, frame: bytes) -> bool:
        """Append a frame to its job's recording; return whether it is there."""
        try:
            segments = self._jobs.get(job_id) if job_id in self._recorded else None
            (segments or await self._of(job_id, records=True)).append(header, frame)
            self._writing.pop(job_id, None)
            self._writing[job_id] = None
            if len(self._writing) > MAX_FILES:
                self._pause(next(iter(self._writing)))
        except OSError:
            if job_id not in self._failed:
                self._failed.add(job_id)
                log.exception("recording failed; live views go on", job=job_id)
            return False
        return True

    async def rows(self, job_id: str) -> tuple[RowsByStream, RowsByStream]:
        """Return a job's rows by stream and kind: those that were ever recorded, and those that the quota removed."""
        segments = await self._of(job_id)
        return segments.recorded, segments.removed

    async def read(
        self, job_id: str, *, stream: int | None, kinds: Collection[Kind], after_seq: int | None, limit_bytes: int
    ) -> bytes:
        """Return the oldest frames that fit the filter, each preceded by its length as u32."""
        segments = await self._of(job_id)
        entries = segments.select(stream=stream, kinds=kinds, after_seq=after_seq, limit_bytes=limit_bytes)
        frames = await asyncio.to_thread(lambda: list(segments.read(entries)))
        return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)

    async def last(self, job_id: str, kinds: Collection[Kind], limit_bytes: int) -> list[bytes]:
        """Return the newest frames of a job, oldest first, with the GRAPH_USED frames that they rest on."""
        segments = await self._of(job_id)
        entries = segments.last(kinds, limit_bytes)
        return await asyncio.to_thread(lambda: list(segments.read(entries)))

    async def recent(self, job_id: str, kind: Kind, limit_bytes: int) -> list[bytes]:
        """Return the newest frames of one kind of a job, oldest first, together at most `limit_bytes`."""
        segments = await self._of(job_id)
        entries = segments.recent(kind, limit_bytes)
        return await asyncio.to_thread(lambda: list(segments.read(entries)))

    async def newest(self, job_id: str, kind: Kind, *, age_ns: int = 0) -> list[bytes]:
        """Return the newest frame of a kind of each stream of a job; those of which one `age_ns` younger is there."""
        segments = await self._of(job_id)
        entries = segments.earlier(kind, age_ns) if age_ns else segments.newest(kind)
        return await asyncio.to_thread(lambda: list(segments.read(entries)))

    def release(self, job_id: str) -> None:
        """Close a job that ended, after what is under way; its index is read again on demand."""
        if self._waiting[job_id]:
            self._ended.add(job_id)
        else:
            self._close(job_id)

    def _pause(self, job_id: str) -> None:
        del self._writing[job_id]
        if job_id in self._jobs:
            self._jobs[job_id].pause()

    def _close(self, job_id: str) -> None:
        self._recorded.discard(job_id)
        self._writing.pop(job_id, None)
        segments = self._jobs.pop(job_id, None)
        if segments is not None:
            segments.close()

    def close(self) -> None:
        """Close every file."""
        for job_id in list(self._jobs):
            self._close(job_id)

    async def _of(self, job_id: str, *, records: bool = False) -> Segments:
        """Return a job's recording. Its files, which may be hundreds of MiB, are read beside the event loop."""
        self._waiting[job_id] += 1
        try:
            found = await self._opened(job_id)
            if records:
                self._recorded.add(job_id)
            return found
        finally:
            self._waiting -= Counter([job_id])  # drops a count of zero
            if job_id in self._ended and job_id not in self._waiting:
                self._ended.discard(job_id)
                asyncio.get_running_loop().call_soon(self.release, job_id)  # after the caller's append

    async def _opened(self, job_id: str) -> Segments:
        async with self._opening.setdefault(job_id, asyncio.Lock()):
            found = self._jobs.get(job_id)
            if found is None:
                folder = self._root / job_id / "segments"
                found = await asyncio.to_thread(
                    Segments, folder, segment_bytes=self._segment_bytes, quota_bytes=self._quota_bytes
                )
                others = [one for one in self._jobs if one not in self._recorded]
                for one in others[: max(0, len(others) - MAX_READ + 1)]:
                    self._close(one)
            else:
                del self._jobs[job_id]
            self._jobs[job_id] = found
            return found
