"""A step of a trainer decides as its pushes and its barrier would one by one."""

from __future__ import annotations

from penstock.ps.rounds.immediate import ImmediateUpdates
from penstock.ps.rounds.machine import Membership
from penstock.ps.rounds.messages import (
    Applied,
    AppliedPush,
    Apply,
    Barrier,
    Close,
    FailedPush,
    Instruction,
    Join,
    Pull,
    Push,
    Refuse,
    Release,
    Reply,
    Step,
    TrainerIncarnation,
)
from penstock.ps.rounds.sync import SyncRounds

A, B, STRANGER = (TrainerIncarnation(trainer, 1) for trainer in range(3))


def sync() -> SyncRounds:
    machine = SyncRounds(Membership(expected=2, lease_s=10))
    for ticket, sender in enumerate((A, B)):
        machine.handle(Join(ticket, sender), 0)
    return machine


def immediate() -> ImmediateUpdates:
    machine = ImmediateUpdates(Membership(expected=2, lease_s=10))
    for ticket, sender in enumerate((A, B)):
        machine.handle(Join(ticket, sender), 0)
    return machine


def test_steps_close_a_round_as_pushes_and_barriers_do() -> None:
    one_by_one, at_once = sync(), sync()
    for ticket, (sender, first) in enumerate(((B, 20), (A, 10)), start=5):
        for block, payload in (("w", first), ("b", first + 1)):
            one_by_one.handle(Push(100 + payload, sender, 0, block, payload), 1)
        expected = one_by_one.handle(Barrier(ticket, sender, 0), 1)
        assert at_once.handle(Step(ticket, sender, 0, {"w": first, "b": first + 1}), 1) == expected
    assert expected == [Close(0, {"b": (11, 21), "w": (10, 20)}, (0, 1))]
    assert at_once.handle(Applied(0), 1) == [Reply(5, 1), Reply(6, 1)]


def test_a_repeated_step_gives_its_payloads_back() -> None:
    machine = sync()
    machine.handle(Step(5, A, 0, {"w": 10, "b": 11}), 1)
    again: list[Instruction] = machine.handle(Step(6, A, 0, {"w": 12, "b": 13}), 1)
    assert again == [Release(12), Release(13)], "and waits for the round, as the first does"
    machine.handle(Step(7, B, 0, {"w": 20}), 1)
    assert machine.handle(Applied(0), 1) == [Reply(5, 1), Reply(6, 1), Reply(7, 1)]
    assert machine.handle(Step(8, A, 0, {"w": 14}), 1) == [Release(14), Reply(8, 1)], "the round is over"


def test_a_step_that_is_refused_gives_all_its_payloads_back() -> None:
    machine = sync()
    answers = machine.handle(Step(5, A, 1, {"w": 10, "b": 11}), 1)
    assert {one.payload for one in answers if isinstance(one, Release)} == {10, 11}
    assert [one.ticket for one in answers if isinstance(one, Refuse)] == [5]
    of_a_stranger = machine.handle(Step(6, STRANGER, 0, {"w": 12, "b": 13}), 1)
    assert {one.payload for one in of_a_stranger if isinstance(one, Release)} == {12, 13}


def test_a_step_without_rounds_is_answered_when_all_is_applied() -> None:
    machine = immediate()
    machine.handle(Push(5, B, 1, "w", 20), 1)
    asked = machine.handle(Step(6, A, 3, {"w": 10, "b": 11}), 1)
    assert [(one.payload, one.block) for one in asked if isinstance(one, Apply)] == [(11, "b")], "w is being updated"
    assert machine.handle(AppliedPush(11), 1) == []
    after = machine.handle(AppliedPush(20), 1)
    assert [(one.payload, one.staleness) for one in after if isinstance(one, Apply)] == [(10, 1)]
    assert machine.handle(AppliedPush(10), 1) == [Reply(6, 3)]
    again = machine.handle(Step(7, A, 3, {"w": 12, "b": 13}), 1)
    assert sorted(map(str, again)) == sorted(map(str, [Release(12), Release(13), Reply(7, 3)]))


def test_one_refused_push_refuses_its_step_when_all_are_done() -> None:
    machine = immediate()
    machine.handle(Step(6, A, 1, {"w": 10, "b": 11}), 1)
    assert machine.handle(FailedPush(10, "the table is full"), 1) == []
    assert machine.handle(AppliedPush(11), 1) == [Refuse(6, "the table is full")]


def test_a_step_that_reads_makes_the_next_push_fresh() -> None:
    staleness = []
    for reads in (False, True):
        machine = immediate()
        machine.handle(Pull(4, A, 0), 1)
        machine.handle(Push(5, B, 1, "w", 20), 1)
        machine.handle(AppliedPush(20), 1)
        machine.handle(Step(6, A, 1, {"w": 10}, reads), 1)
        machine.handle(AppliedPush(10), 1)
        (applied,) = machine.handle(Push(7, A, 2, "w", 11), 1)
        assert isinstance(applied, Apply)
        staleness.append(applied.staleness)
    assert staleness == [1, 0]


def test_a_value_that_was_read_early_lacks_later_updates() -> None:
    staleness = []
    for early in ({}, {"w": 1}):
        machine = immediate()
        machine.handle(Pull(4, A, 0), 1)
        assert machine.version("w") == 0
        machine.handle(Push(5, B, 1, "w", 20), 1)  # after the value of A's next step was sent
        machine.handle(AppliedPush(20), 1)
        assert machine.version("w") == 1
        machine.handle(Step(6, A, 1, {"w": 10}, reads=True, read_early=early), 1)
        machine.handle(AppliedPush(10), 1)
        (apply,) = machine.handle(Push(7, A, 2, "w", 11), 1)
        assert isinstance(apply, Apply)
        staleness.append(apply.staleness)
    assert staleness == [0, 1]
