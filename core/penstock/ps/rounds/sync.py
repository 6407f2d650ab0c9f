"""Synchronous rounds: every member pushes, the mean is applied once, every member pulls the result.

state of a round   open -> closing (Close was asked for) -> applied, which opens the next one; or failed, and open again
a round closes     when all expected trainers have joined once, and every member that it waits for is at its barrier
a joiner           counts from the open round, or, when all have joined once, from the next one if another trainer has
                   reached the barrier. Its pushes to a round that it does not count in are answered and left out; its
                   barrier there is answered when that round is applied
a lost trainer     takes its pushes of the open round with it; the mean is then over the members that are left
an empty round     if all that a round waits for are lost, it closes with nothing, for those that joined for the next
a failed round     stays open, and empty. A trainer at its barrier is refused, and so are its requests for the next
                   round, until it joins again (and pushes again) or leaves
a meeting          of the trainers is no part of a round: a trainer that waits there counts as one without data,
                   and is not waited for; so trainers with unequal data meet after the last step of the last of them.
                   One that pushes to the round, or reaches its barrier, is at no meeting any more
a duplicate        (trainer, epoch, round, block) is answered, and its payload released

The shell may restore `round` and the members from a snapshot: trainers then join again, and push the open round again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.ps.rounds.machine import Membership, RoundMachine
from penstock.ps.rounds.messages import (
    AllLeft,
    Applied,
    Barrier,
    Close,
    FailedRound,
    Heartbeat,
    Instruction,
    Join,
    Leave,
    Lost,
    Meet,
    Payload,
    Pull,
    Push,
    Refuse,
    Release,
    Reply,
    Standing,
    Step,
    Tick,
    Ticket,
    TrainerIncarnation,
)

_InRound = TypeVar("_InRound", Push, Barrier, Step)


class SyncRounds(RoundMachine):
    """The machine of one pserver. Not thread-safe: one event at a time."""

    def __init__(self, members: Membership, *, round: int = 0) -> None:
        super().__init__(members)
        self.round = round
        self._closing = False
        self._finished = False
        self._first: dict[TrainerIncarnation, int] = {}  # the round that it starts with, as of its last join
        self._pushed: dict[int, dict[str, Payload]] = {}
        self._reached: dict[int, list[Ticket]] = {}
        self._refused: dict[int, str] = {}  # trainer -> why its part of the open round is gone
        self._pulls: list[tuple[Ticket, int, int]] = []  # ticket, trainer, round that has to be open
        self.handlers = {
            Join: self._join, Heartbeat: self._heartbeat, Push: self._takes_part(self._push),
            Barrier: self._takes_part(self._barrier), Step: self._takes_part(self._step), Pull: self._pull,
            Leave: self._leave, Meet: self._meet, Tick: self._tick, Applied: self._applied, FailedRound: self._failed,
        }  # fmt: skip

    # -- membership ------------------------------------------------------------------------------

    def _join(self, event: Join) -> list[Instruction]:
        reason = self.members.refusal(event.sender)
        if reason:
            return [Refuse(event.ticket, reason)]
        out: list[Instruction] = []
        if self.members.is_new(event.sender):
            out += self._forget(event.sender.trainer)
            first = self.members.returns_to(event.sender)
            if first is None:
                # At the start all count, however early others are: the first round waits for all anyway.
                is_late = self._closing or (bool(self._reached) and self.members.started)
                first = self.round + 1 if is_late else self.round
            # It may wait for that round already: all may be lost before it is open.
            first = self._first[event.sender] = max(first, self._first.get(event.sender, 0))
            self.members.join(event.sender, self.now, first)
        else:
            self.members.touch(event.sender, self.now)
            self._refused.pop(event.sender.trainer, None)
        first = max(self.round, self.members.from_round(event.sender.trainer))
        return [*out, Reply(event.ticket, first), *self._close_if_complete()]

    def _heartbeat(self, event: Heartbeat) -> list[Instruction]:
        return [Reply(event.ticket, self.round)]

    def _meet(self, event: Meet) -> list[Instruction]:
        return [*self.meetings.meet(event, self.round), *self._close_if_complete()]

    def open_round(self) -> int:
        """The open round."""
        return self.round

    def _leave(self, event: Leave) -> list[Instruction]:
        out = [*self._forget(event.sender.trainer), Reply(event.ticket, self.round)]
        self.members.leave(event.sender.trainer)
        return [*out, *self._close_if_complete(), *self._finish_if_empty()]

    def _tick(self, event: Tick) -> list[Instruction]:
        out: list[Instruction] = []
        for trainer in self.members.expire(self.now):
            out += [Lost(trainer), *self._forget(trainer)]
        closed = self._close_if_complete() if out else []
        return [*out, *closed, *self._finish_if_empty()]

    def _forget(self, trainer: int) -> list[Instruction]:
        """Drop what a trainer did in the open round; a round that is closing keeps what it has."""
        self._refused.pop(trainer, None)
        waiting = [t for t, of, _ in self._pulls if of == trainer]
        self._pulls = [p for p in self._pulls if p[1] != trainer]
        if not self._closing:
            waiting += self._reached.pop(trainer, [])
        refused = [Refuse(t, f"trainer {trainer} has left", rejoin=True) for t in waiting]
        return [*(Release(p) for p in self._pushed.pop(trainer, {}).values()), *refused]

    def _finish_if_empty(self) -> list[Instruction]:
        if self._closing or self._finished or not self.members.all_left:
            return []
        self._finished = True
        return [AllLeft()]

    def standing(self) -> Standing | None:
        """The open round, if nothing of it has come, and it waits for all members."""
        is_busy = self._closing or self._finished or self._pulls or self._reached or self._pushed or self._refused
        members = {} if is_busy or self.meetings.waiting else self.members.at_rest()
        if not members or self.members.participants(self.round) != members.keys():
            return None
        return Standing(self.round, members)

    def passed(self, now: Standing) -> None:
        """Rounds have been closed, with a step of each member."""
        super().passed(now)
        self.round = now.round

    def waits_for(self) -> list[int]:
        """Trainers that are not at the barrier of the open round, while others are."""
        if self._closing or not self._reached:
            return []
        return sorted(self._waited_for() - self._reached.keys())

    def expected(self, round: int) -> tuple[int, ...]:
        """The trainers of the open round, once all have joined."""
        if round != self.round or self._closing or not self.members.started:
            return ()
        return tuple(sorted(self._waited_for()))

    def _waited_for(self) -> set[int]:
        return self.members.participants(self.round) - self.meetings.waiting

    # -- the round -------------------------------------------------------------------------------

    def _takes_part(self, handler: Callable[[_InRound], list[Instruction]]) -> Callable[[_InRound], list[Instruction]]:
        """Return `handler` of requests by which a trainer shows that it waits in no meeting any more."""

        def handle(event: _InRound) -> list[Instruction]:
            if not self.meetings.waiting:
                return handler(event)
            return [*self.meetings.give_up(event.sender.trainer, event.round), *handler(event)]

        return handle

    def _push(self, event: Push) -> list[Instruction]:
        trainer = event.sender.trainer
        if event.round > self.round:
            return [*self._not_open(event.ticket, event.round), Release(event.payload)]
        if trainer in self._refused:
            return [Refuse(event.ticket, self._refused[trainer]), Release(event.payload)]
        mine = self._pushed.get(trainer, {})
        is_counted = event.round >= max(self.round, self.members.from_round(trainer))
        if not is_counted or self._closing or event.block in mine:
            return [Reply(event.ticket, self.round), Release(event.payload)]
        if trainer in self._reached:
            late = f"block {event.block!r} comes after trainer {trainer}'s barrier of round {self.round}"
            return [Refuse(event.ticket, late), Release(event.payload)]
        self._pushed.setdefault(trainer, {})[event.block] = event.payload
        return [Reply(event.ticket, self.round)]

    def _step(self, event: Step) -> list[Instruction]:
        out: list[Instruction] = []
        for block, payload in event.payloads.items():
            answers = self._push(Push(event.ticket, event.sender, event.round, block, payload))
            out += [one for one in answers if isinstance(one, Release)]
            refused = next((one for one in answers if isinstance(one, Refuse)), None)
            if refused is not None:
                later = list(event.payloads).index(block) + 1
                return [*out, *(Release(p) for p in list(event.payloads.values())[later:]), refused]
        return [*out, *self._barrier(Barrier(event.ticket, event.sender, event.round))]

    def _not_open(self, ticket: Ticket, round: int) -> list[Instruction]:
        return [Refuse(ticket, f"round {round} is not open; round {self.round} is")]

    def _barrier(self, event: Barrier) -> list[Instruction]:
        if event.round < self.round:
            return [Reply(event.ticket, self.round)]
        if event.round > self.round:
            return self._not_open(event.ticket, event.round)
        trainer = event.sender.trainer
        if trainer in self._refused:
            return [Refuse(event.ticket, self._refused[trainer])]
        first = self.members.from_round(trainer)
        if event.round < first:
            self._pulls.append((event.ticket, trainer, first))  # it has nothing to do before
            return self._ready_pulls()
        self._reached.setdefault(trainer, []).append(event.ticket)
        return self._close_if_complete()

    def _close_if_complete(self) -> list[Instruction]:
        if self._closing or not self.members.started or self.members.is_empty or not self._is_complete():
            return []
        self._closing = True
        blocks: dict[str, list[Payload]] = {}
        for trainer in sorted(self._reached):  # a fixed order of summation, whatever the order of arrival
            for block, payload in self._pushed.pop(trainer, {}).items():
                blocks.setdefault(block, []).append(payload)
        left_out = [Release(payload) for mine in self._pushed.values() for payload in mine.values()]
        self._pushed.clear()
        close = Close(self.round, {b: tuple(p) for b, p in sorted(blocks.items())}, tuple(sorted(self._reached)))
        return [*left_out, close]

    def _is_complete(self) -> bool:
        if not self._waited_for() <= self._reached.keys():
            return False
        # Only trainers at a meeting: the round is closed for those that wait for the next one.
        return bool(self._reached or self._pulls or not self.members.participants(self.round))

    def _applied(self, event: Applied) -> list[Instruction]:
        self._closing = False
        self.round = event.round + 1
        tickets = [t for waiting in self._reached.values() for t in waiting]
        self._reached.clear()
        out: list[Instruction] = [Reply(t, self.round) for t in tickets]
        return [*out, *self._ready_pulls(), *self._close_if_complete(), *self._finish_if_empty()]

    def _failed(self, event: FailedRound) -> list[Instruction]:
        self._closing = False
        self._refused |= dict.fromkeys(self._reached, event.reason)
        refused = [Refuse(t, event.reason) for waiting in self._reached.values() for t in waiting]
        self._reached.clear()
        return [*refused, *self._ready_pulls(), *self._close_if_complete(), *self._finish_if_empty()]

    def _pull(self, event: Pull) -> list[Instruction]:
        self._pulls.append((event.ticket, event.sender.trainer, event.round))
        return self._ready_pulls()

    def _ready_pulls(self) -> list[Instruction]:
        """Parameters are read between rounds only: a pull waits while one is being applied."""
        if self._closing:
            return []
        ready = [ticket for ticket, _, round in self._pulls if round <= self.round]
        self._pulls = [p for p in self._pulls if p[2] > self.round]
        return [Reply(t, self.round) for t in ready]
