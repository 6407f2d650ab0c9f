"""Synchronous rounds, model-checked: any order, losses, duplicates, retries, kills and new incarnations."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ps.rounds.machine import Membership
from penstock.ps.rounds.messages import (
    AllLeft,
    Applied,
    Barrier,
    Close,
    Event,
    FailedRound,
    Heartbeat,
    Instruction,
    Join,
    Leave,
    Lost,
    Pull,
    Push,
    Refuse,
    Release,
    Reply,
    Tick,
    TrainerIncarnation,
)
from penstock.ps.rounds.sync import SyncRounds

LEASE_S = 10.0
FULL = "the table is full"
BLOCKS = ("w.block0", "w.block1")


@dataclass
class Trainer:
    """Follows the protocol one request at a time; a lost response makes it ask again.

    Who is lost in the middle of a step joins again and pushes again, to the round that it was in, what it had pushed.
    """

    sender: TrainerIncarnation
    rounds_to_do: int
    phase: str = "join"
    round: int = 0
    first: int = 0  # of the rounds that wait for it
    todo: list[str] = field(default_factory=list)
    pushed: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)  # of what it had pushed

    def request(self, ticket: int, payload: int) -> Event:
        """Return what it asks for now."""
        if self.phase == "join":
            return Join(ticket, self.sender)
        if self.phase == "push":
            return Push(ticket, self.sender, self.round, (self.again or self.todo)[0], payload)
        if self.phase == "barrier":
            return Barrier(ticket, self.sender, self.round)
        if self.phase == "pull":
            return Pull(ticket, self.sender, self.round)
        return Leave(ticket, self.sender)

    def answered(self, answer: Reply | Refuse) -> None:
        """Go on with what comes next."""
        if isinstance(answer, Refuse):
            assert answer.rejoin or answer.reason == FULL, answer.reason
            self.phase = "join" if answer.rejoin else "leave"
        elif self.phase == "join":
            assert answer.round >= self.round, "what was acknowledged is not lost"
            self.first, self.again = answer.round, list(self.pushed)
            self.phase = self._pushes_or("barrier") if self.pushed else self._goes_on(answer.round)
        elif self.phase == "pull":
            self.todo = list(BLOCKS)
            self.phase = "push" if self.rounds_to_do else "leave"
        elif self.phase == "push":
            self._has_pushed()
            self.phase = self._pushes_or("barrier")
        elif self.phase == "barrier":
            self.rounds_to_do -= 1
            self.pushed = []
            assert answer.round > self.round, "a barrier is answered when its round is applied"
            self.phase = self._goes_on(answer.round)
        else:
            self.phase = "done"

    def _pushes_or(self, next: str) -> str:
        return "push" if self.again or self.todo else next

    def _has_pushed(self) -> None:
        if self.again:
            self.again.pop(0)
        else:
            self.pushed.append(self.todo.pop(0))

    def _goes_on(self, open_round: int) -> str:
        self.round = max(open_round, self.first, self.round)
        return "pull"


class World:
    """A pserver's machine, its trainers, and a network that loses and repeats."""

    def __init__(self, trainers: list[Trainer], expected: int) -> None:
        self.machine = SyncRounds(Membership(expected=expected, lease_s=LEASE_S))
        self.trainers = trainers
        self.now = 0.0
        self.tickets: dict[int, Trainer | None] = {}  # open requests; None: nobody waits for the answer any more
        self.waiting: set[int] = set()  # trainers (by identity) with an open request
        self.payloads: dict[int, tuple[TrainerIncarnation, int, str]] = {}  # handed in and not given back yet
        self.past: list[Push] = []
        self.closed: list[Close] = []
        self.to_apply: list[int] = []
        self.applied_pushes: set[tuple[TrainerIncarnation, int, str]] = set()
        self.finished = 0
        self.next_id = 0

    def fresh(self) -> int:
        self.next_id += 1
        return self.next_id

    def send(self, trainer: Trainer, *, response_lost: bool = False) -> None:
        """Let a trainer ask; a lost response leaves it where it was."""
        ticket, payload = self.fresh(), self.fresh()
        event = trainer.request(ticket, payload)
        if isinstance(event, Push):
            self.payloads[payload] = (trainer.sender, event.round, event.block)
            self.past.append(event)
        self.tickets[ticket] = None if response_lost else trainer
        if not response_lost:
            self.waiting.add(id(trainer))
        self.feed(event)

    def repeat(self, event: Push) -> None:
        """Deliver an old push again."""
        ticket, payload = self.fresh(), self.fresh()
        self.payloads[payload] = (event.sender, event.round, event.block)
        self.tickets[ticket] = None
        self.feed(Push(ticket, event.sender, event.round, event.block, payload))

    def feed(self, event: Event) -> None:
        for instruction in self.machine.handle(event, self.now):
            self.carry_out(instruction)

    def carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Reply | Refuse):
            assert instruction.ticket in self.tickets, "a ticket is answered once"
            trainer = self.tickets.pop(instruction.ticket)
            if trainer is not None:
                self.waiting.discard(id(trainer))
                if trainer in self.trainers:
                    trainer.answered(instruction)
        elif isinstance(instruction, Release):
            del self.payloads[instruction.payload]
        elif isinstance(instruction, Close):
            self.close(instruction)
        elif isinstance(instruction, AllLeft):
            self.finished += 1

    def close(self, close: Close) -> None:
        assert close.round == len(self.closed), "rounds close in order, one at a time"
        assert not self.to_apply
        incarnations: set[TrainerIncarnation] = set()
        for block, payloads in close.contributions.items():
            owners = [self.payloads.pop(p) for p in payloads]
            incarnations |= {o[0] for o in owners}
            assert [o[0].trainer for o in owners] == list(close.members), "each member once, in a fixed order"
            assert all(o[1:] == (close.round, block) for o in owners)
            assert not self.applied_pushes & set(owners), "nothing is applied twice"
            self.applied_pushes |= set(owners)
        assert len(incarnations) == len(close.members), "a round never mixes what two incarnations pushed"
        assert set(close.contributions) == (set(BLOCKS) if close.members else set())
        self.closed.append(close)
        self.to_apply.append(close.round)

    def apply(self, *, fails: bool = False) -> None:
        if not self.to_apply:
            return
        round = self.to_apply.pop()
        if fails:
            self.closed.pop()
            self.applied_pushes = {p for p in self.applied_pushes if p[1] != round}
        self.feed(FailedRound(round, FULL) if fails else Applied(round))

    def lose(self, victim: Trainer) -> None:
        """Let nothing be heard of a trainer for longer than its lease."""
        for _ in range(4):
            self.now += LEASE_S / 3
            self.beat(but=victim)
            self.feed(Tick())

    def beat(self, *, but: Trainer | None = None) -> None:
        for trainer in self.trainers:
            if trainer is not but and not self.machine.members.is_new(trainer.sender):
                ticket = self.fresh()
                self.tickets[ticket] = None
                self.feed(Heartbeat(ticket, trainer.sender))

    def kill(self, trainer: Trainer) -> None:
        self.trainers.remove(trainer)
        self.waiting.discard(id(trainer))
        for ticket, who in self.tickets.items():
            if who is trainer:
                self.tickets[ticket] = None

    def run_to_the_end(self) -> None:
        """Without further faults everybody must finish."""
        for _ in range(1000):
            idle = [t for t in self.trainers if id(t) not in self.waiting and t.phase != "done"]
            for trainer in idle:
                self.send(trainer)
            self.apply()
            if all(t.phase == "done" for t in self.trainers) and not self.to_apply:
                return
            self.now += LEASE_S / 3
            self.beat()
            self.feed(Tick())
        raise AssertionError(f"stuck: {[(t.sender, t.phase, t.round) for t in self.trainers]}")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), num_trainers=st.integers(1, 3), num_rounds=st.integers(1, 4))
