"""How soon pilots are launched again after gangs none of whose pilots joined. Pure; the caller has the clock.

A scheduler starts a pilot a few times itself. One whose agent cannot start (a wrong interpreter, a full disk, a server
that its node does not reach) ends all the same, and the job that it was for waits on: without a pause it would be
launched, and fail, every few seconds for as long as that job waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.backoff import Backoff

FIRST_S, LONGEST_S = 20.0, 900.0


@dataclass(slots=True)
class Pace:
    """`why`: how the last pilot ended that had not joined, '' if launches need not wait."""

    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_S, LONGEST_S))
    why: str = ""
    pause_s: float = 0.0
    _launch_at: float = 0.0

    def failed(self, detail: str, now: float) -> None:
        """Note that a gang has ended, and none of its pilots had joined."""
        self.pause_s = self.backoff.wait_s()
        self.why, self._launch_at = detail or "no reason given", now + self.pause_s

    def joined(self) -> None:
        """Note that a pilot has joined: the next launch need not wait."""
        self.backoff.reset()
        self.why, self._launch_at = "", 0.0

    def must_wait(self, now: float) -> bool:
        """Whether nothing is to be launched yet."""
        return now < self._launch_at

    def sentence(self) -> str:
        """Describe the pause."""
        return (
            f"pilots ended before they joined ({self.why}); the next are launched after a pause of {self.pause_s:.0f} s"
        )
