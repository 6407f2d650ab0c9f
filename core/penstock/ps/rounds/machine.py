"""Membership, meetings of all trainers, and the base of the round machines. Pure: no clock, no I/O.

a meeting     closes when all expected trainers have joined the job once, and every member has arrived. A trainer that
              is lost or leaves is waited for no more, and its part is dropped
a number      each meeting has one, and a trainer asks for its next by it, so a request may be repeated: before the
              meeting it waits, after it it gets the same answer again. Only the last meeting is remembered. A trainer
              that was lost during it gets the answer too: to the others it is over
a joiner      first asks for the next number (number -1), since others may have met before
a restart     of the server drops all. Numbers go on with the highest that is asked for; a trainer that asks for a lower
              one had its answer lost together with the server, and is refused
giving up     a trainer may stop to wait (number GIVE_UP), and in sync mode one that pushes has done so: it is not there
              any more, and the requests in which it waited are refused
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from penstock.ps.rounds.messages import (
    GIVE_UP,
    Event,
    Instruction,
    Join,
    Leave,
    Meet,
    Met,
    Payload,
    Push,
    Refuse,
    Release,
    Reply,
    Standing,
    Step,
    Tick,
    Ticket,
    TrainerIncarnation,
    TrainerRequest,
)


@dataclass(slots=True)
class Member:
    """One trainer. `from_round`: the first round that waits for it.

    `is_returning`: it was a member before the server was started again. It is waited for, but it has to join again,
    since what it had pushed to the open round is lost.
    """

    epoch: int
    seen_at: float
    from_round: int
    is_returning: bool = False


@dataclass(frozen=True, slots=True)
class Roster:
    """A membership as it is stored over a restart. `members`: trainer -> (epoch, first round that waits for it)."""

    newest: dict[int, int] = field(default_factory=dict)
    joined: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    members: dict[int, tuple[int, int]] = field(default_factory=dict)


class Membership:
    """Trainers with leases of `lease_s` seconds. `expected`: how many have to join before the first round closes."""

    def __init__(self, *, expected: int, lease_s: float) -> None:
        self.expected, self.lease_s = expected, lease_s
        self._members: dict[int, Member] = {}
        self._newest: dict[int, int] = {}  # trainer -> newest epoch ever seen; outlives its membership
        self._joined: set[int] = set()  # in this run of the job
        self._left: set[int] = set()
        self._lost: dict[int, float] = {}  # trainer -> when; for one lease: it may be alive, and join again

    @property
    def started(self) -> bool:
        """Whether all expected trainers have joined once."""
        return len(self._joined) >= self.expected

    @property
    def all_left(self) -> bool:
        """Whether there are no members, at least one trainer has left in order, and none is still to come.

        One that was lost is to come for one lease more.
        """
        return self.started and not self._members and not self._lost and bool(self._left)

    @property
    def all_lost(self) -> bool:
        """Whether there are no members, and none has left in order: the job can only continue if one rejoins."""
        return not self._members and not self._left

    @property
    def is_empty(self) -> bool:
        """Whether there are no members now."""
        return not self._members

    def missing(self) -> list[int]:
        """Trainers that have not joined yet, for an error message; none once the job has started."""
        return [] if self.started else [t for t in range(self.expected) if t not in self._joined]

    def present(self) -> set[int]:
        """All trainers that are members now, or expected back by a server that was started again."""
        return set(self._members)

    def participants(self, round: int) -> set[int]:
        """Trainers that `round` waits for."""
        return {t for t, m in self._members.items() if m.from_round <= round}

    def from_round(self, trainer: int) -> int:
        """The first round that waits for a member."""
        return self._members[trainer].from_round

    def is_new(self, sender: TrainerIncarnation) -> bool:
        """Whether this incarnation is not a member yet."""
        member = self._members.get(sender.trainer)
        return member is None or member.epoch != sender.epoch or member.is_returning

    def returns_to(self, sender: TrainerIncarnation) -> int | None:
        """The first round that waits for an incarnation that a restarted server expects back, else None."""
        member = self._members.get(sender.trainer)
        return member.from_round if member and member.is_returning and member.epoch == sender.epoch else None

    def refusal(self, sender: TrainerIncarnation) -> str:
        """Why requests of this incarnation are refused for ever; '' if they are not."""
        if not 0 <= sender.trainer < self.expected:
            return (
                f"trainer {sender.trainer} is none of this job's: fanin is {self.expected}, so trainers are 0 to "
                f"{self.expected - 1}"
            )
        newest = self._newest.get(sender.trainer, sender.epoch)
        if sender.epoch < newest:
            return f"trainer {sender.trainer} was started again (epoch {newest}); epoch {sender.epoch} is refused"
        return ""

    def refuse(self, ticket: Ticket, sender: TrainerIncarnation) -> Refuse | None:
        """Return the refusal of a request other than to join, or None for a member."""
        reason = self.refusal(sender)
        if reason:
            return Refuse(ticket, reason)
        if self.is_new(sender):
            return Refuse(ticket, f"trainer {sender.trainer} is no member (its lease ran out?)", rejoin=True)
        return None

    def is_gone(self, sender: TrainerIncarnation) -> bool:
        """Whether this incarnation was a member and is none now: it was lost, has left, or is expected back."""
        return self._newest.get(sender.trainer) == sender.epoch and self.is_new(sender)

    def join(self, sender: TrainerIncarnation, now: float, from_round: int) -> None:
        """Admit a new incarnation. The caller has dropped what the one before it had pushed."""
        self._members[sender.trainer] = Member(sender.epoch, now, from_round)
        self._newest[sender.trainer] = sender.epoch
        self._joined.add(sender.trainer)
        self._left.discard(sender.trainer)
        self._lost.pop(sender.trainer, None)

    def touch(self, sender: TrainerIncarnation, now: float) -> None:
        """Renew a member's lease."""
        self._members[sender.trainer].seen_at = now

    def seen(self, sender: TrainerIncarnation, at: float) -> None:
        """Renew the lease of a member whose request was carried out at a time that has passed."""
        member = self._members[sender.trainer]
        member.seen_at = max(member.seen_at, at)

    def at_rest(self) -> dict[int, int]:
        """Return the members, trainer -> epoch, once all expected ones have joined; none if one is to come back."""
        if not self.started or any(m.is_returning for m in self._members.values()):
            return {}
        return {t: m.epoch for t, m in self._members.items()}

    def leave(self, trainer: int) -> None:
        """Remove a trainer on its request; one that was lost is not expected any more."""
        self._members.pop(trainer, None)
        self._lost.pop(trainer, None)
        self._left.add(trainer)

    def expire(self, now: float) -> list[int]:
        """Take out and return the trainers whose lease has run out."""
        gone = sorted(t for t, m in self._members.items() if now - m.seen_at > self.lease_s)
        self._lost = {t: at for t, at in self._lost.items() if now - at <= self.lease_s}
        for trainer in gone:
            del self._members[trainer]
            self._lost[trainer] = now
        return gone

    def extend_leases(self, seconds: float, now: float) -> None:
        """Make leases longer by the time in which the server itself was paused."""
        for member in self._members.values():
            member.seen_at = min(now, member.seen_at + seconds)
        self._lost = {t: min(now, at + seconds) for t, at in self._lost.items()}

    def roster(self) -> Roster:
        """Return what a restart needs."""
        members = {t: (m.epoch, m.from_round) for t, m in self._members.items()}
        return Roster(dict(self._newest), frozenset(self._joined), frozenset(self._left), members)

    def restore(self, roster: Roster, now: float) -> None:
        """Go on from a roster. Its members have one lease to come back, and those that were lost too."""
        self._newest, self._joined, self._left = dict(roster.newest), set(roster.joined), set(roster.left)
        self._members = {t: Member(e, now, first, is_returning=True) for t, (e, first) in roster.members.items()}
        self._lost = dict.fromkeys(self._joined - self._left - self._members.keys(), now)


