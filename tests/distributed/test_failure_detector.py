"""Rendezvous and failure detection of ranks in one process; a rank that dies is a process of its own."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.capabilities import absent
from tests.support.endpoints import free_endpoints

from penstock.distributed.failure_detector import _HEARTBEAT_S, FailureDetector
from penstock.distributed.ranks import Ranks, ranks_of
from penstock.distributed.rendezvous import Presence, Rendezvous, this_host
from penstock.errors import PeerError, Unavailable
from penstock.settings import COLLECTIVE_LEASE_S, COLLECTIVE_START_S

BOUND_S = 60.0


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Call all in threads; return the results, or what was raised."""
    found: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    return found


def ranks(count: int) -> list[Ranks]:
    endpoints = tuple(free_endpoints(count))
    return [ranks_of(rank, endpoints) for rank in range(count)]


def met(count: int) -> list[Rendezvous]:
    return at_once([partial(Rendezvous, mine) for mine in ranks(count)])


@pytest.fixture(params=["with a pidfd", "without"])
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    with absent("pidfd") if request.param == "without" else nullcontext():
        yield process
    process.kill()
    process.wait()


class Seen:
    """A watch, and what it has found."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting = meeting  # it has the store
        self.found: queue.Queue[tuple[int, str]] = queue.Queue()
        self.left: queue.Queue[int] = queue.Queue()
        self.watch = FailureDetector(meeting, lambda rank, why: self.found.put((rank, why)), self.left.put)
        _made.append(self.watch)


_made: list[FailureDetector] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """End the threads of all watches: one that came back from the store while Python ends would abort it."""
    yield
    for watch in _made:
        watch.linger()
    _made.clear()


def test_a_rank_that_says_nothing_is_named_by_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLLECTIVE_LEASE_S.name, "4")
    first, second, _silent = (Seen(meeting) for meeting in met(3))
    for seen in (first, second):
        seen.watch.start()
    for seen in (first, second):
        rank, why = seen.found.get(timeout=BOUND_S)
        assert rank == 2
        assert "no heartbeat from" in why
        assert "rank 2 (127.0.0.1:" in why


class Pretended:
    """A clock that goes on when somebody waits. Nothing that is waited for ever happens."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, timeout: float) -> bool:
        self.now_s += timeout
        return False

    join = wait

    def is_alive(self) -> bool:
        return True

    def set(self) -> None:
        pass


