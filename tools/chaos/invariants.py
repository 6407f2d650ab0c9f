"""The invariants I1 to I12 of the control plane, as one check over the history of a run. Pure.

`check` returns every breach; without any the list is empty. What each means: docs/faults.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tools.chaos import log_invariants as of_log
from tools.chaos import run_invariants as of_run
from tools.chaos.history import History, Violation

INVARIANTS: tuple[Callable[[History], Iterator[Violation]], ...] = (
    of_log.one_attempt_at_a_time,
    of_run.replicas_start_once,
    of_log.nothing_is_booked_twice,
    of_log.gangs_are_whole,
    of_log.changes_are_allowed,
    of_log.waiting_jobs_say_why,
    of_run.nothing_outlives_its_replica,
    of_run.checkpoints_are_whole,
    of_run.streams_are_whole,
    of_log.states_are_folds,
    of_log.restarts_are_charged_rightly,
    of_log.requests_are_audited,
    of_run.nothing_waits_for_ever,
)


def check(history: History) -> list[Violation]:
    """Return what breaks an invariant, in the order of the invariants."""
    return [violation for invariant in INVARIANTS for violation in invariant(history)]