def test_every_round_is_closed_once_over_those_who_are_left(
    data: st.DataObject, num_trainers: int, num_rounds: int
) -> None:
    trainers = [
        Trainer(TrainerIncarnation(t, 0), data.draw(st.integers(1, num_rounds), label=f"rounds of {t}"))
        for t in range(num_trainers)
    ]
    world = World(trainers, num_trainers)
    for _ in range(data.draw(st.integers(0, 60), label="faulty steps")):
        action = data.draw(
            st.sampled_from(["send", "send", "send", "lose", "apply", "fail", "kill", "away", "repeat", "time"])
        )
        idle = [t for t in world.trainers if id(t) not in world.waiting and t.phase != "done"]
        if action in {"send", "lose"} and idle:
            world.send(data.draw(st.sampled_from(idle)), response_lost=action == "lose")
        elif action in {"apply", "fail"}:
            world.apply(fails=action == "fail")
        elif action == "repeat" and world.past:
            world.repeat(data.draw(st.sampled_from(world.past)))
        elif action == "time":
            world.now += LEASE_S / 3
            world.beat()
            world.feed(Tick())
        elif action == "away" and world.trainers:
            world.lose(data.draw(st.sampled_from(world.trainers)))
        elif action == "kill" and world.trainers:
            victim = data.draw(st.sampled_from(world.trainers))
            world.kill(victim)
            if not world.machine.members.started or data.draw(st.booleans(), label="started again"):
                world.trainers.append(Trainer(TrainerIncarnation(victim.sender.trainer, victim.sender.epoch + 1), 1))
    world.run_to_the_end()
    for _ in range(5):  # whoever was killed and not started again runs out of its lease
        world.now += LEASE_S
        world.feed(Tick())
        world.apply()
    assert not world.payloads, "every payload comes back"
    assert not world.tickets, "every ticket is answered"
    assert world.finished == (1 if world.trainers else world.finished)


