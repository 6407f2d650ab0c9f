"""Who of the ranks is still there: each says so in the store, and a thread notices who does not any more.

A rank of this host that ends is noticed at once (its process descriptor), another one, or one that stands still, when
it has said nothing for PENSTOCK_COLLECTIVE_LEASE_S (default 6). The first finding is the last: it is given to `lost`
once, and the thread ends. Owner: the thread `penstock-ranks`; `state`, `stop` are for other threads.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from penstock.distributed.rendezvous import Rendezvous, seconds, this_host

LEASE_S = "PENSTOCK_COLLECTIVE_LEASE_S"
_DEFAULT_LEASE_S = 6.0
_BEAT_S = 0.5
_STORE_S = 2.0  # a store that does not answer for so long is silent
_LEAVE_S = 5.0  # so long the one who has the store waits for the others' goodbye

State = Literal["works", "leaves", "failed"]


class Watch:
    """Beats for this rank and listens to the others. `lost(rank, text)` is called once, `left(rank)` for each
    that ends well; on the watch's thread."""

    def __init__(self, meeting: Rendezvous, lost: Callable[[int, str], None], left: Callable[[int], None]) -> None:
        self._ranks, self._lost, self._left = meeting.ranks, lost, left
        self._lease_s = seconds(LEASE_S, _DEFAULT_LEASE_S)
        base = meeting.base.clone()  # type: ignore[attr-defined]  # torch has not typed it
        base.set_timeout(timedelta(seconds=_STORE_S))
        self._store = PrefixStore(f"penstock/{meeting.ranks.attempt}", base)
        self._state: tuple[State, str] = ("works", "")
        self._beats = 0
        self._heard: dict[int, tuple[str, float]] = {}
        self._gone: set[int] = set()
        self._ended = threading.Event()
        self._poll = select.poll()
        self._processes: dict[int, int] = {}  # descriptor -> rank
        self._wake_in, self._wake_out = os.pipe()
        self._poll.register(self._wake_in, select.POLLIN)
        self._follow(meeting)
        self._say()
        self._thread = threading.Thread(target=self._run, name="penstock-ranks", daemon=True)

    def start(self) -> None:
        """Begin to listen; every rank has said something by now."""
        self._thread.start()

    def _follow(self, meeting: Rendezvous) -> None:
        for rank, other in enumerate(meeting.present):
            if rank != self._ranks.rank and other.host == this_host():
                descriptor = os.pidfd_open(other.pid)
                self._processes[descriptor] = rank
                self._poll.register(descriptor, select.POLLIN)

    # -- what other threads ask for ----------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Tell the others that this rank cannot go on."""
        if self._state[0] == "works":
            self._state = ("failed", why)
            self._wake()

    def linger(self) -> None:
        """Let the others hear what this rank has said last, before its process, and perhaps the store, is gone."""
        self._ended.wait(3 * _BEAT_S)

    def leave(self) -> None:
        """Tell the others that this rank ends well; whoever has the store waits until they know."""
        if self._state[0] == "works":
            self._state = ("leaves", "")
        self._wake()
        self._thread.join(timeout=_LEAVE_S + 2 * _STORE_S)

    def _wake(self) -> None:
        if self._wake_out >= 0:
            os.write(self._wake_out, b"x")

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            found = None
            while found is None and self._state[0] != "leaves":
                found = self._pass_time()
            if found is not None:
                self._lost(*found)
            else:
                self._say_goodbye()
        finally:
            for descriptor in (*self._processes, self._wake_in, self._wake_out):
                os.close(descriptor)
            self._wake_out = -1

    def _pass_time(self) -> tuple[int, str] | None:
        """Wait for an end or the next beat; return who is lost, and why."""
        ready = self._poll.poll(1e3 * _BEAT_S)
        ended = [self._processes[fd] for fd, _ in ready if fd in self._processes]
        if any(fd == self._wake_in for fd, _ in ready):
            os.read(self._wake_in, 4096)
        try:
            self._say()
            found = self._listen()
        except dist.DistError as error:
            return self._storeless(ended, error)
        if found is not None:
            return found
        for rank in ended:
            if rank not in self._gone:
                return rank, f"{self._ranks.name(rank)} has ended in the middle of the job"
        return None

    def _storeless(self, ended: list[int], error: Exception) -> tuple[int, str] | None:
        for rank in ended:
            if rank not in self._gone:
                return rank, f"{self._ranks.name(rank)} has ended in the middle of the job"
        if 0 in self._gone:
            return None
        first = str(error).splitlines()[0]
        return 0, f"{self._ranks.name(0)}, at whose store the trainers meet, does not answer any more: {first}"

    def _say(self) -> None:
        self._beats += 1
        state, why = self._state
        self._store.set(f"state/{self._ranks.rank}", json.dumps([state, why, self._beats]))

    def _listen(self) -> tuple[int, str] | None:
        others = [r for r in range(self._ranks.num_ranks) if r != self._ranks.rank and r not in self._gone]
        texts = self._store.multi_get([f"state/{r}" for r in others]) if others else []
        now = time.monotonic()
        for rank, raw in zip(others, texts, strict=True):
            text = raw.decode()
            state, why, _ = json.loads(text)
            if state == "leaves":
                self._gone.add(rank)
                self._left(rank)
                continue
            if state == "failed":
                return rank, f"{self._ranks.name(rank)} has failed: {why}"
            before, since = self._heard.setdefault(rank, (text, now))
            if before != text:
                self._heard[rank] = (text, now)
            elif now - since > self._lease_s:
                return rank, (
                    f"{self._ranks.name(rank)} has said nothing for {now - since:.1f} s ({LEASE_S}={self._lease_s:g}): "
                    "it stands still, or cannot be reached"
                )
        for descriptor in [fd for fd, rank in self._processes.items() if rank in self._gone]:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            del self._processes[descriptor]
        return None

    def _say_goodbye(self) -> None:
        until = time.monotonic() + _LEAVE_S
        try:
            self._say()
            serves = self._ranks.rank == 0 and not self._ranks.is_served
            while serves and len(self._gone) < self._ranks.num_ranks - 1 and time.monotonic() < until:
                if self._listen() is not None:
                    return
                self._ended.wait(0.02)
        except dist.DistError:
            return  # the one who has the store has ended before: it waited long enough