@pytest.mark.parametrize("victim", [0, 1])
def test_by_default_all_ranks_end_within_10_s_of_a_dead_one(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    """The waits of a detector added up, for the worst phase of its threads. Rank 0 hangs with the store."""
    monkeypatch.delenv(COLLECTIVE_LEASE_S.name, raising=False)
    meetings = met(2)  # the first one has the store
    clock = Pretended()
    threads = SimpleNamespace(Event=lambda: clock, Thread=lambda **_: clock, Condition=threading.Condition)
    monkeypatch.setattr("penstock.distributed.failure_detector.threading", threads)
    watch: Any = FailureDetector(meetings[1 - victim], lambda rank, why: None, lambda rank: None)

    def passes(wait_s: float) -> list[int]:
        clock.wait(wait_s)
        if victim == 1:  # news are fetched once a beat, and looked at just before the next ones
            watch._news = ({1: '["works", "", 1, 1]'}, clock.now_s - _HEARTBEAT_S, "")
        return []

    watch._ended_within = passes
    watch._news = ({}, clock.now_s, "")
    monkeypatch.setattr("penstock.distributed.failure_detector.time", SimpleNamespace(monotonic=clock.monotonic))
    found = None
    while found is None:
        assert clock.now_s < BOUND_S
        found = watch._pass_time()
    assert found[0] == victim
    watch.linger()
    watch.close()
    # As docs/collective.md says; what is left of ten seconds is for the processes' ends.
    assert clock.now_s == pytest.approx(8.0 if victim == 1 else 7.7)


def test_a_lost_rank_is_named_by_ranks_that_could_not_observe_it(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv(COLLECTIVE_LEASE_S.name, str(10 * BOUND_S))
    meetings = met(3)
    for rank, meeting in enumerate(meetings):
        here = [this_host(), "far away", this_host()] if rank == 0 else ["far away", this_host(), "far away"]
        meeting.present = [replace(p, host=h) for p, h in zip(meeting.present, here, strict=True)]
        meeting.present[2] = replace(meeting.present[2], pid=child.pid)
    near, far = Seen(meetings[0]), Seen(meetings[1])
    meetings[2].store.set("state/2", '["works", "", 2, 1]')
    near.watch.start()
    far.watch.start()
    child.kill()
    for seen in (near, far):
        rank, why = seen.found.get(timeout=BOUND_S)
        assert rank == 2
        assert "rank 2 (127.0.0.1:" in why
        assert "has ended in the middle of the job" in why
    near.watch.fail("something that came of it")  # of no more interest, and no error
    assert near.watch._state[0] == "lost"


def test_a_failed_exchange_waits_for_leases_of_remote_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLLECTIVE_LEASE_S.name, "5")
    near, far = met(2), met(2)
    far[0].present[1] = replace(far[0].present[1], host="far away")
    assert Seen(near[0]).watch.finds_out_s < 5
    assert 5 + 2 * _HEARTBEAT_S < Seen(far[0]).watch.finds_out_s < 9  # the others end within ten seconds


def test_a_rank_that_reports_an_error_and_ends_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv(COLLECTIVE_LEASE_S.name, str(10 * BOUND_S))
    first, second = met(2)
    first.present[1] = replace(first.present[1], pid=child.pid)
    seen = Seen(first)
    second.store.set("state/1", '["works", "", 1, 1]')
    seen.watch.start()
    while 1 not in seen.watch._received:  # it has heard that all is well
        threading.Event().wait(0.01)
    second.store.set("state/1", '["failed", "no more rows", 1, 2]')
    child.kill()
    assert seen.found.get(timeout=BOUND_S)[1].endswith("has failed: no more rows")


def test_a_rank_that_has_ended_before_the_watch_begins_is_named(child: subprocess.Popen[bytes]) -> None:
    first, _ = met(2)
    first.present[1] = replace(first.present[1], pid=child.pid)
    child.kill()
    child.wait()
    with pytest.raises(Unavailable, match=r"rank 1 .* has ended before all were ready"):
        Seen(first)


def test_a_rank_that_ends_while_others_wait_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv(COLLECTIVE_START_S.name, str(10 * BOUND_S))
    first, second = met(2)
    first.present[1] = replace(first.present[1], pid=child.pid)
    second.present[0] = replace(second.present[0], pid=child.pid)
    child.kill()  # and not reaped, as by a launcher
    for error in at_once([lambda: first.wait_for("open", "is late"), lambda: second.wait_for_key("memory")]):
        assert isinstance(error, Unavailable)
        assert "has ended before all were ready" in str(error)


def test_ranks_that_are_set_up_differently_are_told_so() -> None:
    both = ranks(2)
    first, second = at_once(
        [lambda: Rendezvous(both[0], "transport=auto"), lambda: Rendezvous(both[1], "transport=gloo")]
    )
    assert isinstance(first, PeerError)
    assert isinstance(second, PeerError)
    assert "rank 1" in str(first)
    assert "would exchange by transport=gloo" in str(first)


@pytest.mark.parametrize(
    ("cores", "hosts", "quota", "each"),
    [
        ([(0, 1, 2, 3)] * 3, "aaa", None, 1),
        ([(0, 1, 2, 3)] * 2, "aa", None, 2),
        ([(0, 1), (2, 3)], "aa", None, 2),  # each has its own
        ([(0, 1)] * 2, "ab", None, 2),
        ([(0,)] * 4, "aaaa", None, 1),
        ([(0, 1, 2, 3)] * 2, "aa", 2.0, 1),
        ([(0, 1), (2, 3)], "aa", 2.0, 1),  # each has its own, but not at a time
        ([(0, 1, 2, 3)], "a", 1.5, 2),
        ([(0, 1), (2, 3)], "aa", 64.0, 2),
        ([(0, 1)] * 2, "aa", 0.5, 1),
    ],
)
def test_ranks_of_a_host_share_the_cores_that_they_may_run_on(
    cores: list[tuple[int, ...]], hosts: str, quota: float | None, each: int
) -> None:
    (meeting,) = met(1)
    meeting.present = [Presence(host, 1, "", "", own, quota) for own, host in zip(cores, hosts, strict=True)]
    assert meeting.cores_each() == each


def test_ranks_that_leave_are_not_missed() -> None:
    first, second = (Seen(meeting) for meeting in met(2))
    first.watch.start()
    second.watch.start()
    leaving = threading.Thread(target=second.watch.leave)
    leaving.start()
    assert first.left.get(timeout=BOUND_S) == 1
    first.watch.leave()
    leaving.join(BOUND_S)
    assert not leaving.is_alive()
    assert first.found.empty()
    assert second.found.empty()