def started(num_trainers: int) -> tuple[SyncRounds, list[TrainerIncarnation]]:
    """Return a machine that all trainers have joined."""
    machine = SyncRounds(Membership(expected=num_trainers, lease_s=LEASE_S))
    senders = [TrainerIncarnation(t, 0) for t in range(num_trainers)]
    for ticket, sender in enumerate(senders):
        machine.handle(Join(ticket, sender), 0.0)
    return machine, senders


def test_a_lost_trainer_closes_the_round_over_the_rest() -> None:
    machine, (a, b) = started(2)
    machine.handle(Push(10, a, 0, "w", 100), 1.0)
    machine.handle(Push(11, b, 0, "w", 101), 1.0)
    assert machine.handle(Barrier(12, a, 0), 9.0) == []
    assert machine.handle(Tick(), 12.0) == [Lost(1), Release(101), Close(0, {"w": (100,)}, (0,))]


def test_no_round_closes_before_all_trainers_have_joined() -> None:
    machine = SyncRounds(Membership(expected=2, lease_s=LEASE_S))
    a = TrainerIncarnation(0, 0)
    machine.handle(Join(1, a), 0.0)
    machine.handle(Push(2, a, 0, "w", 100), 0.0)
    assert machine.handle(Barrier(3, a, 0), 0.0) == []
    assert machine.members.missing() == [1]
    b = TrainerIncarnation(1, 0)
    assert machine.handle(Join(4, b), 1.0) == [Reply(4, 0)], "it is in the first round, however late it comes"
    machine.handle(Push(5, b, 0, "w", 101), 1.0)
    assert machine.handle(Barrier(6, b, 0), 1.0) == [Close(0, {"w": (100, 101)}, (0, 1))]


