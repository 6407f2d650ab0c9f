"""When a pilot drains, stops and leaves: an agent that another scheduler runs for a while. Pure; the agent obeys.

1. A pilot that takes one job leaves once that job is over: recovering, it may come back here.
2. `drain_s` before its time is over it drains: the server places nothing more here. It leaves when it is idle.
3. `stop_s` before its time is over, or when it is asked to, it ends what still runs here: jobs that save at a step
   boundary are asked to first. The server calls that preempted, and places the job again without one of its restarts.

Nothing is placed on a pilot after the server has answered that it drains; until then only the end of its time makes it
leave. Times are seconds of CLOCK_BOOTTIME, as in `lease`.
"""

from __future__ import annotations

from dataclasses import dataclass

DRAIN_S, STOP_S = 60.0, 20.0
SAVE_SHARE = 0.6  # of the time to stop: jobs that save at a step boundary have so much of it, and then a SIGTERM
_SHARE = 4  # of a short time, drain and stop take at most this part each


@dataclass(frozen=True, slots=True)
class Terms:
    """What a pilot was started for. `ends_at`: when its time is over, None if it has no limit."""

    once: bool = False
    ends_at: float | None = None
    drain_s: float = DRAIN_S
    stop_s: float = STOP_S

    def seconds_left(self, now: float) -> float | None:
        """Return the time that is left to jobs, None without a limit."""
        return None if self.ends_at is None else max(0.0, self.ends_at - self.stop_s - now)


def terms(*, once: bool, ttl_s: float | None, drain_s: float | None, now: float) -> Terms | None:
    """Return the terms of a pilot that starts now, None for an agent that is none."""
    if not once and ttl_s is None:
        return None
    if ttl_s is None:
        return Terms(once=once)
    stop_s = min(STOP_S, ttl_s / _SHARE)
    margin_s = min(DRAIN_S, ttl_s / _SHARE) if drain_s is None else min(drain_s, ttl_s)
    return Terms(once, now + ttl_s, max(margin_s, stop_s), stop_s)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the agent knows. `busy`: a replica here has not ended, or the server does not know its end yet.

    `served`: a job has been here; `has_job`: one that has been here goes on. `confirmed`: the server has answered that
    the pilot drains.
    """

    now: float
    busy: bool
    served: bool
    has_job: bool
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """Go on."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Let the server place nothing more here."""

    why: str


@dataclass(frozen=True, slots=True)
class Leave:
    """End. What runs here is preempted."""

    why: str


Decision = Serve | Drain | Leave
JOB_OVER, TIME_OVER = "the one job of this pilot is over", "the time of this pilot is over"


def decide(pilot: Terms, facts: Facts) -> Decision:
    """Return what a pilot does now."""
    if pilot.ends_at is not None and facts.now >= pilot.ends_at - pilot.stop_s:
        return Leave(TIME_OVER)
    if pilot.ends_at is not None and facts.now >= pilot.ends_at - pilot.drain_s:
        return _drain(facts, TIME_OVER)
    if pilot.once and facts.served and not facts.has_job:
        return _drain(facts, JOB_OVER)
    return Serve()


def _drain(facts: Facts, why: str) -> Decision:
    return Leave(why) if facts.confirmed and not facts.busy else Drain(why)
