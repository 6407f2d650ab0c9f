"""Reports of a process's counts, as an outbox sends them: what was counted before it, and what it counts itself.

A report is of one stream (`protocol.completeness`): when another begins, what waits is of the new one, and all other
numbers start from there. Pure; owned by the outbox.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.protocol.completeness import COUNTED, Report, Rows, added
from penstock.protocol.frames import Kind
from penstock.telemetry.tally import Tally

_COUNTED = frozenset(COUNTED)


class Reports:
    """`process`: its name. `counted`: of kinds that are not all put into the outbox, what became of them before it."""

    def __init__(self, process: str) -> None:
        self._process = process
        self.counted: dict[Kind, Tally] = {}
        self.due = False
        self.is_over = False
        """The last report of the connection was made."""
        self._number = 0
        self._put: Counter[Kind] = Counter()
        self._sent: Counter[Kind] = Counter()
        self._lost: defaultdict[str, Counter[Kind]] = defaultdict(Counter)
        self._base = self._made = Report(process)  # what is of former streams; what was counted at the newest report
        self._newest: Report | None = None  # of this stream

    def put(self, kind: Kind, rows: int) -> None:
        """Count rows that were put into the outbox."""
        if kind in _COUNTED:
            self._put[kind] += rows

    def sent(self, kind: Kind, rows: int) -> None:
        """Count rows that were taken out to be sent; below 0: that were put back."""
        if kind in _COUNTED:
            self._sent[kind] += rows

    def lose(self, reason: str, kind: Kind, rows: int) -> None:
        """Count rows that the outbox dropped."""
        if kind in _COUNTED and rows:
            self._lost[reason][kind] += rows

    def begin(self) -> None:
        """Begin a stream. What the newest report of the former one does not count is of this one, but what was sent."""
        made, sent = self._made, _named(self._sent)
        produced = added([made.sampled_out, sent, *made.dropped.values()])
        self._base = replace(made, produced=produced, held={}, sent=sent)
        self._newest = None

    def connected(self) -> None:
        """Begin a connection: its peer may not have got the newest report."""
        self.is_over = False
        self.due = self._number > 0

    def ask(self, held: Mapping[Kind, int]) -> None:
        """Have a report made if it would differ from the newest."""
        self.due = self.due or self._of_stream(held) != self._newest

    def next(self, held: Mapping[Kind, int]) -> dict[str, Any]:
        """Return the body of the report that is due."""
        self.due = False
        self._newest = self._of_stream(held)
        self._made = self._now(held)
        return self._numbered(self._newest)

    def last(self, held: Mapping[Kind, int]) -> dict[str, Any]:
        """Return the body of the final report of the stream. What waits will not be sent over it."""
        self.due, self.is_over = False, True
        now, self._made = self._of_stream(held), self._now(held)
        produced = {name: rows - now.held.get(name, 0) for name, rows in now.produced.items()}
        return self._numbered(now, final=True, produced=produced, held={})

    def _numbered(self, report: Report, **changes: Any) -> dict[str, Any]:
        body = report.body()
        body["counts"].update(changes, number=self._number)
        self._number += 1
        return body

    def _of_stream(self, held: Mapping[Kind, int]) -> Report:
        now, base = self._now(held), self._base
        return Report(
            self._process,
            blind=now.blind,
            produced=_less(now.produced, base.produced),
            sampled_out=_less(now.sampled_out, base.sampled_out),
            held=now.held,
            sent=_less(now.sent, base.sent),
            dropped={reason: _less(rows, base.dropped.get(reason, {})) for reason, rows in now.dropped.items()},
        )

    def _now(self, held: Mapping[Kind, int]) -> Report:
        """Return all that was counted since the process began."""
        before = self.counted
        dropped = {reason: _named(rows) for reason, rows in self._lost.items()}
        for kind, tally in before.items():
            for reason, rows in tally.dropped.items():
                dropped[reason] = added([dropped.get(reason, {}), {kind.name: rows}])
        return Report(
            self._process,
            blind=any(tally.blind for tally in before.values()),
            produced=_named({**self._put, **{kind: tally.produced for kind, tally in before.items()}}),
            sampled_out=_named({kind: tally.sampled_out for kind, tally in before.items()}),
            held=_named({kind: held.get(kind, 0) + (before[kind].held if kind in before else 0) for kind in COUNTED}),
            sent=_named(self._sent),
            dropped=dropped,
        )


def _named(rows: Mapping[Kind, int]) -> Rows:
    return {kind.name: count for kind, count in rows.items() if count}


def _less(rows: Rows, base: Rows) -> Rows:
    return {name: left for name, count in rows.items() if (left := count - base.get(name, 0))}
