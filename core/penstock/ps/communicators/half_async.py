"""Half-asynchronous training: the threads of one trainer go in lock-step, trainers do not wait for each other.

Each participant (a thread that runs the program) gives one gradient a step; when all have, the average goes to the
servers, and each goes on with what it then pulls. A program that runs once a node gives once a node (Reduce mode
merges the replicas' gradients before): one participant, which waits for no other. Its steps push and pull on the thread
that runs them, over channels where there are any, as in async mode without a communicator. With more threads,
`set_participants` announces them, and the program runs with the Executor, which keeps a step on its thread. Whole
steps meet in native code (`native/src/ps/meeting.h`), where the thread that completes a round pushes for all, over
channels or by `push_for_all`, and its answer has what all of them read. Gradients that are operators by themselves meet
here: one call pushes all variables whose rounds are complete, and one message a server pulls all that are behind. A
thread that ends without leaving counts as having left. One that was announced and has not started is warned of, and an
error after MISSING_S.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import Unavailable
from penstock.logger import warn_once
from penstock.ps.communicators.base import LocalGradient, Location, OverServers, Servers, merge
from penstock.ps.communicators.queues import LockStep
from penstock.ps.counters import Counters, count_no_waits_here
from penstock.ps.remote import Descriptor, SendCall
from penstock.ps.settings import CommunicatorSettings

_log = logging.getLogger(__name__)
_CHECK_S = 1.0  # only while a thread waits
_REPORT_MISSING_S = 10.0
MISSING_S = 600.0  # as long as servers and trainers wait for each other at the start


Round = tuple[str, list[tuple[Location, LocalGradient]]]
"""The blocks of a variable, as a key, and what each participant has given."""


@dataclass(slots=True)
class _Pulled:
    """A variable as one thread has pulled it for all. `version`: how many rounds were applied, at least."""

    to: Location
    value: list[torch.Tensor]
    version: int = -1


class _Mine(threading.local):
    """Number of the calling thread: the identifiers of threads are reused."""

    who = -1


class HalfAsyncCommunicator(OverServers):
    """A Remote for half_async mode. Its threads live from here until `close`.

    `missing_s`: how long announced threads may take to begin.
    """

    def __init__(
        self, servers: Servers, descriptor: Descriptor, settings: CommunicatorSettings, *, counters: Counters,
        missing_s: float = MISSING_S,
    ) -> None:  # fmt: skip
        super().__init__(servers, descriptor, counters=counters)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._steps: LockStep[tuple[Location, LocalGradient]] = LockStep()
        self._mine, self._numbers = _Mine(), itertools.count()
        self._threads: dict[int, threading.Thread] = {}  # by number, to see whether it is alive
        self._missing_s = missing_s
        self._num_announced, self._came = 0, set[int]()
        self._pulls_together = False  # one thread pulls, the others of its round copy
        self._pulled: dict[str, _Pulled] = {}
        self._pulling = threading.Lock()
        self._is_alone = True  # one participant: nothing is queued
        servers.serve_operators()
        self._senders = [
            threading.Thread(target=self._send_all, name=f"ps-send-{i}", daemon=True)
            for i in range(settings.thread_pool_size)
        ]
        for thread in self._senders:
            thread.start()

    # -- participants ----------------------------------------------------------------------------

    def set_participants(self, num: int) -> None:
        """Set how many threads train from now on; before they start, and after those of before have ended.

        Returns when what was queued before is sent, so that no push overtakes it.
        """
        self.servers.withdraw_operators()
        with self._lock:
            self._threads.clear()  # a thread of before takes part again when it gives again
            self._pulled.clear()  # one thread alone pushes outside of rounds
            self._num_announced = num
            self._came.clear()
            self._steps.begin(num)
            self._pulls_together = num > 1
            self._changed.notify_all()
            self._is_alone = num <= 1
            self._changed.wait_for(lambda: self._steps.is_empty or self._failure.happened)
            self._check()
        self.servers.serve_operators(num)

    def leave(self) -> None:
        """The calling thread has no more data: rounds no longer wait for it."""
        with self._lock:
            who = self._who()
            del self._threads[who]
            self._steps.leave(who)
            self._changed.notify_all()
        self.servers.leave_threads()

    @contextmanager
    def participant(self) -> Iterator[None]:
        """Take part while the body runs; leave however it ends. The number of threads was set before."""
        try:
            yield
        finally:
            self.leave()

    def _who(self) -> int:
        if self._mine.who < 0:
            self._mine.who = next(self._numbers)
        self._came.add(self._mine.who)
        self._threads.setdefault(self._mine.who, threading.current_thread())
        return self._mine.who

    def _drop_ended_threads(self) -> None:
        for who in [w for w, thread in self._threads.items() if not thread.is_alive()]:
            del self._threads[who]
            self._steps.leave(who)
            self._changed.notify_all()

    def check_threads(self, num_came: int, waited_s: float) -> None:
        """Raise if the exchange has ended, or if announced threads have not come within `missing_s`.

        Each second, while a thread waits. When the communicator stops, what has been brought is pushed: no error.
        """
        self._failure.check()
        if num_came < 0:
            self._check()
            return
        self._check_missing(waited_s, num_came)
        main = threading.main_thread()  # others leave when they end; this one would with the process, which joins them
        if main.native_id is not None and not main.is_alive():
            self.servers.leave_threads_for(main.native_id)

    def _check_missing(self, waited_s: float, num_came: int) -> None:
        absent = self._num_announced - num_came
        if absent <= 0 or waited_s < min(_REPORT_MISSING_S, self._missing_s):
            return
        what = (
            f"{absent} of the {self._num_announced} training threads that were announced (set_threads) have not begun"
        )
        warn_once(_log, f"{what}; the others wait for them", self)
        if waited_s >= self._missing_s:
            raise Unavailable(f"{what} within {self._missing_s:g} s")

    # -- what the program calls ------------------------------------------------------------------

    def _queue(self, target: Location, gradient: LocalGradient) -> None:
        """Give this thread's gradient to the open round, without blocking; alone, push it."""
        if self._is_alone:
            self._check()
            self._push_alone(target, gradient)
        else:
            self._give([(target, gradient)])

    def _give(self, gradients: Sequence[tuple[Location, LocalGradient]]) -> None:
        copies = [(target, gradient.copy()) for target, gradient in gradients]
        with self._lock:
            self._check()
            for target, copy in copies:
                self._steps.give(_key(target.blocks), self._who(), (target, copy))
            self._changed.notify_all()
        for target, _ in copies:
            self.counters.add("", target.variable, calls=1)

    def _push_alone(self, to: Location, gradient: LocalGradient) -> None:
        try:
            if to.heights is None:
                self.servers.send(to.variable, to.blocks, to.at, gradient.values)
            else:
                self.servers.send_rows(to.variable, to.blocks, to.at, to.heights, gradient.rows, gradient.values[0])
        except Exception as error:  # noqa: BLE001  # raised by the step's next call, as when others push
            self._fail(f"sending the gradient {to.variable!r} to {self._where(to.at)}", error)

    def send_step(self, pushes: Sequence[SendCall]) -> None:
        """Give all gradients of a step; alone, push them."""
        if not self._is_alone:
            self._give([_given(push) for push in pushes])
            return
        self.push_for_all(pushes)

    def push_for_all(self, pushes: Sequence[SendCall]) -> None:
        """Push the gradients of one thread, or the means of those of all that have met."""
        try:  # before any check: a native step that failed holds a lock until it is repeated
            self.servers.send_step(pushes)
        except Exception as error:  # noqa: BLE001  # raised below
            names = ", ".join(repr(push.variable) for push in pushes)
            self._fail(f"sending the gradients {names}", error)
        self._check()

    def recv_step(self, variables: Sequence[str], blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Pull all variables, after the rounds that this thread gave to."""
        if not self._is_alone:
            super().recv_step(variables, blocks, at, out)
            return
        self._check()
        self.servers.recv_step(variables, blocks, at, out)

    def recv(self, variable: str, blocks: Sequence[str], at: Sequence[int], out: Sequence[Any]) -> None:
        """Wait until the round that this thread gave to is applied, then pull."""
        with self.counters.waiting("", variable):
            version = self._wait_for_round(tuple(blocks))
        if not self._pulls_together:
            self.servers.recv(variable, blocks, at, out)
            return
        with self._pulling:
            found = self._pulled.get(_key(blocks))
            if found is None:
                to = Location(variable, tuple(blocks), tuple(at))
                found = self._pulled[_key(blocks)] = _Pulled(to, [torch.empty_like(t) for t in out])
            if found.version < version:
                self._pull_behind()
            for theirs, value in zip(out, found.value, strict=True):
                theirs.copy_(value)

    def _pull_behind(self) -> None:
        """Pull all variables of which rounds were applied since they were pulled."""
        with self._lock:
            done = {key: self._num_done(key) for key in self._pulled}
        behind = [(key, one) for key, one in self._pulled.items() if one.version < done[key]]
        if len(behind) == 1:
            ((_, one),) = behind
            self.servers.recv(one.to.variable, one.to.blocks, one.to.at, one.value)
        else:
            all_to = [one.to for _, one in behind]
            self.servers.recv_step(
                [to.variable for to in all_to for _ in to.blocks],
                [block for to in all_to for block in to.blocks],
                [at for to in all_to for at in to.at],
                [tensor for _, one in behind for tensor in one.value],
            )
        for key, one in behind:
            one.version = done[key]

    def prefetch(
        self, table: str, blocks: Sequence[str], at: Sequence[int], heights: Sequence[int], ids: Any, out: Any
    ) -> None:
        """Wait until the round that this thread gave to is applied, then pull rows."""
        with self.counters.waiting("", table):
            self._wait_for_round(tuple(blocks))
        self.servers.prefetch(table, blocks, at, heights, ids, out)

    def _wait_for_round(self, blocks: tuple[str, ...]) -> int:
        """Return how many rounds are applied."""
        key, started = _key(blocks), time.monotonic()
        with self._lock:
            self._check()
            round = self._steps.round_to_wait_for(key, self._who())
            while round >= 0 and not self._steps.is_done(key, round):
                self._drop_ended_threads()
                self._check_missing(time.monotonic() - started, len(self._came))
                self._changed.wait(_CHECK_S)
                self._check()
            return self._num_done(key)

    def _num_done(self, key: str) -> int:
        """Rounds of a variable that were pushed, at most: whole steps may have it or not."""
        return self._steps.num_done(key) + self.servers.num_pushed_together

    def queue_depths(self) -> dict[str, int]:
        """Return the number of gradients that wait for others, by the parameter's blocks."""
        with self._lock:
            depths = self._steps.depths()
        for key, num in self.servers.waiting_threads().items():
            depths[key] = depths.get(key, 0) + num
        return depths

    def flush(self) -> None:
        """Send what was given, also of rounds that wait for other threads. Raises the background's error.

        A thread between two steps has given nothing that waits in native code: its step ends with its round.
        """
        with self._lock:
            self._check()
            self._steps.close_rounds()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._steps.are_closed_done or self._failure.happened)
        self._failure.check()

    def close(self) -> None:
        """Send what was given, leave the servers, end. Raises the background's error if no call has raised it yet."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._steps.flush()
            self._changed.notify_all()
        for thread in self._senders:
            thread.join()
        self.servers.end_threads()
        try:
            self.servers.close()
        finally:
            self._failure.check_unless_raised()

    # -- send threads ----------------------------------------------------------------------------

    def _send_all(self) -> None:
        count_no_waits_here()
        while taken := self._take():
            pushes = [(items[0][0], [gradient for _, gradient in items]) for _, items in taken]
            try:
                self._push_all(pushes)
            except Exception as error:  # noqa: BLE001  # raised by the training thread's next call
                names = ", ".join(repr(target.variable) for target, _ in pushes)
                where = self._where([at for target, _ in pushes for at in target.at])
                self._fail(f"sending the {'gradients' if len(pushes) > 1 else 'gradient'} {names} to {where}", error)
            with self._lock:
                for key, _ in taken:
                    self._steps.done(key)
                self._changed.notify_all()

    def _push_all(self, pushes: Sequence[tuple[Location, list[LocalGradient]]]) -> None:
        if len(pushes) == 1:
            ((target, gradients),) = pushes
            self._push(target, gradients, average=True)
            return
        merged = [(target, merge(gradients, average=True)) for target, gradients in pushes]
        self.servers.send_step([_call(target, gradient) for target, gradient in merged])
        for (target, gradient), (_, gradients) in zip(merged, pushes, strict=True):
            self.counters.add("", target.variable, sent_bytes=gradient.num_bytes, merges=len(gradients) - 1)

    def _fail(self, doing: str, error: BaseException) -> None:
        """The exchange ends: operators come here from now on, and raise."""
        self._failure.record(doing, error)
        self.servers.withdraw_operators()
        self.servers.fail_threads()

    def _take(self) -> list[Round]:
        """Return all complete rounds, of a variable each; none: there is nothing more to send."""
        with self._lock:
            while not self._failure.happened:
                found: list[Round] = []
                while (one := self._steps.take()) is not None:
                    found.append(one)
                if found or (self._is_closed and self._steps.is_empty):
                    return found
                self._changed.wait()
            return []


def _given(push: SendCall) -> tuple[Location, LocalGradient]:
    heights = None if push.rows is None else tuple(push.heights)
    return Location(push.variable, tuple(push.blocks), tuple(push.at), heights), LocalGradient(
        tuple(push.values), push.rows
    )


def _call(to: Location, gradient: LocalGradient) -> SendCall:
    return SendCall(to.variable, to.blocks, to.at, gradient.values, to.heights or (), gradient.rows)


def _key(blocks: Sequence[str]) -> str:
    """A gradient and its parameter have different names, but the same blocks."""
    return " ".join(blocks)
