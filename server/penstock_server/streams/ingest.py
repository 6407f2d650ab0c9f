"""Telemetry frames as they arrive: their sender is checked, they are stored, and handed on undecoded.

The header names the sender of a frame; its stream and epoch have to belong to the sender, and to the job's
current attempt, else it is refused and counted. Operator events are never decoded here. Figures, graph
documents, progress and logs are few, and are.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass

import structlog

from penstock.errors import PeerError
from penstock.protocol.frames import Column, Frame, Header, Kind, decode, decode_header
from penstock_server.db import DatabaseAway, TakenOver
from penstock_server.instruments import Instruments
from penstock_server.streams.counts import Counts
from penstock_server.streams.hub import LOST, SHOWN, Hub
from penstock_server.streams.logstore import Appended, LogStore
from penstock_server.streams.recorder import Recorder

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamSource:
    """What a stream stands for. `current`: its attempt is still the job's."""

    stream: int
    replica_id: str
    job_id: str
    epoch: int
    role: str
    index: int
    node_id: str | None
    attempt: int
    current: bool

    @property
    def suffix(self) -> str:
        """Return what sets this replica's series apart: nothing for trainer 0."""
        return "" if (self.role, self.index) == ("trainer", 0) else f".{self.role}{self.index}"


FIGURES = frozenset({Kind.METRICS, Kind.SCALARS})
"""Points of series, which no account of a process has: refused ones are counted as lost telemetry of the job."""


@dataclass(frozen=True, slots=True)
class FrameSender:
    """The other side: the agent of a node, or one attached process."""

    node_id: str | None = None
    replica_id: str | None = None

    def owns(self, source: StreamSource) -> bool:
        """Whether the sender may speak for this stream."""
        if self.replica_id is not None:
            return source.replica_id == self.replica_id
        return self.node_id is not None and source.node_id == self.node_id


MAX_GAPS = 64
"""Of a stream that are known again."""
FindSource = Callable[[int], Awaitable[StreamSource | None]]
OnFrame = Callable[[StreamSource, Frame], Awaitable[None]]
OnLost = Callable[[str, Mapping[str, int]], None]
"""Takes a job, and how much of what kind its processes could not deliver."""


