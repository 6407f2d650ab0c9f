"""Dispatcher: one lock around the round machine, a queue for each waiting request, and deadlines for stragglers.

What the machine wants done (`Close`, `Apply`) is done outside the lock: a round by the thread whose event closed it, a
push by the thread that brought it, whose memory it lies in, and which waits for it anyway.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.errors import PeerError, PenstockError, Unavailable
from penstock.ps.rounds.machine import RoundMachine
from penstock.ps.rounds.messages import (
    AllLeft,
    Apply,
    Close,
    Event,
    Join,
    Lost,
    Met,
    Payload,
    Refuse,
    Release,
    Reply,
    Ticket,
    TrainerRequest,
)
from penstock.ps.settings import ServerSettings
from penstock.ps.state import Updates

Inbox = SimpleQueue[Reply | Met | Refuse | Apply | None]  # None: serving has ended
Work = Close | Apply


class Lifecycle(Protocol):
    """The server as its dispatcher ends or warns it. All but `failed` are called under the dispatcher's lock."""

    def lost(self, trainer: int) -> None:
        """Report a trainer whose lease has run out."""

    def finished(self) -> None:
        """Every trainer has left."""

    def failed(self, error: BaseException) -> None:
        """The server cannot go on."""


@dataclass(frozen=True, slots=True)
class Response:
    """`answer` to a request; `staleness` of the push that was applied for it."""

    answer: Reply | Met | Refuse
    staleness: int = 0


