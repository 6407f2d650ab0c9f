"""Who takes part: incarnations, leases, and the round from which a trainer counts. No clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.ps.messages import Refuse, Sender, Ticket


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
    """A membership as it is kept over a restart. `members`: trainer -> (epoch, first round that waits for it)."""

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
        """Whether nobody is left, at least one trainer has left in order, and none is still to come.

        One that was lost is to come for one lease more.
        """
        return self.started and not self._members and not self._lost and bool(self._left)

    @property
    def all_lost(self) -> bool:
        """Whether nobody is left, and nobody has left in order: the job can only go on if one comes back."""
        return not self._members and not self._left

    @property
    def is_empty(self) -> bool:
        """Whether nobody is a member now."""
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

    def is_new(self, sender: Sender) -> bool:
        """Whether this incarnation is not a member yet."""
        member = self._members.get(sender.trainer)
        return member is None or member.epoch != sender.epoch or member.is_returning

    def returns_to(self, sender: Sender) -> int | None:
        """The first round that waits for an incarnation that a restarted server expects back, else None."""
        member = self._members.get(sender.trainer)
        return member.from_round if member and member.is_returning and member.epoch == sender.epoch else None

    def refusal(self, sender: Sender) -> str:
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

    def refuse(self, ticket: Ticket, sender: Sender) -> Refuse | None:
        """Return the refusal of a request other than to join, or None for a member."""
        reason = self.refusal(sender)
        if reason:
            return Refuse(ticket, reason)
        if self.is_new(sender):
            return Refuse(ticket, f"trainer {sender.trainer} is no member (its lease ran out?)", rejoin=True)
        return None

    def is_gone(self, sender: Sender) -> bool:
        """Whether this incarnation was a member and is none now: it was lost, has left, or is expected back."""
        return self._newest.get(sender.trainer) == sender.epoch and self.is_new(sender)

    def join(self, sender: Sender, now: float, from_round: int) -> None:
        """Admit a new incarnation. The caller has dropped what the one before it had pushed."""
        self._members[sender.trainer] = Member(sender.epoch, now, from_round)
        self._newest[sender.trainer] = sender.epoch
        self._joined.add(sender.trainer)
        self._left.discard(sender.trainer)
        self._lost.pop(sender.trainer, None)

    def touch(self, sender: Sender, now: float) -> None:
        """Renew a member's lease."""
        self._members[sender.trainer].seen_at = now

    def leave(self, trainer: int) -> None:
        """Take out a trainer that says so; one that was lost is not to come any more."""
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

    def stood_still(self, seconds: float, now: float) -> None:
        """The server heard nobody for so long, and that is not their fault: leases are as much longer."""
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