@dataclass(slots=True)
class _Here:
    """A trainer that waits. `tickets`: of the same request, repeated."""

    sender: TrainerIncarnation
    number: int
    part: object
    tickets: list[Ticket]
    round: int  # the open one when it came


class Meetings:
    """The meetings at one server, whose members are `members`. Not thread-safe."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._next = 0
        self._last: tuple[object, ...] = ()
        self._here: dict[int, _Here] = {}

    @property
    def waiting(self) -> AbstractSet[int]:
        """Trainers that are there, and wait for the others."""
        return self._here.keys()

    def meet(self, event: Meet, round: int) -> list[Instruction]:
        """Take a member's request. `round`: the open round, for its answer."""
        trainer, number = event.sender.trainer, event.number
        if number < 0:
            following = max([self._next, *(here.number for here in self._here.values())])
            gone = self.give_up(trainer) if number == GIVE_UP else []
            return [*gone, Reply(event.ticket, following)]
        if self._next and number == self._next - 1:
            return [Met(event.ticket, round, self._last)]
        if number < self._next or (self._next and number > self._next):
            reason = f"trainer {trainer} asks for meeting {number}, but the next is {self._next}: was it declared lost?"
            return [Refuse(event.ticket, reason)]
        here = self._here.get(trainer)
        if here is not None and (here.sender, here.number) == (event.sender, number):
            here.tickets.append(event.ticket)
            return []
        replaced = (
            [] if here is None else [Refuse(t, f"trainer {trainer} asks for another meeting") for t in here.tickets]
        )
        self._here[trainer] = _Here(event.sender, number, event.part, [event.ticket], round)
        return list(replaced)

    def give_up(self, trainer: int, round: int | None = None) -> list[Instruction]:
        """Take out a trainer that does not wait any more, as a push or barrier of `round` shows.

        One of a round before it came is a repetition that was delayed, and shows nothing.
        """
        here = self._here.get(trainer)
        if here is None or (round is not None and round < here.round):
            return []
        return self._refuse(here, f"trainer {trainer} has given up waiting in meeting {here.number}", rejoin=False)

    def settle(self, round: int) -> list[Instruction]:
        """Refuse those that are no longer members, and close the meeting if all have arrived. After every event."""
        out: list[Instruction] = []
        for here in [here for here in self._here.values() if self._members.is_new(here.sender)]:
            out += self._refuse(here, f"trainer {here.sender.trainer} is no member (its lease ran out?)", rejoin=True)
        if not self._here or not self._members.started or self._members.present() - self._here.keys():
            return out
        number = max(here.number for here in self._here.values())
        behind = [here for here in self._here.values() if here.number < number]
        for here in behind:
            lost = f"what came of meeting {here.number} was lost when the server was started again"
            out += self._refuse(here, lost, rejoin=False)
        if behind:
            return out
        self._last, self._next = tuple(self._here[t].part for t in sorted(self._here)), number + 1
        out += [Met(ticket, round, self._last) for here in self._here.values() for ticket in here.tickets]
        self._here.clear()
        return out

    def _refuse(self, here: _Here, reason: str, *, rejoin: bool) -> list[Instruction]:
        del self._here[here.sender.trainer]
        return [Refuse(ticket, reason, rejoin=rejoin) for ticket in here.tickets]


