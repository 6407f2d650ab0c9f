"""Processor and memory of each node over the last hour, as heartbeats report them: one mean a minute. Pure.

Kept in memory alone, so it begins anew with the server. Owned by the event loop. O(1) a heartbeat.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BIN_S = 60
MOST_BINS = 60
MOST_NODES = 5000


@dataclass(slots=True)
class Bin:
    """Means over the heartbeats of a minute. `number`: of the minute, since 1970."""

    number: int
    cpu_percent: float
    memory_used_bytes: float
    num_heartbeats: int = 1

    @property
    def at_s(self) -> int:
        """Return when the minute began, in Unix seconds."""
        return self.number * BIN_S

    def add(self, cpu_percent: float, memory_used_bytes: int) -> None:
        """Add a heartbeat."""
        self.num_heartbeats += 1
        self.cpu_percent += (cpu_percent - self.cpu_percent) / self.num_heartbeats
        self.memory_used_bytes += (memory_used_bytes - self.memory_used_bytes) / self.num_heartbeats


@dataclass(slots=True)
class NodeLoads:
    """By node, of the `MOST_NODES` that reported last."""

    _bins: dict[str, deque[Bin]] = field(default_factory=dict)

    def note(self, node_id: str, at_s: float, *, cpu_percent: float, memory_used_bytes: int) -> None:
        """Note a heartbeat. `cpu_percent`: of all cores together, 0 to 100; what is outside is cut to it."""
        bins = self._bins.pop(node_id, deque(maxlen=MOST_BINS))
        self._bins[node_id] = bins
        while len(self._bins) > MOST_NODES:
            del self._bins[next(iter(self._bins))]
        cpu = min(100.0, max(0.0, cpu_percent)) if math.isfinite(cpu_percent) else 0.0
        memory, number = max(0, memory_used_bytes), int(at_s // BIN_S)
        if bins and number <= bins[-1].number:  # a clock that was set back makes no second bin of a minute
            bins[-1].add(cpu, memory)
        else:
            bins.append(Bin(number, cpu, memory))

    def of(self, node_id: str, now_s: float) -> Sequence[Bin]:
        """Return the bins of the last hour, oldest first; a minute without a heartbeat has none."""
        oldest = int(now_s // BIN_S) - MOST_BINS
        return [one for one in self._bins.get(node_id, ()) if one.number > oldest]