def test_a_joiner_counts_from_the_next_round_during_a_barrier() -> None:
    machine, (a, b) = started(2)
    machine.handle(Push(1, a, 0, "w", 100), 0.0)
    machine.handle(Barrier(2, a, 0), 0.0)
    assert machine.handle(Join(3, TrainerIncarnation(1, 1)), 0.0)[-2:] == [Reply(3, 1), Close(0, {"w": (100,)}, (0,))]
    (refused,) = machine.handle(Heartbeat(4, b), 0.0)
    assert isinstance(refused, Refuse)
    assert "started again (epoch 1); epoch 0 is refused" in refused.reason


def test_pushes_of_a_trainer_lost_at_a_barrier_are_discarded() -> None:
    machine, (a, b, c) = started(3)
    machine.handle(Push(10, b, 0, "w", 100), 0.0)
    assert machine.handle(Barrier(11, a, 0), 9.0) == []
    machine.handle(Heartbeat(12, c), 9.0)
    assert machine.handle(Tick(), 11.0) == [Lost(1), Release(100)]
    assert machine.handle(Join(13, b), 11.0) == [Reply(13, 1)], "it counts from the next round"
    assert machine.handle(Push(14, b, 0, "w", 101), 11.0) == [Reply(14, 0), Release(101)]
    assert machine.handle(Barrier(15, b, 0), 11.0) == [], "it goes on when the others do"
    assert machine.waits_for() == [2]
    assert machine.handle(Barrier(16, c, 0), 12.0) == [Close(0, {}, (0, 2))]
    assert machine.handle(Applied(0), 12.0) == [Reply(11, 1), Reply(16, 1), Reply(15, 1)]
    assert machine.handle(Push(17, b, 1, "w", 102), 12.0) == [Reply(17, 1)]
    for ticket, sender in enumerate((a, b), 18):
        assert machine.handle(Barrier(ticket, sender, 1), 12.0) == []
    assert machine.handle(Barrier(20, c, 1), 12.0) == [Close(1, {"w": (102,)}, (0, 1, 2))]


def test_a_wait_for_the_next_round_survives_loss_of_all_members() -> None:
    machine, (a, *_) = started(3)
    assert machine.handle(Barrier(10, a, 0), 0.0) == []
    c = TrainerIncarnation(2, 1)
    assert machine.handle(Join(11, c), 0.0) == [Reply(11, 1)], "it may read round 1, and wait for that"
    assert machine.handle(Tick(), 11.0)[:2] == [Lost(0), Refuse(10, "trainer 0 has left", rejoin=True)]
    assert machine.members.is_empty
    assert machine.handle(Join(12, c), 11.0) == [Reply(12, 1), Close(0, {}, ())]


def test_a_failed_round_is_refused_to_all_and_can_be_repeated() -> None:
    machine, (a, b) = started(2)
    machine.handle(Push(10, a, 0, "w", 100), 0.0)
    machine.handle(Barrier(11, a, 0), 0.0)
    assert machine.handle(Barrier(12, b, 0), 0.0) == [Close(0, {"w": (100,)}, (0, 1))]
    assert machine.handle(Pull(13, a, 0), 0.0) == []
    failed = machine.handle(FailedRound(0, FULL), 0.0)
    assert failed == [Refuse(11, FULL), Refuse(12, FULL), Reply(13, 0)]
    assert machine.handle(Barrier(14, a, 0), 0.0) == [Refuse(14, FULL)], "its answer was lost; so is its part"
    assert machine.handle(Push(15, a, 0, "w", 101), 0.0) == [Refuse(15, FULL), Release(101)]
    assert machine.handle(Join(16, a), 0.0) == [Reply(16, 0)]
    assert machine.handle(Push(17, a, 0, "w", 102), 0.0) == [Reply(17, 0)]
    assert machine.handle(Barrier(18, a, 0), 0.0) == []
    assert machine.handle(Leave(19, b), 0.0) == [Reply(19, 0), Close(0, {"w": (102,)}, (0,))]


