"""When a checkpoint is due: every so many steps, and when so many seconds have passed since the last one."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.errors import SpecError


class Schedule:
    """`every_steps`, `every_s`: None for never. The time begins when it is made."""

    def __init__(
        self, every_steps: int | None, every_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if every_steps is not None and (isinstance(every_steps, bool) or every_steps != int(every_steps)):
            raise SpecError(f"every_steps is {every_steps!r}; expected a whole number", got=every_steps)
        for name, value in (("every_steps", every_steps), ("every_s", every_s)):
            if value is not None and not value > 0:
                raise SpecError(f"{name} is {value!r}; expected a number above 0, or None for never", got=value)
        self.every_steps, self.every_s = every_steps, every_s
        self._clock = clock
        self._last = clock()

    def by_steps(self, steps: int) -> bool:
        """Whether one is due after so many steps."""
        return self.every_steps is not None and steps > 0 and steps % self.every_steps == 0

    def by_time(self) -> bool:
        """Whether enough time has passed."""
        return self.every_s is not None and self._clock() - self._last >= self.every_s

    def saved(self) -> None:
        """One has just been begun."""
        self._last = self._clock()
