"""How far the wall clock of a node is ahead of the server's, estimated from round trips. Pure.

A heartbeat and its answer are one round trip with four times, as in NTP: sent and returned by the node's clock,
received and answered by the server's. The offset is the mean of what both ways show; whatever share of the delay either
way took, it is wrong by at most half of the time on the way. Of the recent round trips the one with the smallest error
counts. Errors grow by 15 µs a second, the drift that RFC 5905 assumes. When the newest round trip contradicts an older
one, a clock was set in between, and the older ones are dropped.
Source: RFC 5905 (NTPv4), sections 8 and 10.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from penstock.protocol.wire import Message

MAX_ROUND_TRIPS = 8
DRIFT_NS_PER_S = 15_000
_Nanoseconds = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]


class ClockOffset(Message):
    """A node's wall clock minus the server's, in nanoseconds, right within ± `error_ns`."""

    offset_ns: _Nanoseconds
    error_ns: Annotated[_Nanoseconds, Field(ge=0)]

    def differs(self, other: ClockOffset | None) -> bool:
        """Return whether this estimate tells a reader something new after `other`."""
        if other is None:
            return True
        moved = abs(self.offset_ns - other.offset_ns) > max(self.error_ns, other.error_ns) // 2
        return moved or not other.error_ns // 2 <= self.error_ns <= other.error_ns * 2


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Unix nanoseconds: `sent_ns` and `returned_ns` by the node's clock, the others by the server's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int

    def offset(self) -> ClockOffset:
        """Return what this round trip alone shows."""
        ahead = (self.sent_ns - self.received_ns) + (self.returned_ns - self.answered_ns)
        on_the_way = (self.returned_ns - self.sent_ns) - (self.answered_ns - self.received_ns)
        return ClockOffset(offset_ns=ahead // 2, error_ns=max(0, on_the_way) // 2 + 1)


class ClockWatch:
    """The recent round trips of one node, as it sees them. `offset`: the best estimate, None before the first."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, ClockOffset]] = deque(maxlen=MAX_ROUND_TRIPS)
        self._sent_ns: int | None = None
        self.offset: ClockOffset | None = None

    def sent(self, now_ns: int) -> None:
        """Note that a round trip begins; one that has not come back is forgotten."""
        self._sent_ns = now_ns

    def returned(self, received_ns: int, answered_ns: int, now_ns: int) -> None:
        """Note that it ends. Without times of the server (0, of an older one) it shows nothing."""
        sent_ns, self._sent_ns = self._sent_ns, None
        if sent_ns is not None and received_ns:
            self.offset = self.note(RoundTrip(sent_ns, received_ns, answered_ns, now_ns))

    def note(self, trip: RoundTrip) -> ClockOffset:
        """Return the best estimate after one more round trip."""
        newest, now = trip.offset(), trip.returned_ns
        aged = [(at, _aged(one, now - at)) for at, one in self._recent]
        if any(abs(one.offset_ns - newest.offset_ns) > one.error_ns + newest.error_ns for _, one in aged):
            self._recent.clear()  # a clock was set
            aged = []
        self._recent.append((now, newest))
        return min([newest, *(one for _, one in aged)], key=lambda one: one.error_ns)


def _aged(offset: ClockOffset, ns: int) -> ClockOffset:
    return ClockOffset(
        offset_ns=offset.offset_ns, error_ns=offset.error_ns + max(0, ns) * DRIFT_NS_PER_S // 1_000_000_000
    )