def test_a_pull_waits_until_the_round_before_is_applied() -> None:
    machine, (a,) = started(1)
    machine.handle(Push(1, a, 0, "w", 100), 0.0)
    machine.handle(Barrier(2, a, 0), 0.0)
    assert machine.handle(Pull(3, a, 1), 0.0) == []
    assert machine.handle(Applied(0), 0.0) == [Reply(2, 1), Reply(3, 1)]


@pytest.mark.parametrize("round", [1, 7])
def test_a_round_that_is_not_open_is_refused(round: int) -> None:
    machine, (a,) = started(1)
    pushed = machine.handle(Push(1, a, round, "w", 100), 0.0)
    assert pushed == [Refuse(1, f"round {round} is not open; round 0 is"), Release(100)]
    assert machine.handle(Barrier(2, a, round), 0.0) == [Refuse(2, f"round {round} is not open; round 0 is")]


def test_a_block_after_the_barrier_is_refused_unless_repeated() -> None:
    machine, (a, _) = started(2)
    machine.handle(Push(1, a, 0, "w", 100), 0.0)
    machine.handle(Barrier(2, a, 0), 0.0)
    assert machine.handle(Push(3, a, 0, "w", 101), 0.0) == [Reply(3, 0), Release(101)]
    (refused, released) = machine.handle(Push(4, a, 0, "v", 102), 0.0)
    assert isinstance(refused, Refuse)
    assert released == Release(102)


def test_serving_ends_when_all_have_left() -> None:
    machine, (a, b) = started(2)
    assert machine.handle(Leave(1, a), 0.0) == [Reply(1, 0)]
    assert machine.handle(Leave(2, b), 0.0) == [Reply(2, 0), AllLeft()]


def test_a_lost_trainer_may_leave_and_a_leave_may_be_repeated() -> None:
    machine, (a, b) = started(2)
    machine.handle(Push(10, a, 0, "w", 100), 0.0)
    assert machine.handle(Leave(11, b), 9.0) == [Reply(11, 0)]
    assert machine.handle(Leave(12, b), 9.0) == [Reply(12, 0)], "its first answer was lost"
    assert machine.handle(Tick(), 11.0) == [Lost(0), Release(100)]
    assert machine.handle(Leave(13, a), 12.0) == [Reply(13, 0), AllLeft()], "it is not waited for another lease"
    (stranger,) = machine.handle(Leave(14, TrainerIncarnation(0, 7)), 12.0)
    assert isinstance(stranger, Refuse), "it has never joined"


def test_serving_does_not_end_while_a_lost_trainer_may_come_back() -> None:
    machine, (a, b) = started(2)
    machine.handle(Leave(1, a), 0.0)
    assert machine.handle(Tick(), 11.0) == [Lost(1)]
    assert machine.handle(Tick(), 20.0) == []
    assert machine.handle(Join(2, b), 20.0) == [Reply(2, 0)]
    assert machine.handle(Tick(), 29.0) == []
    assert machine.handle(Tick(), 31.0) == [Lost(1)]
    assert machine.handle(Tick(), 41.0) == []
    assert machine.handle(Tick(), 41.5) == [AllLeft()], "it has not come back within another lease"


def test_a_server_that_stood_still_itself_takes_nobody_for_lost() -> None:
    machine, (a, _) = started(2)
    for now in (2.0, 4.0):  # late, but not long enough to matter
        assert machine.handle(Tick(0.25), now) == []
    assert machine.handle(Tick(0.25), 60.25) == [], "both were heard 4 s before it stood still"
    assert machine.handle(Heartbeat(11, a), 60.25) == [Reply(11, 0)]
    for now in (62.0, 64.0, 66.0):
        assert machine.handle(Tick(0.25), now) == []
    assert machine.handle(Tick(0.25), 66.5) == [Lost(1)], "the rest of its lease is over"