def _payloads(event: TrainerRequest) -> Iterable[Payload]:
    return event.payloads.values() if isinstance(event, Step) else [event.payload] if isinstance(event, Push) else []


class RoundMachine:
    """Base of the machines of one pserver. Not thread-safe: one event at a time.

    `handlers`: event -> its handler. Requests of non-members and of replaced incarnations are refused here, their
    payloads released; every request of a member renews its lease. A lost trainer may still leave, and is waited for no
    more; a leave may be repeated.
    """

    handlers: Mapping[type, Callable[[Any], list[Instruction]]]

    def __init__(self, members: Membership) -> None:
        self.members, self.meetings = members, Meetings(members)
        self.now = 0.0  # of the event in progress
        self._ticked_at = math.inf  # not yet

    def _credit_pause(self, tick: Tick) -> None:
        """Add to the leases the time in which this server was paused: stopped, swapped out, not scheduled.

        It received nothing meanwhile. A pause short of a quarter of a lease costs no trainer its membership,
        since a heartbeat is sent in the first half of a lease.
        """
        late_s = self.now - self._ticked_at - tick.every_s
        if late_s > max(tick.every_s, self.members.lease_s / 4):
            self.members.extend_leases(late_s, self.now)
        self._ticked_at = self.now

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event; `now` in seconds of any clock that only goes forward."""
        self.now = now
        if isinstance(event, TrainerRequest) and not isinstance(event, Join):
            refusal = self.members.refuse(event.ticket, event.sender)
            if refusal is None:
                self.members.touch(event.sender, now)
            elif not (isinstance(event, Leave) and self.members.is_gone(event.sender)):
                return [refusal, *(Release(p) for p in _payloads(event))]
        if isinstance(event, Tick):
            self._credit_pause(event)
        out = self.handlers[type(event)](event)
        return [*out, *self.meetings.settle(self.open_round())] if self.meetings.waiting else out

    def standing(self) -> Standing | None:
        """Where the machine stands, if nothing is under way, so that steps of all members may be carried out for it."""
        raise NotImplementedError

    def passed(self, now: Standing) -> None:
        """Go on from here: the machine was at rest, and as many steps were carried out as if it had handled them."""
        for trainer, at in now.seen_at.items():
            self.members.seen(TrainerIncarnation(trainer, now.members[trainer]), at)

    def open_round(self) -> int:
        """The open round; 0 where there are none."""
        return 0

    def version(self, block: str) -> int:
        """Return how many updates of a block have been applied; 0 where rounds are counted instead."""
        return 0

    def expected(self, round: int) -> tuple[int, ...]:
        """Trainers without which `round` cannot be closed as things are, ascending; none if it is not open."""
        return ()

    def waits_for(self) -> list[int]:
        """Stragglers: trainers for which others wait in the open round."""
        return []
