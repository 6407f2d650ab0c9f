"""Which steps are sent whole: 1 in N, and the slowest; N follows from a budget. Pure: the caller brings the time.

Two limits hold together. N is set so that regular samples use `REGULAR_SHARE` of what may be sent; what may be sent is
the byte budget, or less if sampling would use more processor time than is left of `cpu_budget`. Behind N stands a
bucket of one second's budget that may go into debt: a step may be larger than the bucket, and still the bytes sent over
any long time keep within the budget.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from penstock.telemetry.events import Mask

BUDGET_BYTES_PER_S = 256 << 10
CPU_BUDGET = 0.01  # share of one core for draining, sums and samples together
REGULAR_SHARE = 0.75  # the rest is for slow steps
MIN_RATE_SHARE = 1 / 16  # of the byte budget, whatever the processor time: the timeline never starves
SMOOTHING_S = 1.0  # time constant of the measured rates
SLOW_QUANTILE = 0.99
SLOW_WINDOW = 1024  # steps
SLOW_MIN_STEPS = 100  # before that many are known no step is called slow

SLOW_REFRESH = SLOW_MIN_STEPS  # new steps after which the threshold is computed again


class Sampler:
    """Chooses steps of all watches of a process. Owned by the drain thread."""

    def __init__(self, *, budget_bytes_per_s: float = BUDGET_BYTES_PER_S, cpu_budget: float = CPU_BUDGET) -> None:
        self.every = 1
        self.in_full = False  # every step is sent, whatever the budgets: a person asked for it
        self._budget = float(budget_bytes_per_s)
        self._cpu_budget = cpu_budget
        self._allowed = self._budget  # bytes a second: the budget, or less
        self._tokens = self._budget
        self._since = 1  # steps since the last regular sample, that one included
        self._offered = 0.0  # bytes since the last `observe`, if every step were sent
        self._sent = 0.0  # bytes since the last `observe`
        self._offered_rate = 0.0
        self._cost_ns_per_byte = 0.0

    def choose(self, step_bytes: npt.NDArray[np.int64], slow: Mask) -> Mask:
        """Return which of these steps, oldest first, are sent whole."""
        if self.in_full:
            self._offered += float(step_bytes.sum())
            self._sent += float(step_bytes.sum())
            return np.ones(len(step_bytes), np.bool_)
        chosen = np.zeros(len(step_bytes), np.bool_)
        # Counted from the last regular one: a phase of `seen % every` would jump whenever N changes by one.
        regular = range(max(self.every - self._since, 0), len(step_bytes), self.every)
        for i in sorted({*regular, *np.flatnonzero(slow).tolist()}):  # few: N follows the budget
            if self._tokens > 0:
                chosen[i] = True
                self._tokens -= float(step_bytes[i])
        self._since = len(step_bytes) - regular[-1] if regular else self._since + len(step_bytes)
        self._offered += float(step_bytes.sum())
        self._sent += float(step_bytes[chosen].sum())
        return chosen

    def observe(self, *, interval_s: float, cpu_s: float, sample_cpu_s: float) -> None:
        """Adapt N after an interval. `cpu_s`: processor time of it; `sample_cpu_s`: the part that samples cost."""
        if interval_s <= 0:
            return
        weight = 1 - float(np.exp(-interval_s / SMOOTHING_S))
        self._offered_rate += weight * (self._offered / interval_s - self._offered_rate)
        if self._sent > 0:
            self._cost_ns_per_byte += weight * (sample_cpu_s * 1e9 / self._sent - self._cost_ns_per_byte)
        left = self._cpu_budget - (cpu_s - sample_cpu_s) / interval_s
        affordable = left * 1e9 / self._cost_ns_per_byte if self._cost_ns_per_byte > 0 else self._budget
        wanted = min(max(affordable, self._budget * MIN_RATE_SHARE), self._budget)
        self._allowed += weight * (wanted - self._allowed)
        self._tokens = min(self._tokens + self._allowed * interval_s, self._allowed)
        self.every = max(1, int(np.ceil(self._offered_rate / (REGULAR_SHARE * self._allowed))))
        self._offered = self._sent = 0.0


class SlowSteps:
    """Selects the steps that took longer than 99 % of those before them. One for each watch."""

    def __init__(self) -> None:
        self.threshold_ns = math.inf
        self._recent: deque[int] = deque(maxlen=SLOW_WINDOW)
        self._new = 0  # steps since the threshold was computed

    def classify(self, duration_ns: npt.NDArray[np.int64]) -> Mask:
        """Return which of the steps are slow, against the steps of earlier calls; then learn from them."""
        slow: Mask = duration_ns > self.threshold_ns
        self._recent.extend(duration_ns.tolist())
        self._new += len(duration_ns)
        if len(self._recent) >= SLOW_MIN_STEPS and self._new >= SLOW_REFRESH:
            self._new = 0
            self.threshold_ns = sorted(self._recent)[int(SLOW_QUANTILE * (len(self._recent) - 1))]
        return slow
