"""Failure detection between ranks: each sends heartbeats through the store, and a thread notices those that stop.

A rank of this host that ends is noticed at once (its process descriptor); another one, or one that hangs, when its
last heartbeat is older than PENSTOCK_COLLECTIVE_LEASE_S (default 5). The first finding is the last: it is given to
`lost` once, and published, so that all ranks name the same one; and the thread ends. Owners: the thread
`penstock-heartbeats` reads and writes the store, `penstock-ranks` decides; the rest is for other threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but torch does not list it

from penstock.distributed.rendezvous import Rendezvous, this_host
from penstock.errors import Unavailable
from penstock.process.end import open_process_end
from penstock.settings import COLLECTIVE_LEASE_S

_HEARTBEAT_S = 0.5
_STORE_S = 2.0  # torch gives most answers of a store up after this, but not all
_STORE_ENDS_S = 0.2
_SEEN_S = 3.0
_LEAVE_S = 5.0  # so long the rank that serves the store waits for the others to leave

State = Literal["works", "leaves", "failed", "lost"]
"""`lost`: another rank is unreachable, or has failed; the text that goes with it names it."""


class FailureDetector:
    """Sends this rank's heartbeats and receives the others'. `lost(rank, text)` is called once, `left(rank)` for each
    that ends well; on a thread of its own. Raises Unavailable if a rank of this host has ended already."""

    def __init__(self, meeting: Rendezvous, lost: Callable[[int, str], None], left: Callable[[int], None]) -> None:
        self._ranks, self._lost, self._left = meeting.ranks, lost, left
        self._lease_s = COLLECTIVE_LEASE_S.read()
        base = meeting.base.clone()  # type: ignore[attr-defined]  # torch has not typed it
        base.set_timeout(timedelta(seconds=_STORE_S))
        self._store = PrefixStore(f"penstock/{meeting.ranks.attempt}", base)
        self._state: tuple[State, str, int] = ("works", "", self._ranks.rank)  # rank: the one the text names
        self._num_heartbeats = 0
        self._received: dict[int, tuple[str, float]] = {}
        self._gone: set[int] = set()
        self._ended, self._published = threading.Event(), threading.Event()
        self._serves = self._ranks.rank == 0 and not self._ranks.is_served
        self._poll = select.poll()
        self._processes: dict[int, int] = {}  # descriptor -> rank
        self._wake_in, self._wake_out = os.pipe()
        self._poll.register(self._wake_in, select.POLLIN)
        self._follow(meeting)
        self._news: tuple[dict[int, str], float, str] = ({}, time.monotonic(), "")  # states, when, error of the store
        self._spoken, self._listened = threading.Event(), threading.Condition()
        self._num_asked = self._num_answered = 0  # for news that are newer than the question
        self._publish()
        self._threads = [
            threading.Thread(target=run, name=f"penstock-{name}", daemon=True)
            for run, name in ((self._run, "ranks"), (self._exchange_states, "heartbeats"))
        ]

    def start(self) -> None:
        """Begin to listen; every rank has sent a heartbeat by now."""
        self._news = ({}, time.monotonic(), "")
        for thread in self._threads:
            thread.start()

    def _follow(self, meeting: Rendezvous) -> None:
        for rank, other in enumerate(meeting.present):
            if rank != self._ranks.rank and other.host == this_host():
                try:
                    descriptor = open_process_end(other.pid)
                except ProcessLookupError as error:
                    self.close()
                    ended = f"{self._ranks.name(rank)} has ended before all were ready"
                    raise Unavailable(ended, ranks=[rank]) from error
                self._processes[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    # -- what other threads ask for ----------------------------------------------------------------

    @property
    def finds_out_s(self) -> float:
        """How long a failed exchange waits for the lost rank's name: the end of a process of this host is seen at
        once, that of another host's by its lease, long after its connections have broken."""
        are_all_here = len(self._processes) == self._ranks.num_ranks - 1
        return _SEEN_S if are_all_here else self._lease_s + _STORE_S + 2 * _HEARTBEAT_S

    def close(self) -> None:
        """Release the descriptors of a detector that was never started."""
        for descriptor in (*self._processes, self._wake_in, self._wake_out):
            os.close(descriptor)
        self._processes.clear()

    def fail(self, why: str) -> None:
        """Report to the others that this rank cannot go on."""
        if self._state[0] == "works":
            self._state = ("failed", why, self._ranks.rank)
            self._wake()

    def linger(self) -> None:
        """Let the others receive this rank's last state before its process, and perhaps the store, is gone.

        Then end the threads: one that came back from the store into an interpreter that ends would abort the process.
        One that still waits for a store that hangs never comes back.
        """
        if self._serves:
            self._ended.wait(2 * _HEARTBEAT_S)
        else:
            self._published.wait(2 * _HEARTBEAT_S)
        self._ended.set()
        self._wake()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=_HEARTBEAT_S)

    def leave(self) -> None:
        """Leave the group in good order; the rank that serves the store waits until the others have received it."""
        if self._state[0] == "works":
            self._state = ("leaves", "", self._ranks.rank)
        self._wake()
        for thread in self._threads:
            thread.join(timeout=_LEAVE_S + 2 * _STORE_S)

    def _wake(self) -> None:
        self._spoken.set()
        with contextlib.suppress(BrokenPipeError):  # that thread has ended already
            os.write(self._wake_out, b"x")

    # -- the thread that decides -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            found = None
            while found is None and self._state[0] != "leaves" and not self._ended.is_set():
                found = self._pass_time()
            if found is not None:
                if self._state[0] == "works":
                    self._state = ("lost", found[1], found[0])
                    self._spoken.set()
                self._lost(*found)
        finally:
            for descriptor in (*self._processes, self._wake_in):
                os.close(descriptor)

    def _pass_time(self) -> tuple[int, str] | None:
        """Wait for an end or the next heartbeat; return the lost rank, and why."""
        ended = self._ended_within(_HEARTBEAT_S)
        if ended:
            self._listen_anew()  # its last state may give the reason
        found = self._judge()
        if found is not None:
            return found
        lost = None if ended else self._judge_store()
        if lost is not None:
            ended = self._ended_within(_STORE_ENDS_S)  # its process goes after its connections
        for rank in ended:
            if rank not in self._gone:
                return rank, f"{self._ranks.name(rank)} has ended in the middle of the job"
        return lost

    def _ended_within(self, wait_s: float) -> list[int]:
        """Return the ranks of this host that have ended, once there is one, or this thread is woken."""
        ready = self._poll.poll(1e3 * wait_s)
        if any(fd == self._wake_in for fd, _ in ready):
            os.read(self._wake_in, 4096)
        return [self._processes[fd] for fd, _ in ready if fd in self._processes]

    def _listen_anew(self) -> None:
        """Wait, for a heartbeat at most, for states that were fetched after this was called."""
        with self._listened:
            self._num_asked += 1
            mine = self._num_asked
            self._spoken.set()
            self._listened.wait_for(lambda: self._num_answered >= mine, _HEARTBEAT_S)

    def _judge(self) -> tuple[int, str] | None:
        """Look at the states received last."""
        texts, at, _ = self._news
        for rank, text in texts.items():
            if rank in self._gone:
                continue
            state, why, about, _ = json.loads(text)
            if state == "leaves":
                self._forget(rank)
                continue
            if state == "failed":
                return rank, f"{self._ranks.name(rank)} has failed: {why}"
            if state == "lost":
                return about, why
            before, since = self._received.setdefault(rank, (text, at))
            if before != text:
                self._received[rank] = (text, at)
            elif at - since > self._lease_s:
                return rank, self._silent(rank, at - since)
        return None

    def _judge_store(self) -> tuple[int, str] | None:
        """Look at whether the store answers. One that does not counts as rank 0, whichever process serves it."""
        now, (_, at, error) = time.monotonic(), self._news
        if error and 0 not in self._gone:
            return 0, f"{self._ranks.name(0)}, at whose store the trainers meet, does not answer any more: {error}"
        return (0, self._silent(0, now - at)) if now - at > self._lease_s and 0 not in self._gone else None

    def _silent(self, rank: int, for_s: float) -> str:
        return (
            f"no heartbeat from {self._ranks.name(rank)} for {for_s:.1f} s ({COLLECTIVE_LEASE_S}={self._lease_s:g}): "
            "it hangs or is unreachable"
        )

    def _forget(self, rank: int) -> None:
        self._gone.add(rank)
        self._left(rank)
        for descriptor in [fd for fd, r in self._processes.items() if r == rank]:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._processes[descriptor]

    # -- the thread that reads and writes the store --------------------------------------------------

    def _exchange_states(self) -> None:
        """Publish and read states until this rank leaves. No other thread waits for the store: it may never answer."""
        try:
            while self._state[0] != "leaves" and not self._ended.is_set():
                self._spoken.clear()
                asked = self._num_asked
                self._publish()
                self._listen()
                self._answer(asked)
                self._spoken.wait(_HEARTBEAT_S)
            if self._state[0] == "leaves":
                self._publish_leaving()
        except dist.DistError as error:
            self._news = (self._news[0], self._news[1], str(error).splitlines()[0] or "no answer")
        self._answer(sys.maxsize)

    def _answer(self, asked: int) -> None:
        with self._listened:
            self._num_answered = asked
            self._listened.notify_all()

    def _publish(self) -> None:
        self._num_heartbeats += 1
        state = self._state
        self._store.set(f"state/{self._ranks.rank}", json.dumps([*state, self._num_heartbeats]))
        if state[0] != "works":
            self._published.set()

    def _listen(self) -> None:
        others = [r for r in range(self._ranks.num_ranks) if r != self._ranks.rank and r not in self._gone]
        texts = self._store.multi_get([f"state/{r}" for r in others]) if others else []
        received = {rank: raw.decode() for rank, raw in zip(others, texts, strict=True)}
        self._news = (received, time.monotonic(), "")

    def _publish_leaving(self) -> None:
        """Publish that this rank leaves; the one that serves the store stays until the others have left, too."""
        until = time.monotonic() + _LEAVE_S
        self._publish()
        waits = self._serves
        while waits and time.monotonic() < until:
            self._listen()
            waits = any(json.loads(text)[0] == "works" for text in self._news[0].values())
            self._ended.wait(0.02)
