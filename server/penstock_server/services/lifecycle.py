"""What becomes of a job, given its replicas. Pure: facts in, the next step out; the shell applies it.

`decide` looks at the replicas of the current attempt only, in a fixed order of precedence: a replica that
failed, then a lost one, then "all trainers are done", then "all are up". Of several failures the one that
ended first is the cause; the others are usually its consequences.

In a job with parameter servers a process is worth more than in others: a pserver keeps its state on disk, a trainer
joins at the next round. So one that failed is started again alone, in its place, as long as the budget of restarts
lasts and its node is there; only a lost node makes a new attempt of the whole.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from penstock.protocol.states import (
    NOT_SAVED,
    OUT_OF_MEMORY,
    PREEMPTED,
    SAVED_AT,
    TERMINAL_JOB,
    TERMINAL_REPLICA,
    JobState,
    ReplicaState,
    StopReason,
    terminal_of,
)
from penstock_server.services.budget import Budget

NOT_EXECUTED = frozenset({126, 127})
"""Exit codes with which an agent reports that the entrypoint could not be started: may not be, is not there."""

NOT_PREPARED = 125
"""Exit code with which an agent reports that its node failed before that: no space, no snapshot, the port is taken."""

STOPPED = "stopped"
NEVER_STARTED = "it was never started"
NOT_WANTED = frozenset({STOPPED, NEVER_STARTED})
"""What stands in the detail of a process that ended because its job wanted it no more."""

CLOSED = "closed its telemetry"
FAILED = "failed: "
"""What stands in the detail of an attached process that said goodbye. Its exit code is unknown: it still ran."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of one process of the current attempt."""

    id: str
    role: str
    index: int
    state: ReplicaState
    place: str
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    started: bool = False
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of a job. `replicas`: those of the current attempt, of a role and index the newest.

    `restarts`: those that count against `max_restarts` now; `window_s`: for how long each does, None: always.
    `own`: budgets of classes that do not share that one. `has_started`: whether any process of the attempt has, also
    one in whose place there is another.
    """

    state: JobState
    attached: bool
    reason: str
    detail: str
    restarts: int
    max_restarts: int
    restart_on: frozenset[str]
    replicas: tuple[ReplicaFacts, ...]
    has_pservers: bool = False
    has_started: bool = False
    window_s: float | None = None
    own: Mapping[str, Budget] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """Go to `to`, for `reason`. `why`: one sentence for a person. `culprit`: replica whose log explains it.

    `is_restart`: it takes one of the job's restarts, for `retry_class`.
    """

    to: JobState
    reason: str
    why: str
    culprit: str | None = None
    is_restart: bool = False
    retry_class: str = ""


@dataclass(frozen=True, slots=True)
class Replace:
    """Start another process in the place of one that ended; it counts as a restart for `retry_class`."""

    replica: ReplicaFacts
    why: str
    retry_class: str


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: StopReason
    retry_class: str
    replica: ReplicaFacts


def decide(job: JobFacts) -> Step | Replace | None:
    """Return the next change of the job, or None while there is nothing to do."""
    if job.state in TERMINAL_JOB or job.state in (JobState.CREATED, JobState.QUEUED):
        return None
    if job.state is JobState.RECOVERING:
        return _after_all(job)
    if job.state is JobState.STOPPING:
        return _finish(job)
    if job.attached:
        return _decide_attached(job)
    failure = _first_failure(job.replicas)
    if failure is not None:
        return _fail(job, failure)
    if job.state is JobState.STARTING and all(_is_up(r) for r in job.replicas):
        return Step(JobState.RUNNING, "", _running(job.replicas))
    return _completed(job)


def hung(job: JobFacts, why: str) -> Step:
    """Return what follows for a job whose attempt hangs and is not to be waited for."""
    return _followed(job, StopReason.HANG, "hang", why)


def preempted(job: JobFacts, why: str, culprit: str | None = None) -> Step:
    """Return what follows for a job whose attempt has to make room: another, which takes no restart without a budget.

    `culprit`: as of a step.
    """
    if "preempted" not in job.own:
        return Step(JobState.RECOVERING, StopReason.PREEMPTED, f"{why}; it is placed again")
    if not job.has_started:
        return Step(JobState.RECOVERING, StopReason.PREEMPTED, f"{why}; nothing had started, so it is placed again")
    return _followed(job, StopReason.PREEMPTED, "preempted", why, culprit)


def may_linger(job_state: JobState, reason: str, role: str) -> bool:
    """Whether a replica may run on for a while though its job stops: a pserver ends by itself after its trainers."""
    return job_state is JobState.STOPPING and reason == StopReason.COMPLETED and role == "pserver"


def sentence(replica: ReplicaFacts) -> str:
    """Describe how a replica ended."""
    process = f"{replica.role} {replica.index} on {replica.place}"
    if replica.state is ReplicaState.LOST:
        return f"{process} was lost: {replica.detail or 'it was not reported'}"
    if replica.exit_code is None and replica.detail.startswith(FAILED):
        return f"{process} {replica.detail}"
    if _could_not_start(replica):
        return f"{process} could not start: {replica.detail}"
    if replica.detail.startswith(OUT_OF_MEMORY):
        return f"{process} ran {replica.detail}"
    if replica.signal is not None:
        how = f"was ended by signal {replica.signal} ({_signal_name(replica.signal)})"
    elif replica.state is ReplicaState.KILLED:
        how = "was ended by its agent"
    else:
        how = f"exited with code {replica.exit_code}"
    return f"{process} {how}" + (f": {replica.detail}" if replica.detail else "")


def watching(replicas: tuple[ReplicaFacts, ...], grace_s: float) -> str:
    """Describe what a running job does, its unreachable replicas first, then those that take the place of others."""
    unreachable = [r for r in replicas if r.state is ReplicaState.UNKNOWN]
    if not unreachable:
        again = [f"{r.role} {r.index}" for r in replicas if r.state in (ReplicaState.ASSIGNED, ReplicaState.PREPARING)]
        shown = ", ".join(again[:4]) + (" …" if len(again) > 4 else "")
        return _running(replicas) + (f"; {shown} {'is' if len(again) == 1 else 'are'} started again" if again else "")
    shown = ", ".join(f"{r.role} {r.index}" for r in unreachable[:4]) + (" …" if len(unreachable) > 4 else "")
    return f"{unreachable[0].place} is unreachable; {shown} may still run there and count as lost after {grace_s:g} s"


def _running(replicas: tuple[ReplicaFacts, ...]) -> str:
    places = sorted({r.place for r in replicas})
    where = places[0] if len(places) == 1 else f"{len(places)} nodes"
    parts = []
    for role in ("trainer", "pserver"):
        count = sum(r.role == role and r.state not in TERMINAL_REPLICA for r in replicas)
        if count:
            parts.append(f"{count} {role}{'s' if count > 1 else ''}")
    return f"runs {' and '.join(parts) or 'nothing more'} on {where}"


def _after_all(job: JobFacts) -> Step | None:
    """End a job whose preempted attempt came to its end before its notice was over: nothing is left to repeat."""
    return _completed(job) if job.reason == StopReason.PREEMPTED and job.replicas and not job.attached else None


def _completed(job: JobFacts) -> Step | None:
    if all(is_done(r) for r in job.replicas if r.role == "trainer"):
        return Step(JobState.STOPPING, StopReason.COMPLETED, "every trainer ended with exit code 0")
    return None


def _decide_attached(job: JobFacts) -> Step | None:
    if not job.replicas or any(r.state not in TERMINAL_REPLICA for r in job.replicas):
        return None
    # Of a process that was started again only the newest counts; replicas come oldest first.
    newest = {(r.role, r.index): r for r in job.replicas}.values()
    failed = next((r for r in newest if r.state is ReplicaState.EXITED and r.detail.startswith(FAILED)), None)
    if failed is not None:
        return Step(JobState.STOPPING, StopReason.REPLICA_FAILED, sentence(failed))
    lost = next((r for r in newest if r.state is ReplicaState.LOST), None)
    if lost is not None:
        return Step(JobState.STOPPING, StopReason.NODE_LOST, sentence(lost))
    return Step(JobState.STOPPING, StopReason.DETACHED, "every attached process closed its telemetry on purpose")


def _finish(job: JobFacts) -> Step | None:
    if any(r.state not in TERMINAL_REPLICA for r in job.replicas):
        return None
    reason = StopReason(job.reason)
    if reason is StopReason.COMPLETED:
        return _complete(job)
    failed = reason is StopReason.REPLICA_FAILED and not job.attached  # the server has no log of an attached process
    failure = _first_failure(job.replicas) if failed else None
    return Step(terminal_of(reason), reason, job.detail, failure.replica.id if failure is not None else None)


def _complete(job: JobFacts) -> Step:
    """End a job whose trainers are done, by how its pservers ended.

    One that crashed fails the job: what its script does after serving (such as a save of its own) may be missing. One
    that was killed or lost is only reported: what trainers had saved was acknowledged to them before they ended.
    """
    failures = [_failure(r) for r in job.replicas if r.role == "pserver" and r.detail not in NOT_WANTED]
    crash = _earliest([f for f in failures if f is not None and _is_crash(f)])
    if crash is not None:
        why = f"{job.detail}, but then {sentence(crash.replica)}"
        return Step(JobState.FAILED, StopReason.REPLICA_FAILED, why, crash.replica.id)
    other = _earliest([f for f in failures if f is not None])
    why = job.detail if other is None else f"{job.detail}; after that {sentence(other.replica)}"
    return Step(JobState.SUCCEEDED, StopReason.COMPLETED, why)


def _is_crash(failure: _Failure) -> bool:
    """Whether a process that ran ended badly by itself."""
    ended_itself = failure.reason is StopReason.REPLICA_FAILED and failure.retry_class == "user"
    return ended_itself and not _was_killed(failure.replica)


def _fail(job: JobFacts, failure: _Failure) -> Step | Replace:
    why = sentence(failure.replica)
    in_place = _budget_in_place(job, failure)
    if in_place is not None:
        retry_class, budget = in_place
        return Replace(failure.replica, f"{why}; it is started again: {budget.next()}", retry_class)
    if failure.reason is StopReason.PREEMPTED:
        return preempted(job, why, failure.replica.id)
    if failure.reason is StopReason.NODE_LOST and not job.has_started:
        return Step(JobState.RECOVERING, failure.reason, f"{why}; nothing had started, so it is placed again")
    culprit = None if failure.reason is StopReason.START_FAILED else failure.replica.id
    return _followed(job, failure.reason, failure.retry_class, why, culprit)


def _followed(job: JobFacts, reason: StopReason, retry_class: str, why: str, culprit: str | None = None) -> Step:
    """Return another attempt, if the budget of this class of failures has one left, else the job's stop."""
    follows = _budget(job, retry_class)
    if follows is None or not follows.left:
        return Step(JobState.STOPPING, reason, why, culprit)
    why = f"{why}; {follows.next()} follows"
    return Step(JobState.RECOVERING, reason, why, culprit, is_restart=True, retry_class=retry_class)


