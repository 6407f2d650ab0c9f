"""Counts of what a process does with the rows of one kind before they are in its outbox (`protocol.completeness`).

Each number is counted where it happens. Invariant between two drains:
produced = sampled_out + held + dropped + passed, where `passed` rows are in the outbox or beyond it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """Owned by the drain thread, or under the session's lock. `blind`: from some time on a part counts nothing."""

    produced: int = 0
    sampled_out: int = 0
    held: int = 0
    passed: int = 0
    blind: bool = False
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, rows: int) -> None:
        """Count rows that are not sent, for a reason (`completeness.REASONS`)."""
        if rows:
            self.dropped[reason] += rows

    def fail(self) -> None:
        """Count what a source that failed had produced and not passed on, and that more of it is not counted."""
        self.blind = True
        self.drop("source_failed", self.produced - self.sampled_out - self.held - self.passed - self.dropped.total())

    def copy(self) -> Tally:
        """Return the numbers as they are now."""
        return Tally(self.produced, self.sampled_out, self.held, self.passed, self.blind, Counter(self.dropped))
