"""Bounded buffer of one replica's telemetry frames on their way to the server. No I/O.

Order of sequence numbers is kept. Over its limit the buffer drops OP_EVENTS, oldest first, then OP_SUMS, SYNC, EXCHANGE
(but the newest, which says all that those before it said) and LOG; HELLO, GRAPH, GRAPH_USED, METRICS, SCALARS,
PROGRESS, GAP and GOODBYE are never dropped. Where frames were dropped a GAP frame stands, which has the sequence number
of the last dropped one. If only frames that may not be dropped are left and the limit is passed, `full` is true and the
socket is not read: the trainer never waits, it drops by itself.

Frames of the kinds that are never dropped, and the newest EXCHANGE, stay until the server has confirmed them
(`confirm`), and are sent again after a reconnect (`rewind`); the server knows a repeated one by (stream, epoch, seq).
One that was under way when `MAX_TRIES` connections in a row broke may be what breaks them: it is dropped and counted,
so that the node goes on.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace

from penstock.protocol.frames import Frame, Header, Kind, encode

LIMIT_BYTES = 64 << 20
DROP_FIRST = (Kind.OP_EVENTS,)
DROP_NEXT = (Kind.OP_SUMS, Kind.SYNC, Kind.EXCHANGE, Kind.LOG)
MAX_TRIES = 8
KEPT = frozenset(Kind) - {*DROP_FIRST, *DROP_NEXT}
AGAIN = KEPT | {Kind.EXCHANGE}  # sent again over a new connection


@dataclass(frozen=True, slots=True)
class _Held:
    kind: Kind
    seq: int
    rows: int
    payload: bytes
    tries: int = 0  # connections that broke before this was confirmed


class FrameBuffer:
    """Frames of one stream and epoch. Owned by the agent's event loop."""

    def __init__(self, *, stream: int, epoch: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._stream = stream
        self._epoch = epoch
        self._limit = limit_bytes
        self._waiting: deque[_Held] = deque()
        self._sent: deque[tuple[int, _Held]] = deque()  # (number of the send, frame), kinds of AGAIN only
        self._sends = 0
        self._size = 0
        self._dropped: Counter[Kind] = Counter()
        self._gap_seq = -1

    @property
    def size_bytes(self) -> int:
        """Bytes held, sent but unconfirmed ones included."""
        return self._size

    @property
    def full(self) -> bool:
        """True while nothing more should be read from the trainer."""
        return self._size > self._limit

    @property
    def empty(self) -> bool:
        """True if there is nothing to send."""
        return not self._waiting and self._gap_seq < 0

    @property
    def sends(self) -> int:
        """Number of frames taken out so far: the mark for `confirm`."""
        return self._sends

    def push(self, header: Header, payload: bytes) -> None:
        """Take a frame in; drop others, or itself, if there is no room. Cost: O(frames) only while over the limit."""
        self._waiting.append(_Held(header.kind, header.seq, header.count, payload))
        self._size += len(payload)
        for kinds in (DROP_FIRST, DROP_NEXT):
            if self._size > self._limit:
                self._drop(frozenset(kinds))

    def _drop(self, kinds: frozenset[Kind]) -> None:
        # A tenth of the room is made at once, so that a full buffer is not walked through for every frame.
        target = self._limit - self._limit // 10
        kept: deque[_Held] = deque()
        newest = max((held.seq for held in self._waiting if held.kind is Kind.EXCHANGE), default=-1)
        for held in self._waiting:
            if held.kind in kinds and held.seq != newest and self._size > target:
                self._count_dropped(held)
            else:
                kept.append(held)
        self._waiting = kept

    def pop(self) -> bytes | None:
        """Return the next frame to send, or None."""
        if self._gap_seq >= 0 and (not self._waiting or self._waiting[0].seq > self._gap_seq):
            return self._pop_gap()
        if not self._waiting:
            return None
        held = self._waiting.popleft()
        self._sends += 1
        if held.kind in AGAIN:
            self._sent.append((self._sends, held))
        else:
            self._size -= len(held.payload)
        return held.payload

    def _pop_gap(self) -> bytes:
        body = {kind.name: rows for kind, rows in sorted(self._dropped.items())}
        frame = Frame(Kind.GAP, self._stream, self._epoch, self._gap_seq, body=body)
        self._dropped.clear()
        self._gap_seq = -1
        self._sends += 1
        return encode(frame)

    def confirm(self, mark: int) -> None:
        """Let go of what was sent up to `mark` (a former value of `sends`)."""
        while self._sent and self._sent[0][0] <= mark:
            _, held = self._sent.popleft()
            self._size -= len(held.payload)

    def rewind(self) -> None:
        """Put what was sent and never confirmed back in front: the connection is a new one."""
        for _, held in reversed(self._sent):
            if held.tries + 1 < MAX_TRIES:
                self._waiting.appendleft(replace(held, tries=held.tries + 1))
            else:
                self._count_dropped(held)
        self._sent.clear()

    def _count_dropped(self, held: _Held) -> None:
        self._size -= len(held.payload)
        self._dropped[held.kind] += held.rows
        self._gap_seq = max(self._gap_seq, held.seq)