def _budget(job: JobFacts, retry_class: str) -> Budget | None:
    """Return what a restart of a class is taken from; None if failures of that class are followed by none."""
    if retry_class in job.own:
        return job.own[retry_class]
    return Budget(job.restarts, job.max_restarts, job.window_s) if retry_class in job.restart_on else None


def _budget_in_place(job: JobFacts, failure: _Failure) -> tuple[str, Budget] | None:
    """Return for which class, and from what, a restart of a process alone is taken; None if there is none.

    One that was killed from outside is the machine's failure first, and may be the script's.
    """
    if not job.has_pservers or failure.reason is not StopReason.REPLICA_FAILED:
        return None
    classes = [*(["infra"] if _was_killed(failure.replica) else []), failure.retry_class]
    budgets = ((retry_class, _budget(job, retry_class)) for retry_class in classes)
    return next(((name, one) for name, one in budgets if one is not None and one.left), None)


def _was_killed(replica: ReplicaFacts) -> bool:
    """Whether something outside ended it: the kernel's memory killer, or a person. A crash has another signal.

    A process that ends itself in good order on SIGTERM has the exit code that a shell would give.
    """
    if replica.detail.startswith(OUT_OF_MEMORY):
        return False  # it would again
    by_signal = (signals.SIGKILL, signals.SIGTERM)
    return replica.signal in by_signal or replica.exit_code in [128 + number for number in by_signal]