class Ingest:
    """The way of a frame through the server. Sources are looked up once and kept until their job changes."""

    def __init__(
        self,
        find: FindSource,
        on_frame: OnFrame,
        on_lost: OnLost,
        *,
        hub: Hub,
        recorder: Recorder,
        logs: LogStore,
        meters: Instruments,
        counts: Counts,
        on_log: Callable[[str], None],
    ) -> None:
        self._find, self._on_frame, self._on_lost = find, on_frame, on_lost
        self._hub, self._recorder, self._logs, self._meters = hub, recorder, logs, meters
        self._counts, self._on_log = counts, on_log
        self._gaps: dict[int, deque[tuple[int, int]]] = {}  # number and checksum of the newest GAPs, by stream
        self._sources: dict[int, StreamSource] = {}
        self._next_seq: dict[int, int] = {}

    def forget_jobs(self, job_ids: Set[str]) -> None:
        """Look the streams of jobs up again: their epochs may have changed."""
        if job_ids:
            self._sources = {n: s for n, s in self._sources.items() if s.job_id not in job_ids}

    def forget_streams(self, job_id: str) -> None:
        """Drop the sequence numbers of a job that ended. To be called while its streams are still known."""
        for stream in [n for n, s in self._sources.items() if s.job_id == job_id]:
            self._next_seq.pop(stream, None)
            self._gaps.pop(stream, None)

    async def offer(self, sender: FrameSender, data: bytes) -> Header | None:
        """Take one frame, whatever is wrong with it; return its header, or None if it was refused.

        One bad frame of one process must not cut off its node, or the rest of what it sends: a sender that
        keeps its frames until they are taken would come back with the same frame for ever. Raises DatabaseAway, with
        which the connection ends: the sender keeps the frame, and comes back.
        """
        try:
            return await self.take(sender, data)
        except (DatabaseAway, TakenOver):
            raise
        except PeerError as error:
            reason = "bad_frame"
            log.warning("frame refused", error=str(error))
        except Exception:  # a boundary, as the text says
            reason = "failed_frame"
            log.exception("frame not taken")
        self._meters.refused.labels(reason).inc()
        return None

    async def take(self, sender: FrameSender, data: bytes) -> Header | None:
        """Take one frame; return its header, or None if it is not the sender's, which is counted.

        Raises PeerError if it is no frame.
        """
        header = decode_header(data)
        source = self._sources.get(header.stream) or await self._look_up(header.stream)
        refusal = _refusal(sender, source, header)
        if refusal is not None or source is None:
            self._meters.refused.labels(refusal or "unknown_stream").inc()
            log.warning("frame refused", reason=refusal, stream=header.stream, epoch=header.epoch)
            if refusal == "stale_epoch" and source is not None and header.epoch == source.epoch:
                await self._count_stale(source, header, data)
            return None
        self._count_lost(source, header)
        self._meters.frames.labels(header.kind.name).inc()
        self._meters.frame_bytes.inc(len(data))
        if header.kind in SHOWN:
            await self._take_shown(source, header, data)
            return header
        # A graph of 20,000 operators takes some 0.2 s to read: not on the loop.
        frame = await asyncio.to_thread(decode, data) if header.kind is Kind.GRAPH else decode(data)
        if header.kind is Kind.LOG:
            text = frame.columns[Column.TEXT].tobytes() if Column.TEXT in frame.columns else b""
            self.take_log(source.job_id, source.replica_id, header.step, text)
            return header
        await self._on_frame(source, frame)
        if header.kind is Kind.HELLO:
            await self._counts.greet(source.job_id, source.stream, frame.body)
        if header.kind is Kind.GRAPH_USED:  # kept among the frames: a replay has to know what they index
            await self._recorder.append(source.job_id, header, data)
        return header

    async def _take_shown(self, source: StreamSource, header: Header, data: bytes) -> None:
        dropped: dict[str, int] = {}
        if header.kind is Kind.GAP:
            gap = decode(data)
            if await self._counts.take(source.job_id, source.stream, gap.body) or self._is_repeated(header, data):
                return
            dropped = _dropped(gap)
        if not await self._recorder.append(source.job_id, header, data):
            await self._counts.not_recorded(source.job_id, source.stream, header.kind, header.count)
        self._hub.publish_frame(source.job_id, header, data)
        if dropped:
            self._on_lost(source.job_id, dropped)

    def _is_repeated(self, gap: Header, data: bytes) -> bool:
        """Whether a GAP is one that an agent sends again after a reconnect: what it reports counts once."""
        known, this = self._gaps.setdefault(gap.stream, deque(maxlen=MAX_GAPS)), (gap.seq, zlib.crc32(data))
        if this in known:
            return True
        known.append(this)
        return False

    async def _count_stale(self, source: StreamSource, header: Header, data: bytes) -> None:
        """Count what a process of an earlier attempt still sends; its own counts are taken."""
        if header.kind is Kind.GAP:
            await self._counts.take(source.job_id, source.stream, decode(data).body)
        elif header.kind in FIGURES:
            if header.seq >= self._next_seq.get(source.stream, 0):  # and not sent again after a reconnect
                self._next_seq[source.stream] = header.seq + 1
                self._on_lost(source.job_id, {header.kind.name: max(1, header.count)})
        else:
            await self._counts.refused(source.job_id, source.stream, header.kind, header.count)

    def take_log(self, job_id: str, replica_id: str, offset: int, content: bytes) -> Appended:
        """Store bytes of a log; return what to acknowledge."""
        appended = self._logs.append(job_id, replica_id, offset, content)
        if appended.grew:
            self._hub.publish_log(job_id, replica_id)
            self._on_log(job_id)
        return appended

    def _count_lost(self, source: StreamSource, header: Header) -> None:
        expected = self._next_seq.get(source.stream, header.seq)  # the first one seen may follow a restart of ours
        self._next_seq[source.stream] = max(expected, header.seq + 1)
        lost = header.seq - expected
        if lost > 0 and header.kind is not Kind.GAP:  # a GAP reports what lies before it
            self._meters.lost.inc(lost)
            self._hub.publish_lost(source.job_id, lost)
            self._on_lost(source.job_id, {LOST: lost})

    async def _look_up(self, stream: int) -> StreamSource | None:
        source = await self._find(stream)
        if source is not None:
            self._sources[stream] = source
        return source


def _dropped(gap: Frame) -> dict[str, int]:
    """Return the rows that a GAP counts, by kind. What is no count of a kind is left out."""
    body = gap.body if isinstance(gap.body, dict) else {}
    return {kind.name: rows for kind in Kind if isinstance(rows := body.get(kind.name), int) and 0 < rows < 1 << 53}


def _refusal(sender: FrameSender, source: StreamSource | None, header: Header) -> str | None:
    if source is None:
        return "unknown_stream"
    if not sender.owns(source):
        return "foreign_stream"
    if header.epoch != source.epoch or not source.current:
        return "stale_epoch"
    return None
