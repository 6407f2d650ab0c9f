"""What a parameter server does with trainers' requests, and when: events for the lanes of its timeline.

Native code and Python add to one bounded log (`native/src/ps/work_log.h`), which is off until a session watches it.
Lanes: a trainer's requests (receiving, waiting for the round, the answer), the rounds of all trainers (merge, log,
update), and each block whose rows are looked up or which is updated by itself. Over gRPC: only lookups and updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from penstock.native.channels import Traffic
from penstock.protocol.frames import FIRST_BLOCK, ROUNDS_LANE, Work
from penstock.telemetry.input import EVENT, Events

_NOTHING = nullcontext()


class ServerWork:
    """The work of one server. Thread-safe. `names`: of its blocks, by number; `clock`: Unix nanoseconds."""

    def __init__(self, traffic: Traffic, names: Sequence[str], clock: Callable[[], int] = time.time_ns) -> None:
        self._traffic, self._names, self._clock = traffic, list(names), clock
        self._lanes = {name: min(FIRST_BLOCK + number, 2**16 - 1) for number, name in enumerate(names)}

    def watch(self) -> None:
        """Record from now on."""
        self._traffic.watch_work(True)

    def take(self) -> tuple[Events, int]:
        """Return the events since the last call, and how many more were lost as too many waited."""
        content, num_lost = self._traffic.take_work()
        return np.frombuffer(content, EVENT), num_lost

    def name(self, lane: int) -> str | None:
        """Return the block of a lane; None: it is no block's."""
        number = lane - FIRST_BLOCK
        return self._names[number] if 0 <= number < len(self._names) else None

    def of_trainer(self, work: Work, trainer: int) -> AbstractContextManager[None]:
        """Record what the body does for one trainer."""
        return self._timed(work, trainer if 0 <= trainer < ROUNDS_LANE else ROUNDS_LANE - 1)

    def of_round(self, work: Work) -> AbstractContextManager[None]:
        """Record what the body does for all trainers at once."""
        return self._timed(work, ROUNDS_LANE)

    def of_block(self, work: Work, block: str) -> AbstractContextManager[None]:
        """Record what the body does with one block."""
        return self._timed(work, self._lanes[block])

    def _timed(self, work: Work, lane: int) -> AbstractContextManager[None]:
        return self._added(work, lane) if self._traffic.is_work_watched else _NOTHING

    @contextmanager
    def _added(self, work: Work, lane: int) -> Iterator[None]:
        begin_ns = self._clock()
        try:
            yield
        finally:
            self._traffic.add_work(work, lane, begin_ns, self._clock())
