"""What goes over one websocket connection next. No sockets, no clock: the caller gives the time and does the sending.

What is true (each replica's report, log and frames) is compared with what this connection has carried, so that a
reconnect needs no replay list: a fresh `Outgoing` sends every report again, logs from the offset that the server
holds, and frames that were never confirmed. The report of a replica's end follows all of its frames and its log, unless
the server has not taken them within `BEFORE_END_S` of the first turn in which it was due, however often the
connection breaks.

The server reads a connection in order and answers every heartbeat, so an answer confirms all that was sent before
the heartbeat, if the server could store it. That is how a replica's end becomes confirmed, and its folder may go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.protocol.agent import ReplicaReport
from penstock_worker import messages
from penstock_worker.buffer import FrameBuffer
from penstock_worker.logtail import LogTail

BEFORE_END_S = 10.0  # longest delay of the report of an end by a log and frames that the server does not take
FRAMES_A_TURN = 16


class ReplicaSource(Protocol):
    """What a replica has to send."""

    report: ReplicaReport
    draining: bool  # it has ended, and its telemetry socket is still read
    end_due_at: float | None  # first turn in which the report of its end was due
    confirmed: bool
    log: LogTail
    frames: FrameBuffer


@dataclass(frozen=True, slots=True)
class _Heartbeat:
    at: float
    ended: list[str]
    frames: dict[str, int]


class Outgoing:
    """State of one connection. `sources` is the agent's own mapping and may grow and shrink meanwhile."""

    def __init__(self, sources: Mapping[str, ReplicaSource], log_offsets: Mapping[str, int]) -> None:
        self._sources = sources
        self._reported: dict[str, ReplicaReport] = {}
        self.answers: deque[str] = deque()  # of what the server asked over this connection
        self.ends_first = False  # reports of ends go out without the log and the frames: the agent stops
        self._heartbeats: deque[_Heartbeat] = deque()
        for replica_id, source in sources.items():
            source.log.rewind(log_offsets.get(replica_id, 0))
            source.frames.rewind()

    def turn(self, now: float) -> Iterator[str | bytes]:
        """Yield what is due: answers, reports, then a piece of each replica's log and some of its frames."""
        while self.answers:
            yield self.answers.popleft()
        for source in list(self._sources.values()):
            yield from self._report(source, now)
        for source in list(self._sources.values()):
            yield from self._log(source)
            yield from self._frames(source)

    def _report(self, source: ReplicaSource, now: float) -> Iterator[str]:
        report = source.report
        if self._reported.get(report.replica_id) == report:
            return
        if report.terminal and not self._may_end(source, now):
            return
        self._reported[report.replica_id] = report
        yield report.encode()

    def _may_end(self, source: ReplicaSource, now: float) -> bool:
        # Not from the end itself: an agent that was stopped or disconnected meanwhile has had no turn to send anything.
        if source.end_due_at is None:
            source.end_due_at = now
        if self.ends_first or now - source.end_due_at >= BEFORE_END_S:
            return True
        return not source.draining and source.frames.empty and source.log.drained

    def _log(self, source: ReplicaSource) -> Iterator[str]:
        piece = source.log.next_chunk()
        if piece is not None:
            offset, chunk = piece
            yield messages.log(source.report, offset, chunk).encode()

    def _frames(self, source: ReplicaSource) -> Iterator[bytes]:
        for _ in range(FRAMES_A_TURN):
            payload = source.frames.pop()
            if payload is None:
                return
            yield payload

    @property
    def awaiting(self) -> bool:
        """True while a heartbeat is unanswered: no other may go out, since a server may answer two heartbeats once."""
        return bool(self._heartbeats)

    def heartbeat_sent(self, now: float) -> None:
        """Note that a heartbeat goes out now, and what went out before it."""
        ended = [replica_id for replica_id, report in self._reported.items() if report.terminal]
        frames = {replica_id: source.frames.sends for replica_id, source in self._sources.items()}
        self._heartbeats.append(_Heartbeat(now, ended, frames))

    def heartbeat_answered(self, *, stored: bool = True) -> float | None:
        """Return when the oldest unanswered heartbeat was sent; what went out before it is confirmed if `stored`."""
        if not self._heartbeats:
            return None
        heartbeat = self._heartbeats.popleft()
        for source in self._sources.values():
            source.log.retry()
        if not stored:
            return heartbeat.at
        for replica_id in heartbeat.ended:
            if replica_id in self._sources:
                self._sources[replica_id].confirmed = True
        for replica_id, mark in heartbeat.frames.items():
            if replica_id in self._sources:
                self._sources[replica_id].frames.confirm(mark)
        return heartbeat.at

    def log_acked(self, replica_id: str, offset: int, *, full: bool = False) -> None:
        """Note what the server holds of a log, and whether it takes more."""
        if replica_id in self._sources:
            self._sources[replica_id].log.ack(offset, full=full)
