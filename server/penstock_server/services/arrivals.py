"""Hang detection of one attempt: which trainer has arrived at which step, and when. Pure; times are the caller's.

An attempt hangs if no trainer has reported a step for `FACTOR` medians of its steps, and `LEAST_S` at least. Any report
counts, of an earlier step too: a trainer that was started again repeats steps, a script may count as it likes. Before
`MIN_STEPS` steps nothing is known of how long one takes. A table of the trainers says who has not arrived at the step
that others have ended.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_S = 60.0
FACTOR = 8.0
MIN_STEPS = 3
WINDOW = 64
MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Arrival:
    """A trainer's last step, and how many seconds ago it was reported."""

    trainer: int
    step: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Hang:
    """No step for `silent_s`, where one takes `median_s`. `arrivals`: those that are behind first."""

    silent_s: float
    median_s: float
    arrivals: tuple[Arrival, ...]

    def sentence(self) -> str:
        """Describe it in one line."""
        newest = max(one.step for one in self.arrivals)
        behind = [f"{one.trainer}" for one in self.arrivals if one.step < newest]
        shown = ", ".join(behind[:8]) + (" …" if len(behind) > 8 else "")
        who = f"trainer{'s' if len(behind) > 1 else ''} {shown} did not arrive at step {newest}" if behind else ""
        text = f"hangs: no step for {self.silent_s:.0f} s, where one takes {self.median_s:.3g} s in the median"
        return f"{text}; {who}" if who else f"{text}; every trainer ended step {newest}"

    def table(self, operators: Mapping[int, str] | None = None) -> str:
        """Lay out the arrivals, those that are behind first. `operators`: where a trainer was last reported."""
        known = operators or {}
        rows = [f"{'trainer':>7}  {'last step':>10}  {'seconds ago':>11}" + ("  last reported in" if known else "")]
        for one in self.arrivals[:MAX_ROWS]:
            row = f"{one.trainer:>7}  {one.step:>10}  {one.age_s:>11.1f}"
            rows.append(f"{row}  {known[one.trainer]}" if one.trainer in known else row)
        more = len(self.arrivals) - MAX_ROWS
        return "\n".join([*rows, f"and {more} more"] if more > 0 else rows)


@dataclass(slots=True)
class Arrivals:
    """The steps of one attempt. `began_at`: of the first report."""

    attempt: int
    last_at: float
    _last: dict[int, tuple[int, int, float]] = field(default_factory=dict)  # trainer: step, its clock in ns, our time
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note(self, trainer: int, step: int, time_ns: int, now: float) -> None:
        """Note that a trainer has ended a step at a time of its own clock."""
        self.last_at = now
        before = self._last.get(trainer)
        if before is not None and step > before[0] and time_ns > before[1]:
            self._took.append((time_ns - before[1]) / 1e9 / (step - before[0]))
        if before is None or step != before[0]:
            self._last[trainer] = step, time_ns, now

    def hang(self, now: float) -> Hang | None:
        """Return the hang if the attempt hangs now."""
        silent_s = now - self.last_at
        if silent_s <= LEAST_S or len(self._took) < MIN_STEPS:
            return None
        median_s = statistics.median(self._took)
        if silent_s <= FACTOR * median_s:
            return None
        found = [Arrival(trainer, step, now - at) for trainer, (step, _, at) in self._last.items()]
        return Hang(silent_s, median_s, tuple(sorted(found, key=lambda one: (one.step, one.trainer))))
