"""Each invariant of the control plane: a history that keeps it, and one for each way to break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tools.chaos.export import numbers_of
from tools.chaos.history import (
    AttemptRecord,
    CheckpointSeen,
    Event,
    History,
    JobRecord,
    Limits,
    LogSeen,
    NodeRecord,
    Outage,
    PointsSeen,
    ProcessSeen,
    ReplicaRecord,
    SeriesSeen,
)
from tools.chaos.invariants import check
from tools.chaos.series import with_points
from tools.chaos.witness import processes

LIMITS = Limits(ttl_s=4.0, grace_s=10.0, stop_s=6.0, slack_s=5.0)


def moved(at: float, kind: str, subject: str, *states: str | None, reason: str = "") -> list[Event]:
    """Return events of a subject, a second apart, through `states`."""
    job_id = None if kind == "node" else "j"
    return [
        Event(at + i, kind, subject, job_id, before, str(after), reason)
        for i, (before, after) in enumerate(pairwise(states))
    ]


def replica(name: str, attempt: int = 1, index: int = 0, **fields: object) -> ReplicaRecord:
    base = ReplicaRecord(
        name, "j", attempt, attempt, "trainer", index, "n", "EXITED", (1, 0, 1 << 30), (20_000 + index,)
    )
    return replace(base, **fields)  # type: ignore[arg-type] # names of its fields


SOUND = History(
    events=(
        *moved(0, "node", "n", None, "JOINING", "READY"),
        *moved(5, "job", "j", None, "CREATED", "QUEUED"),
        *moved(10, "replica", "a", None, "ASSIGNED"),
        *moved(10, "replica", "b", None, "ASSIGNED"),
        *moved(10, "job", "j", "QUEUED", "STARTING"),
        *moved(11, "replica", "a", "ASSIGNED", "PREPARING", "RUNNING"),
        *moved(11, "replica", "b", "ASSIGNED", "PREPARING", "RUNNING"),
        *moved(14, "job", "j", "STARTING", "RUNNING"),
        *moved(20, "replica", "a", "RUNNING", "KILLED"),
        *moved(20, "job", "j", "RUNNING", "RECOVERING", reason="replica_failed"),
        *moved(21, "replica", "b", "RUNNING", "LOST"),
        *moved(30, "replica", "c", None, "ASSIGNED"),
        *moved(30, "replica", "d", None, "ASSIGNED"),
        *moved(30, "job", "j", "RECOVERING", "STARTING"),
        *moved(31, "replica", "c", "ASSIGNED", "RUNNING"),
        *moved(31, "replica", "d", "ASSIGNED", "RUNNING"),
        *moved(33, "job", "j", "STARTING", "RUNNING"),
        *moved(40, "replica", "c", "RUNNING", "EXITED"),
        *moved(40, "replica", "d", "RUNNING", "EXITED"),
        *moved(41, "job", "j", "RUNNING", "STOPPING", "SUCCEEDED", reason="completed"),
    ),
    jobs=(JobRecord("j", "SUCCEEDED", 2, 2, 1, 3, 2, "every trainer ended"),),
    replicas=(
        replica("a", state="KILLED"), replica("b", index=1, state="LOST"),
        replica("c", 2), replica("d", 2, index=1),
    ),
    nodes=(NodeRecord("n", "host", "READY", (2, 0, 2 << 30)),),
    attempts=(AttemptRecord("j", 1, 1), AttemptRecord("j", 2, 2)),
    audited=frozenset({"j", "n"}),
    processes=tuple(ProcessSeen(name, i, 12, 19, 3) for i, name in enumerate("abcd")),
    logs=tuple(LogSeen(name, (0, 1, 2), is_over=True) for name in "abcd"),
    checkpoints=(CheckpointSeen("j", "n", 15, 4), CheckpointSeen("j", "n", 33, 4, is_restored=True)),
    series=(SeriesSeen("j", 2, (1, 2, 4), (1, 2, 3, 4), lost=1),),
    limits=LIMITS,
    ended_at=60,
    is_final=True,
)  # fmt: skip


def without(*subjects: str, after: str) -> History:
    """Return the sound history without the events that brought subjects to a state."""
    return replace(SOUND, events=tuple(e for e in SOUND.events if not (e.subject in subjects and e.after == after)))


def plus(*events: Event) -> History:
    """Return the sound history with more events, in the order of time."""
    return replace(SOUND, events=tuple(sorted((*SOUND.events, *events), key=lambda event: event.at)))


def also(checkpoint: CheckpointSeen) -> History:
    return replace(SOUND, checkpoints=(*SOUND.checkpoints, checkpoint))


def with_job(**fields: object) -> History:
    return replace(SOUND, jobs=(replace(SOUND.jobs[0], **fields),))  # type: ignore[arg-type] # names of its fields


def recovered(**fields: str) -> History:
    """Return the sound history with another event of its recovery."""
    events = [replace(e, **fields) if e.after == "RECOVERING" else e for e in SOUND.events]  # type: ignore[arg-type]
    return replace(SOUND, events=tuple(events))


def of_class(name: str, budget: tuple[int, float | None]) -> History:
    """Return the sound history with its restart taken from the budget of user errors; the job has that of a class."""
    taken = recovered(detail="trainer 0 exited with code 1; restart 1 of 1 for user follows")
    return replace(taken, jobs=(replace(SOUND.jobs[0], max_restarts=0, budgets={name: budget}),))


def test_sound_history_breaks_nothing() -> None:
    assert check(SOUND) == []
    assert check(of_class("user", (1, None))) == []
    assert check(of_class("user", (1, 10.0))) == []


BREACHES: dict[str, tuple[str, Callable[[], History]]] = {
    "an attempt begins while another is live": ("I1", lambda: without("b", after="LOST")),
    "an epoch does not grow": (
        "I1", lambda: replace(SOUND, attempts=(AttemptRecord("j", 1, 2), AttemptRecord("j", 2, 2)))),
    "a job is behind its newest attempt": ("I1", lambda: with_job(attempt=1)),
    "a replica is started twice": (
        "I1", lambda: replace(SOUND, processes=(*SOUND.processes, ProcessSeen("c", 99, 34, 38, 3)))),
    "a node holds more than it has": (
        "I2", lambda: replace(SOUND, nodes=(replace(SOUND.nodes[0], amounts=(1, 0, 2 << 30)),))),
    "a port is given twice": (
        "I2", lambda: replace(SOUND, replicas=tuple(replace(r, ports=(20_000,)) for r in SOUND.replicas))),
    "half a gang is placed": ("I3", lambda: with_job(size=3)),
    "a gang is placed in two transactions": (
        "I3", lambda: replace(SOUND, events=tuple(
            replace(e, at=e.at + 0.5) if e.subject == "d" and e.before is None else e for e in SOUND.events))),
    "a terminal state is left": ("I4", lambda: plus(*moved(50, "job", "j", "SUCCEEDED", "RECOVERING"))),
    "a change that the tables lack": ("I4", lambda: plus(*moved(50, "node", "n", "READY", "JOINING", "READY"))),
    "a job waits and says nothing": ("I5", lambda: with_job(state="QUEUED", why="")),
    "a job starts for ever": ("I5", lambda: with_job(state="STARTING")),
    "a process outlives its loss": (
        "I6", lambda: replace(SOUND, processes=(ProcessSeen("b", 1, 12, 40, 3),))),
    "a process outlives its reported end": (
        "I6", lambda: replace(SOUND, processes=(ProcessSeen("a", 1, 12, 26, 3),))),
    "a process of nothing": ("I6", lambda: replace(SOUND, processes=(ProcessSeen("z", 1, 12, 13, 0),))),
    "a checkpoint is not complete": (
        "I7", lambda: replace(SOUND, checkpoints=(CheckpointSeen("j", "n", 15, 4, is_complete=False),))),
    "an old checkpoint is restored": (
        "I7", lambda: also(CheckpointSeen("j", "n", 34, 2, is_restored=True))),
    "checkpoints go back": (
        "I7", lambda: also(CheckpointSeen("j", "n", 34, 3))),
    "a line is lost": ("I8", lambda: replace(SOUND, logs=(LogSeen("a", (0, 1), is_over=True),))),
    "a line is doubled": ("I8", lambda: replace(SOUND, logs=(LogSeen("a", (0, 1, 1), is_over=True),))),
    "a line in the middle is lost": ("I8", lambda: replace(SOUND, logs=(LogSeen("a", (0, 2), is_over=False),))),
    "a point is lost and not counted": (
        "I8", lambda: replace(SOUND, series=(SeriesSeen("j", 2, (1, 2, 4), (1, 2, 3, 4), lost=0),))),
    "a point is doubled": ("I8", lambda: replace(SOUND, series=(SeriesSeen("j", 2, (1, 1), (1,), lost=0),))),
    "a point that nobody logged": (
        "I8", lambda: replace(SOUND, series=(SeriesSeen("j", 2, (1, 2), (1,), 0, "c"),))),
    "a row differs from its events": ("I9", lambda: with_job(state="FAILED")),
    "an event is missing": ("I9", lambda: without("c", after="ASSIGNED")),
    "a restart is not charged": ("I10", lambda: with_job(restarts=0)),
    "a preemption is charged": ("I10", lambda: recovered(reason="preempted")),
    "the budget is passed": ("I10", lambda: with_job(max_restarts=0)),
    "the budget of a window is passed": ("I10", lambda: with_job(max_restarts=0, window_s=10.0)),
    "the budget of a class is passed": ("I10", lambda: of_class("user", (0, None))),
    "a class without a budget is charged": ("I10", lambda: of_class("hang", (1, None))),
    "a preemption with a budget is not charged": (
        "I10", lambda: replace(
            recovered(reason="preempted"),
            jobs=(replace(SOUND.jobs[0], restarts=0, budgets={"preempted": (9, None)}),))),
    "a submission is not audited": ("I11", lambda: replace(SOUND, audited=frozenset({"n"}))),
    "a join is not audited": ("I11", lambda: replace(SOUND, audited=frozenset({"j"}))),
    "a node is unreachable for ever": ("I12", lambda: plus(*moved(25, "node", "n", "READY", "UNREACHABLE"))),
    "a job stops for ever": (
        "I12", lambda: replace(without("j", after="SUCCEEDED"), ended_at=100)),
    "a silent node is not noticed": ("I12", lambda: replace(SOUND, outages=(Outage("n", 20, 50),))),
}  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES)
def test_breach_is_found(breach: str) -> None:
    invariant, history = BREACHES[breach]
    found = {violation.invariant for violation in check(history())}
    assert invariant in found, breach


def test_every_invariant_has_a_breach() -> None:
    assert {invariant for invariant, _ in BREACHES.values()} == {f"I{number}" for number in range(1, 13)}


@pytest.mark.parametrize("whose", ["n", None])
def test_process_on_a_node_that_cannot_be_reached_may_live(whose: str | None) -> None:
    alive = replace(SOUND, processes=(ProcessSeen("b", 1, 12, 40, 3),), outages=(Outage(whose, 22, 39),))
    assert not [violation for violation in check(alive) if violation.invariant == "I6"]


def test_time_without_a_server_is_no_wait() -> None:
    node = moved(25, "node", "n", "READY", "UNREACHABLE")
    late = replace(plus(*node), outages=(Outage(None, 26, 58),))
    assert not [violation for violation in check(late) if violation.invariant == "I12"]


def test_free_attempt_is_not_charged() -> None:
    """Nothing of the first attempt had started when its node was lost."""
    kept = [e for e in recovered(reason="node_lost").events if not (e.subject in "ab" and e.after == "RUNNING")]
    free = replace(SOUND, events=tuple(kept), jobs=(replace(SOUND.jobs[0], restarts=0),))
    assert not [violation for violation in check(free) if violation.invariant == "I10"]


LOGGED = tuple((12.0 + step, step) for step in range(8))


def of_series(*, stored: tuple[int, ...], seen: PointsSeen, outages: tuple[Outage, ...] = ()) -> list[str]:
    """Return the breaches of I8 by replica a, whose process has logged a point a second."""
    held = replace(SOUND, series=(SeriesSeen("j", 1, stored, (), 0, "a"),), outages=outages)
    return [one.what for one in check(with_points(held, [seen])) if one.invariant == "I8"]


def test_newest_points_of_a_killed_process_may_be_missing() -> None:
    killed = PointsSeen("a", LOGGED, 19.5, is_closed=False)
    assert of_series(stored=tuple(range(7)), seen=killed) == []
    assert of_series(stored=tuple(range(5)), seen=killed), "it had two seconds to send point 5"
    assert of_series(stored=(0, 1, 2, 3, 4, 6), seen=killed), "what came after point 5 was sent"


def test_points_logged_in_an_outage_may_be_missing() -> None:
    killed = PointsSeen("a", LOGGED, 19.5, is_closed=False)
    assert of_series(stored=tuple(range(4)), seen=killed, outages=(Outage("n", 15, 19),)) == []
    assert of_series(stored=tuple(range(4)), seen=killed, outages=(Outage("other", 15, 19),))


def test_process_that_closed_has_sent_all_its_points() -> None:
    closed = PointsSeen("a", LOGGED, 19.5, is_closed=True)
    assert of_series(stored=tuple(range(8)), seen=closed) == []
    assert of_series(stored=tuple(range(7)), seen=closed, outages=(Outage(None, 12, 20),))


def test_series_that_the_server_does_not_hold_is_missed() -> None:
    closed = PointsSeen("a", LOGGED, 19.5, is_closed=True)
    none = with_points(replace(SOUND, series=()), [closed])
    assert [one.invariant for one in check(none)] == ["I8"]


def test_lines_of_a_log_are_numbers() -> None:
    assert numbers_of(b"penstock: hidden\n0\n1\nTraceback\n2\n3") == (0, 1, -1, 2)


def test_witness_files_are_processes(tmp_path: Path) -> None:
    (tmp_path / "r-1.17").write_text("10.0 began 0\n10.5 wrote 1\n11.0 wrote 2\n11.5 alive 0\n11.7 wro")
    (tmp_path / "j.crashed").touch()
    assert processes(tmp_path) == [ProcessSeen("r-1", 17, 10.0, 11.5, 2)]
