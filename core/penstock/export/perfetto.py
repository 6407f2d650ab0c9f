"""A writer of traces in Perfetto's format: tracks, slices, instants and counters, as they come.

Names are interned: a slice holds numbers for its name, category and arguments. Nothing but these names is retained, so
that a trace may be larger than memory. Packets need not be in the order of time; at one instant of one track, an end
has to stand before the next begin (`lanes`). Timestamps are Unix time in nanoseconds, exact, which the doubles of
Chrome's JSON format would not be.
Source: protos/perfetto/trace of Perfetto (TracePacket, TrackEvent, TrackDescriptor, InternedData).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

import numpy as np
import numpy.typing as npt

from penstock.export.lanes import Ints, Placed
from penstock.export.packets import Numbers, Part, doubles, message, number, rows_of, text

_SEQUENCE = 1
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_BOOTTIME, _REALTIME = 6, 1
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_PACKET, _CLOCKS, _TIMESTAMP, _SEQUENCE_ID, _EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 1, 6, 8, 10, 11, 12, 13, 60


class Names(Enum):
    """Kinds of interned text. The value: its field in InternedData."""

    EVENT = 2
    CATEGORY = 1
    ARGUMENT = 3
    TEXT = 29


class Texts:
    """An argument whose values are interned texts. `values`: numbers from `TraceWriter.intern` (Names.TEXT)."""

    def __init__(self, values: int | Numbers) -> None:
        self.values = values


Arguments = Mapping[str, int | Numbers | Texts]


class TraceWriter:
    """One trace. `write`: takes the next bytes of the file."""

    def __init__(self, write: Callable[[bytes], object], *, begins_ns: int) -> None:
        """`begins_ns`: some Unix time of the trace, at which viewers learn that its clock is Unix time."""
        self._write = write
        self._numbers: dict[tuple[Names, str], int] = {}
        self._news: list[Part] = []
        self._tracks = 0
        clocks: list[Part] = []
        for clock in (_BOOTTIME, _REALTIME):
            clocks += message(1, [*number(1, clock), *number(2, begins_ns)])
        self._packet([*number(_SEQUENCE_ID, _SEQUENCE), *number(_FLAGS, _STATE_CLEARED)])
        self._packet([*number(_TIMESTAMP, begins_ns), *message(_CLOCKS, clocks)])

    # Tracks

    def process(self, pid: int, name: str, labels: tuple[str, ...]) -> int:
        """Add a process; return its track. `pid`: any positive number that no other process has."""
        described = [*number(1, pid), *text(6, name)]
        for label in labels:
            described += text(8, label)
        return self._track(message(3, described))

    def thread(self, pid: int, tid: int, name: str, parent: int) -> int:
        """Add a thread of a process; return its track. `tid`: any positive number that no other thread has."""
        return self._track([*number(5, parent), *message(4, [*number(1, pid), *number(2, tid), *text(5, name)])])

    def track(self, name: str, parent: int = 0) -> int:
        """Add a track for slices or instants."""
        return self._track([*text(2, name), *(number(5, parent) if parent else ())])

    def counter(self, name: str, unit: str, parent: int) -> int:
        """Add a track for the values of a counter."""
        return self._track([*text(2, name), *number(5, parent), *message(8, text(6, unit) if unit else [])])

    def _track(self, described: list[Part]) -> int:
        self._tracks += 1
        self._packet(message(_DESCRIPTOR, [*number(1, self._tracks), *described]))
        return self._tracks

    # Events

    def intern(self, kind: Names, name: str) -> int:
        """Return the number that stands for a text."""
        found = self._numbers.get((kind, name))
        if found is None:
            found = self._numbers[kind, name] = len(self._numbers) + 1
            self._news += message(kind.value, [*number(1, found), *text(2, name)])
        return found

    def slices(
        self, placed: Placed, track: Numbers, start: Ints, end: Ints, name: Numbers, category: Numbers, args: Arguments
    ) -> None:
        """Write slices: arrays hold one value of each; `placed` is what `Lanes.place` gives."""
        begin = self._event(start, _BEGIN, [*number(11, track), *number(10, name), *number(3, category)], args)
        finish = self._event(end, _END, number(11, track), {})
        self._flush()
        if placed.turns is None:
            rows = np.hstack([rows_of(begin, len(start)), rows_of(finish, len(start))])
            self._write(rows[placed.order].tobytes())
            return
        begins, ends = rows_of(begin, len(start)), rows_of(finish, len(start))
        rows_in_order = (begins[turn] if turn >= 0 else ends[-1 - turn] for turn in placed.turns)
        self._write(b"".join(one.tobytes() for one in rows_in_order))

    def instant(self, track: int, at_ns: int, name: str, category: str, args: Mapping[str, str]) -> None:
        """Write one instant."""
        named = [*number(11, track), *text(23, name), *number(3, self.intern(Names.CATEGORY, category))]
        texts = {key: Texts(self.intern(Names.TEXT, value)) for key, value in args.items()}
        event = self._event(np.array([at_ns]), _INSTANT, named, texts)
        self._flush()
        self._write(rows_of(event, 1).tobytes())

    def values(self, track: int, time_ns: Ints, values: npt.NDArray[np.float64]) -> None:
        """Write values of a counter."""
        event = self._event(time_ns, _COUNTER, [*number(11, track), *doubles(44, values)], {})
        self._write(rows_of(event, len(values)).tobytes())

    def _event(self, time_ns: Ints, kind: int, fields: list[Part], args: Arguments) -> list[Part]:
        event = [*number(9, kind), *fields]
        for name, value in args.items():
            content = number(17, value.values) if isinstance(value, Texts) else number(3, value)
            event += message(4, [*number(1, self.intern(Names.ARGUMENT, name)), *content])
        head = [*number(_TIMESTAMP, time_ns), *number(_SEQUENCE_ID, _SEQUENCE), *number(_FLAGS, _NEEDS_STATE)]
        return message(_PACKET, [*head, *message(_EVENT, event)])

    def _flush(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._packet([*number(_SEQUENCE_ID, _SEQUENCE), *number(_FLAGS, _NEEDS_STATE), *message(_INTERNED, news)])

    def _packet(self, parts: list[Part]) -> None:
        self._write(rows_of(message(_PACKET, parts), 1).tobytes())