def _first_failure(replicas: tuple[ReplicaFacts, ...]) -> _Failure | None:
    return _earliest([found for r in replicas if (found := _failure(r)) is not None])


def _earliest(failures: Sequence[_Failure]) -> _Failure | None:
    def order(failure: _Failure) -> tuple[bool, float, int]:
        at = failure.replica.ended_at
        return failure.reason is StopReason.NODE_LOST, at.timestamp() if at else 0.0, failure.replica.index

    return min(failures, key=order, default=None)


def _failure(replica: ReplicaFacts) -> _Failure | None:
    match replica.state:
        case ReplicaState.LOST:
            return _Failure(StopReason.NODE_LOST, "infra", replica)
        case ReplicaState.KILLED if _left_with_its_node(replica.detail):
            return _Failure(StopReason.PREEMPTED, "preempted", replica)
        case ReplicaState.KILLED:  # not requested: this is looked at before the job stops
            return _Failure(StopReason.REPLICA_FAILED, "infra", replica)
        case ReplicaState.EXITED if _could_not_start(replica):
            # What the node lacks may be there elsewhere, or on another port: that takes a new attempt.
            retry_class = "infra" if replica.exit_code == NOT_PREPARED else "user"
            return _Failure(StopReason.START_FAILED, retry_class, replica)
        case ReplicaState.EXITED if replica.exit_code != 0 or replica.signal is not None:
            return _Failure(StopReason.REPLICA_FAILED, "user", replica)
        case _:
            return None


def _left_with_its_node(detail: str) -> bool:
    """Whether an agent has ended a process since its node leaves.

    What ends after a notice is none of these: only this server gives notices, and only to attempts that are preempted
    already. In another attempt such an end is like any other that was not asked for.
    """
    return detail.startswith(PREEMPTED) and not detail.startswith(SAVED_AT) and not detail.endswith(NOT_SAVED)


def _could_not_start(replica: ReplicaFacts) -> bool:
    refused = replica.exit_code == NOT_PREPARED or replica.exit_code in NOT_EXECUTED
    return refused and bool(replica.detail) and not replica.started


def _is_up(replica: ReplicaFacts) -> bool:
    return replica.state in (ReplicaState.RUNNING, ReplicaState.EXITED) or (
        replica.state is ReplicaState.UNKNOWN and replica.started
    )


def is_done(replica: ReplicaFacts) -> bool:
    """Whether a process ended by itself and well."""
    return replica.state is ReplicaState.EXITED and replica.exit_code == 0 and replica.signal is None


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return "unknown"
