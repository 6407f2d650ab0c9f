"""Updates at once: every push is applied exactly once, one at a time a block, whatever is repeated or lost."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ps.rounds.immediate import ImmediateUpdates
from penstock.ps.rounds.machine import Membership
from penstock.ps.rounds.messages import (
    AllLeft,
    AppliedPush,
    Apply,
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

LEASE_S = 10.0
BLOCKS = ("u", "v")


class World:
    """Trainers that push step after step; a response may be lost, a request repeated."""

    def __init__(self, num_trainers: int) -> None:
        self.machine = ImmediateUpdates(Membership(expected=num_trainers, lease_s=LEASE_S))
        self.next_id = 0
        self.open: set[int] = set()
        self.held: dict[int, Push] = {}
        self.applying: dict[str, int] = {}
        self.applied: list[tuple[TrainerIncarnation, int, str]] = []
        self.past: list[Push] = []
        self.acknowledged: set[int] = set()
        for trainer in range(num_trainers):
            self.carry_out(self.machine.handle(Join(self.ticket(), TrainerIncarnation(trainer, 0)), 0.0))

    def ticket(self) -> int:
        self.next_id += 1
        self.open.add(self.next_id)
        return self.next_id

    def push(self, sender: TrainerIncarnation, step: int, block: str) -> int:
        self.next_id += 1
        event = Push(self.ticket(), sender, step, block, self.next_id + 1_000_000)
        self.held[event.payload] = event
        self.past.append(event)
        self.carry_out(self.machine.handle(event, 0.0))
        return event.ticket

    def carry_out(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Reply | Refuse):
                self.open.remove(one.ticket)
                self.acknowledged.add(one.ticket)
            elif isinstance(one, Release):
                del self.held[one.payload]
            elif isinstance(one, Apply):
                assert one.block not in self.applying, "one at a time a block"
                self.applying[one.block] = one.payload

    def apply(self, block: str) -> None:
        if block in self.applying:
            payload = self.applying.pop(block)
            push = self.held.pop(payload)
            self.applied.append((push.sender, push.round, block))
            self.carry_out(self.machine.handle(AppliedPush(payload), 0.0))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_trainers=st.integers(1, 3))
def test_every_push_is_applied_exactly_once(data: st.DataObject, num_trainers: int) -> None:
    world = World(num_trainers)
    steps = {(t, b): 0 for t in range(num_trainers) for b in BLOCKS}
    last: dict[tuple[int, str], int] = {}  # ticket of the newest push of a trainer and block
    for _ in range(data.draw(st.integers(1, 60), label="actions")):
        action = data.draw(st.sampled_from(["push", "push", "repeat", "apply"]))
        if action == "push":
            key = data.draw(st.sampled_from(sorted(steps)))
            if last.get(key) in world.open:
                continue  # a trainer pushes the next step of a block after the one before is acknowledged
            last[key] = world.push(TrainerIncarnation(key[0], 0), steps[key], key[1])
            steps[key] += 1
        elif action == "repeat" and world.past:
            old = data.draw(st.sampled_from(world.past))
            world.push(old.sender, old.round, old.block)
        else:
            world.apply(data.draw(st.sampled_from(BLOCKS)))
    for _ in range(len(world.past) + 1):
        for block in BLOCKS:
            world.apply(block)
    assert sorted(map(str, world.applied)) == sorted(
        str((TrainerIncarnation(t, 0), step, b)) for (t, b), count in steps.items() for step in range(count)
    )
    assert not world.open, "every ticket is answered"
    assert not world.held, "every payload comes back"


def joined(num_trainers: int) -> tuple[ImmediateUpdates, list[TrainerIncarnation]]:
    """Return a machine that all trainers have joined."""
    machine = ImmediateUpdates(Membership(expected=num_trainers, lease_s=LEASE_S))
    senders = [TrainerIncarnation(t, 0) for t in range(num_trainers)]
    for ticket, sender in enumerate(senders):
        machine.handle(Join(ticket, sender), 0.0)
    return machine, senders


def test_an_acknowledgement_comes_after_the_update() -> None:
    machine, (a,) = joined(1)
    assert machine.handle(Push(1, a, 0, "w", 100), 0.0) == [Apply(100, "w", a, 0, 0)]
    assert machine.handle(AppliedPush(100), 0.0) == [Reply(1, 0)]
    assert machine.handle(Push(2, a, 0, "w", 101), 0.0) == [Reply(2, 0), Release(101)]


def test_a_repetition_of_the_push_being_applied_waits_for_it() -> None:
    machine, (a,) = joined(1)
    machine.handle(Push(1, a, 0, "w", 100), 0.0)
    assert machine.handle(Push(2, a, 0, "w", 101), 0.0) == [Release(101)]
    assert machine.handle(AppliedPush(100), 0.0) == [Reply(1, 0), Reply(2, 0)]


def test_staleness_counts_others_updates_since_the_last_pull() -> None:
    machine, (a, b) = joined(2)
    for step in range(3):
        machine.handle(Push(10 + step, b, step, "w", 100 + step), 0.0)
        machine.handle(AppliedPush(100 + step), 0.0)
    assert machine.handle(Push(20, a, 0, "w", 200), 0.0) == [Apply(200, "w", a, 0, 3)]
    machine.handle(AppliedPush(200), 0.0)
    machine.handle(Pull(30, a, 0), 0.0)
    assert machine.handle(Push(21, a, 1, "w", 201), 0.0) == [Apply(201, "w", a, 1, 0)]
    machine.handle(AppliedPush(201), 0.0)
    assert machine.handle(Push(13, b, 3, "w", 103), 0.0) == [Apply(103, "w", b, 3, 2)]


def test_a_new_incarnation_restarts_its_steps_and_fences_the_old() -> None:
    machine, (a,) = joined(1)
    machine.handle(Push(1, a, 5, "w", 100), 0.0)
    machine.handle(AppliedPush(100), 0.0)
    again = TrainerIncarnation(0, 1)
    machine.handle(Join(2, again), 0.0)
    assert machine.handle(Push(3, again, 0, "w", 101), 0.0) == [Apply(101, "w", again, 0, 0)]
    (refused, released) = machine.handle(Push(4, a, 6, "w", 102), 0.0)
    assert isinstance(refused, Refuse)
    assert not refused.rejoin
    assert released == Release(102)


def test_what_was_applied_before_a_restart_is_not_applied_again() -> None:
    machine = ImmediateUpdates(Membership(expected=1, lease_s=LEASE_S), applied={(0, "w"): (0, 7)})
    a = TrainerIncarnation(0, 0)
    assert machine.handle(Join(1, a), 0.0) == [Reply(1, 7)]
    assert machine.handle(Push(2, a, 7, "w", 100), 0.0) == [Reply(2, 7), Release(100)]
    assert machine.handle(Push(3, a, 8, "w", 101), 0.0) == [Apply(101, "w", a, 8, 0)]


def test_a_join_returns_the_incarnations_newest_applied_step() -> None:
    machine, (a, b) = joined(2)
    for number, (sender, step, block) in enumerate([(a, 5, "w"), (a, 3, "v"), (b, 9, "w")]):
        machine.handle(Push(10 + number, sender, step, block, 100 + number), 0.0)
        machine.handle(AppliedPush(100 + number), 0.0)
    assert machine.handle(Join(20, a), 0.0) == [Reply(20, 5)]
    assert machine.handle(Join(21, TrainerIncarnation(1, 1)), 0.0) == [Reply(21, 0)]
    machine.handle(Leave(22, a), 0.0)
    assert machine.handle(Join(23, a), 0.0) == [Reply(23, 0)]


def test_serving_ends_after_the_last_update_of_the_last_trainer() -> None:
    machine, (a, b) = joined(2)
    machine.handle(Push(1, a, 0, "w", 100), 0.0)
    assert machine.handle(Leave(2, b), 0.0) == [Reply(2, 0)]
    assert machine.handle(Leave(3, a), 0.0) == [Reply(3, 0)]
    assert machine.handle(AppliedPush(100), 0.0) == [Reply(1, 0), AllLeft()]


def test_a_lost_trainer_is_named() -> None:
    machine, (_, b) = joined(2)
    machine.handle(Pull(1, b, 0), 9.0)
    assert machine.handle(Tick(), 11.0) == [Lost(0)]