class Dispatcher:
    """The machine of one server, which `updates` carry out. Thread-safe."""

    def __init__(self, machine: RoundMachine, updates: Updates, lifecycle: Lifecycle) -> None:
        self.machine = machine
        self._updates, self._payloads, self._lifecycle = updates, updates.state.payloads, lifecycle
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._waiting: dict[Ticket, Inbox] = {}
        self._owners: dict[Payload, Inbox] = {}
        self._stopped, self._refuses = "", False

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let the machine handle no event meanwhile, nor native code go on for it: see `penstock.ps.prepared`."""
        state = self._updates.state
        prepared = state.prepared
        with self._lock, prepared.held():
            passed = prepared.take_passed()
            if passed is not None:
                self.machine.passed(passed)
            try:
                yield
            finally:
                may = prepared.native is not None and not self._stopped and state.can_prepare
                prepared.prepare(self.machine.standing() if may else None)
                if may and not state.can_prepare:
                    # A push was staged meanwhile: who stages withdraws after it, which may have been before `prepare`.
                    prepared.withdraw()

    def check_prepared(self) -> None:
        """End the server if an update by native code has failed. Raises what `stop` decides."""
        failure = self._updates.state.prepared.failure
        if failure is not None:
            self._lifecycle.failed(failure)
            raise self._end() from failure

    def expected(self, round: int) -> tuple[int, ...]:
        """Return the trainers that an open round waits for, ascending; none if it is not open."""
        with self.frozen():
            return self.machine.expected(round)

    def version(self, block: str) -> int:
        """Return how many updates of a block have been applied, in modes without rounds; it may be one too few."""
        with self.frozen():
            return self.machine.version(block)

    def dispatch(self, make: Callable[[Ticket], TrainerRequest], *, payloads: Collection[Payload] = ()) -> Response:
        """Pass a request to the machine, and wait for its answer. `payloads`: of pushes. Raises what `stop` decides."""
        inbox: Inbox = SimpleQueue()
        ticket = next(self._tickets)
        with self._lock:
            if self._stopped:
                for payload in payloads:
                    self._payloads.release(payload)
                raise self._end()
            self._waiting[ticket] = inbox
            self._owners |= dict.fromkeys(payloads, inbox)
        try:
            self.notify(make(ticket))
            staleness = 0
            while isinstance(got := inbox.get(), Apply):
                pushes = [got, *_at_hand(inbox)]
                staleness += sum(push.staleness for push in pushes)
                self._apply(pushes)
        except Exception as error:
            raise self._end() from error  # `failed` was called
        finally:
            for payload in payloads:
                self._owners.pop(payload, None)
        if got is None:
            raise self._end()
        return Response(got, staleness)

    def notify(self, event: Event) -> None:
        """Pass an event without an answer, such as the time."""
        self._work([], event)

    def stop(self, reason: str, *, refuses: bool) -> None:
        """End serving: requests that wait or come raise PeerError if the first call `refuses`, else Unavailable."""
        with self.frozen():
            if not self._stopped:
                self._stopped, self._refuses = reason, refuses
            for inbox in self._waiting.values():
                inbox.put(None)
            self._waiting.clear()

    def _end(self) -> PenstockError:
        return PeerError(self._stopped) if self._refuses else Unavailable(self._stopped)

    def _apply(self, pushes: Sequence[Apply]) -> None:
        """Apply pushes of a request, and tell the machine."""
        try:
            done = self._updates.apply_all(pushes)
        except BaseException as error:
            self._lifecycle.failed(error)
            raise
        for event in done:
            self.notify(event)

    def _work(self, work: list[Work], event: Event | None) -> None:
        """Handle `event`, do `work` and what comes of both."""
        try:
            while work or event is not None:
                if event is None:
                    event = self._updates.execute(work.pop())
                with self.frozen():
                    if not self._stopped:
                        work += self._handle(event)
                event = None
        except BaseException as error:
            self._lifecycle.failed(error)
            raise

    def _handle(self, event: Event) -> list[Work]:
        """Pass an event to the machine and follow its instructions; return what is to be done without the lock."""
        was_new = isinstance(event, Join) and self.machine.members.is_new(event.sender)
        instructions = self.machine.handle(event, time.monotonic())
        self._updates.record(event, instructions, self.machine.members, was_new=was_new)
        work: list[Work] = []
        for one in instructions:
            match one:
                case Reply() | Met() | Refuse():
                    self._waiting.pop(one.ticket).put(one)
                case Release():
                    self._payloads.release(one.payload)
                case Apply():
                    self._owners[one.payload].put(one)
                case Close():
                    work.append(one)
                case Lost():
                    self._lifecycle.lost(one.trainer)
                case AllLeft():
                    self._lifecycle.finished()
        return work


def _at_hand(inbox: Inbox) -> Iterator[Apply]:
    """Take the pushes that may be applied now. An answer follows when they are applied, so none is among them."""
    with contextlib.suppress(Empty):
        while isinstance(push := inbox.get_nowait(), Apply):
            yield push
        inbox.put(push)


REPORT_EVERY_S = 3.0


class Stragglers:
    """Deadlines for trainers that have not arrived: reported every 3 s at the start, once a lease in a round."""

    def __init__(self, settings: ServerSettings, dispatcher: Dispatcher, now: float) -> None:
        self._settings, self._dispatcher = settings, dispatcher
        self._began = self._reported = now
        self._waiting_since = now
        self._empty_since: float | None = None

    def look(self, now: float) -> str:
        """Return what to report, or ''. Raises Unavailable when a deadline has passed."""
        with self._dispatcher.frozen():
            machine = self._dispatcher.machine
            members = machine.members
            missing = members.missing()
            is_empty = members.all_lost
            waits_for, number = machine.waits_for(), machine.open_round()
        if missing:
            return self._start(missing, now)
        if is_empty:
            return self._empty(now)
        self._empty_since = None
        if not waits_for:
            self._waiting_since = now
        elif now - self._waiting_since >= self._settings.lease_s:
            self._waiting_since = now
            return f"round {number} waits for {_named(waits_for)}"
        return ""

    def _start(self, missing: Sequence[int], now: float) -> str:
        limit_s = self._settings.start_s
        if now - self._began >= limit_s:
            raise Unavailable(
                f"{_named(missing)} of {self._settings.fanin} did not join {self._settings.endpoint} within "
                f"{limit_s:g} s (PENSTOCK_PS_START_S). Are they started, with this endpoint and job?"
            )
        if now - self._reported < REPORT_EVERY_S:
            return ""
        self._reported = now
        return f"waits for {_named(missing)} of {self._settings.fanin} to join ({now - self._began:.0f} s)"

    def _empty(self, now: float) -> str:
        limit_s = self._settings.start_s
        if self._empty_since is None:
            self._empty_since = now
            return f"every trainer is lost; waits {limit_s:g} s for one to come back"
        if now - self._empty_since >= limit_s:
            raise Unavailable(f"every trainer was lost, and none came back within {limit_s:g} s (PENSTOCK_PS_START_S)")
        return ""


def _named(trainers: Sequence[int]) -> str:
    return ("trainer " if len(trainers) == 1 else "trainers ") + ", ".join(map(str, trainers))
