"""Bounded buffer of one replica's telemetry frames on their way to the server. No I/O.

Order of sequence numbers is preserved. Over its limit the buffer drops OP_EVENTS and INPUT_EVENTS, then EXCHANGE (but
the newest, which holds all that those before it held), then OP_SUMS, SYNC and LOG, each oldest first; HELLO, GRAPH,
GRAPH_USED, METRICS, SCALARS, PROGRESS, GAP and GOODBYE are never dropped. Where frames were dropped a GAP frame stands,
which has the sequence number of the last dropped one. If only frames that may not be dropped are left and the limit is
passed, `full` is true and the socket is not read: the trainer never waits, it drops by itself. With a `name` a GAP also
holds what the buffer has dropped in all, so that one that is lost makes no difference (`protocol.completeness`).

Frames of the kinds that are never dropped, and the newest EXCHANGE, stay until the server has confirmed them
(`confirm`), and are sent again after a reconnect (`rewind`); the server knows a repeated one by (stream, epoch, seq).
One that was under way when `MAX_TRIES` connections in a row broke may be what breaks them: it is dropped and counted,
so that the node goes on.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

from penstock.protocol.bounded import BoundedQueue, DropRule
from penstock.protocol.frames import Frame, Header, Kind, encode

LIMIT_BYTES = 64 << 20
DROPPED = (
    frozenset({Kind.OP_EVENTS, Kind.INPUT_EVENTS}),
    frozenset({Kind.EXCHANGE}),
    frozenset({Kind.OP_SUMS, Kind.SYNC, Kind.LOG}),
)
MAX_TRIES = 8
KEPT = frozenset(Kind).difference(*DROPPED)
AGAIN = KEPT | {Kind.EXCHANGE}  # sent again over a new connection


@dataclass(frozen=True, slots=True)
class _Held:
    kind: Kind
    seq: int
    rows: int
    payload: bytes
    tries: int = 0  # connections that broke before this was confirmed


class FrameBuffer:
    """Frames of one stream and epoch. Owned by the agent's event loop. `name`: of this buffer, in its GAP frames."""

    def __init__(self, *, stream: int, epoch: int, limit_bytes: int = LIMIT_BYTES, name: str = "") -> None:
        self._name = name
        self._total: Counter[Kind] = Counter()  # dropped and reported
        self._stream = stream
        self._epoch = epoch
        self._limit = limit_bytes
        self._waiting = BoundedQueue[_Held](
            [DropRule(kinds, limit_bytes, keep_newest=Kind.EXCHANGE in kinds) for kinds in DROPPED]
        )
        self._sent: deque[tuple[int, _Held]] = deque()  # (number of the send, frame), kinds of AGAIN only
        self._sends = 0
        self._gap_seq = -1

    @property
    def size_bytes(self) -> int:
        """Bytes held, sent but unconfirmed ones included."""
        return self._waiting.size_bytes + self._waiting.outside_bytes

    @property
    def full(self) -> bool:
        """True while nothing more should be read from the trainer."""
        return self.size_bytes > self._limit

    @property
    def empty(self) -> bool:
        """True if there is nothing to send."""
        return not self._waiting and self._gap_seq < 0

    @property
    def sends(self) -> int:
        """Number of frames taken out so far: the mark for `confirm`."""
        return self._sends

    def push(self, header: Header, payload: bytes) -> None:
        """Take a frame in; drop others, or itself, if there is no room."""
        held = _Held(header.kind, header.seq, header.count, payload)
        for dropped in self._waiting.push(held.kind, held.rows, len(payload), held):
            self._gap_seq = max(self._gap_seq, dropped.item.seq)

    def pop(self) -> bytes | None:
        """Return the next frame to send, or None."""
        if self._gap_seq >= 0 and ((due := self._waiting.peek()) is None or due.item.seq > self._gap_seq):
            return self._pop_gap()
        first = self._waiting.pop()
        if first is None:
            return None
        self._sends += 1
        if first.item.kind in AGAIN:
            self._sent.append((self._sends, first.item))
            self._waiting.outside_bytes += first.size_bytes
        return first.item.payload

    def _pop_gap(self) -> bytes:
        dropped = self._waiting.take_dropped()
        self._total.update(dropped)
        body: dict[str, Any] = {kind.name: rows for kind, rows in sorted(dropped.items())}
        if self._name:
            body |= {"agent": self._name, "total": {kind.name: rows for kind, rows in sorted(self._total.items())}}
        frame = Frame(Kind.GAP, self._stream, self._epoch, self._gap_seq, body=body)
        self._gap_seq = -1
        self._sends += 1
        return encode(frame)

    def confirm(self, mark: int) -> None:
        """Let go of what was sent up to `mark` (a former value of `sends`)."""
        while self._sent and self._sent[0][0] <= mark:
            _, held = self._sent.popleft()
            self._waiting.outside_bytes -= len(held.payload)

    def unconfirmed(self) -> list[bytes]:
        """Return the frames that are sent again over a new connection, oldest first."""
        waiting = [entry.item.payload for entry in self._waiting if entry.kind in AGAIN]
        return [held.payload for _, held in self._sent] + waiting

    def rewind(self) -> None:
        """Put what was sent and never confirmed back in front: the connection is a new one."""
        while self._sent:
            _, held = self._sent.pop()
            self._waiting.outside_bytes -= len(held.payload)
            if held.tries + 1 < MAX_TRIES:
                again = replace(held, tries=held.tries + 1)
                lost = [
                    entry.item for entry in self._waiting.push_front(held.kind, held.rows, len(held.payload), again)
                ]
            else:
                self._waiting.count_dropped(held.kind, held.rows)
                lost = [held]
            self._gap_seq = max([self._gap_seq, *(one.seq for one in lost)])
