"""Meetings of all live trainers, model-checked: any order, losses, repetitions, kills, restarts of the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ps.rounds.immediate import ImmediateUpdates
from penstock.ps.rounds.machine import Membership, RoundMachine
from penstock.ps.rounds.messages import (
    GIVE_UP,
    Applied,
    Barrier,
    Close,
    Event,
    FailedRound,
    Heartbeat,
    Join,
    Leave,
    Lost,
    Meet,
    Met,
    Pull,
    Push,
    Refuse,
    Release,
    Reply,
    Step,
    Tick,
    TrainerIncarnation,
)
from penstock.ps.rounds.sync import SyncRounds

LEASE_S = 10.0


@dataclass
class Trainer:
    """Meets `todo` times, one request at a time, then leaves. `seen`: number of a meeting -> what it was told."""

    sender: TrainerIncarnation
    todo: int
    phase: str = "join"
    number: int = -1
    seen: dict[int, object] = field(default_factory=dict)

    def request(self, ticket: int) -> Event:
        if self.phase == "join":
            return Join(ticket, self.sender)
        if self.phase == "meet":
            return Meet(ticket, self.sender, self.number, (self.sender, self.number))
        return Leave(ticket, self.sender)

    def answered(self, answer: Reply | Met | Refuse) -> None:
        if isinstance(answer, Refuse):
            # Whoever missed more than one is told that it is over, and gives up.
            assert answer.rejoin or "asks for meeting" in answer.reason, answer.reason
            self.phase = "join" if answer.rejoin else "leave"
        elif isinstance(answer, Met):
            self.seen[self.number] = answer.parts
            self.number += 1
            self.todo -= 1
            self.phase = "meet" if self.todo else "leave"
        elif self.phase == "meet":
            self.number = answer.round
        elif self.phase == "join":
            self.phase = "meet" if self.todo else "leave"
        else:
            self.phase = "done"


class World:
    """A server's machine, and a network that loses and repeats."""

    def __init__(self, trainers: list[Trainer]) -> None:
        self.machine: RoundMachine = ImmediateUpdates(Membership(expected=len(trainers), lease_s=LEASE_S))
        self.trainers = trainers
        self.now, self.next_ticket = 0.0, 0
        self.open: dict[int, Trainer | None] = {}
        self.past: list[tuple[Trainer, Event]] = []

    def idle(self) -> list[Trainer]:
        busy = {id(t) for t in self.open.values()}
        return [t for t in self.trainers if t.phase != "done" and id(t) not in busy]

    def send(self, trainer: Trainer, *, response_lost: bool = False) -> None:
        self.next_ticket += 1
        event = trainer.request(self.next_ticket)
        self.open[self.next_ticket] = None if response_lost else trainer
        self.feed(event)

    def feed(self, event: Event) -> None:
        for one in self.machine.handle(event, self.now):
            if isinstance(one, Met):
                assert len({part[0].trainer for part in one.parts}) == len(one.parts), "each trainer once"  # type: ignore[index]
                assert len({part[1] for part in one.parts}) == 1, "nobody meets others in another meeting"  # type: ignore[index]
            if isinstance(one, Reply | Met | Refuse):
                trainer = self.open.pop(one.ticket)
                if trainer is not None and trainer in self.trainers:
                    trainer.answered(one)
        assert self.machine.meetings.waiting <= self.machine.members.present()

    def pass_time(self, seconds: float, *, silent: Trainer | None = None) -> None:
        self.now += seconds
        for trainer in self.trainers:
            if trainer is not silent and not self.machine.members.is_new(trainer.sender):
                self.next_ticket += 1
                self.open[self.next_ticket] = None
                self.feed(Heartbeat(self.next_ticket, trainer.sender))
        self.feed(Tick())

    def pass_lease(self, *, silent: Trainer | None = None) -> None:
        for _ in range(4):
            self.pass_time(LEASE_S / 3, silent=silent)

    def kill(self, trainer: Trainer) -> None:
        self.trainers.remove(trainer)
        self.open = {t: None if who is trainer else who for t, who in self.open.items()}

    def run_to_the_end(self) -> None:
        for _ in range(300):
            for trainer in self.idle():
                self.send(trainer)
            if all(t.phase == "done" for t in self.trainers):
                return
            self.pass_time(LEASE_S / 3)
        raise AssertionError(f"stuck: {[(t.sender, t.phase, t.number) for t in self.trainers]}")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), num_trainers=st.integers(1, 4))
def test_all_at_a_meeting_get_the_same_parts_and_none_hangs(data: st.DataObject, num_trainers: int) -> None:
    world = World([Trainer(TrainerIncarnation(t, 0), data.draw(st.integers(0, 4))) for t in range(num_trainers)])
    everybody = list(world.trainers)
    for _ in range(data.draw(st.integers(0, 40), label="faulty steps")):
        action = data.draw(st.sampled_from(["send", "send", "send", "lose", "away", "kill", "time"]))
        if action in {"send", "lose"} and world.idle():
            world.send(data.draw(st.sampled_from(world.idle())), response_lost=action == "lose")
        elif action == "time":
            world.pass_time(LEASE_S / 3)
        elif action == "away" and world.trainers:
            world.pass_lease(silent=data.draw(st.sampled_from(world.trainers)))
        elif action == "kill" and world.trainers:
            victim = data.draw(st.sampled_from(world.trainers))
            world.kill(victim)
            if not world.machine.members.started or data.draw(st.booleans(), label="started again"):
                world.trainers.append(Trainer(TrainerIncarnation(victim.sender.trainer, victim.sender.epoch + 1), 1))
                everybody.append(world.trainers[-1])
    world.run_to_the_end()
    world.pass_lease()  # of whoever was killed and not started again
    told = {number: parts for trainer in everybody for number, parts in trainer.seen.items()}
    assert all(trainer.seen.items() <= told.items() for trainer in everybody)
    assert not world.machine.meetings.waiting
    assert not world.open, "every ticket is answered"


def started(num_trainers: int, *, sync: bool = False) -> tuple[RoundMachine, list[TrainerIncarnation]]:
    """Return a machine that all trainers have joined."""
    members = Membership(expected=num_trainers, lease_s=LEASE_S)
    machine: RoundMachine = SyncRounds(members) if sync else ImmediateUpdates(members)
    senders = [TrainerIncarnation(t, 0) for t in range(num_trainers)]
    for ticket, sender in enumerate(senders):
        machine.handle(Join(ticket, sender), 0.0)
    return machine, senders


def test_a_lost_trainer_is_waited_for_until_its_lease_ends() -> None:
    machine, (a, b) = started(2)
    assert machine.handle(Meet(10, a, 0, "a"), 9.0) == []
    assert machine.handle(Tick(), 11.0) == [Lost(1), Met(10, 0, ("a",))]
    machine.handle(Join(11, b), 12.0)
    assert machine.handle(Meet(12, b, 0, "b"), 12.0) == [Met(12, 0, ("a",))], "to the others it is over"
    assert machine.handle(Meet(13, b, 1, "b"), 12.0) == []
    assert machine.handle(Meet(14, a, 1, "a"), 12.0) == [Met(14, 0, ("a", "b")), Met(13, 0, ("a", "b"))][::-1]


def test_a_meeting_starts_only_once_all_trainers_have_joined() -> None:
    machine = ImmediateUpdates(Membership(expected=2, lease_s=LEASE_S))
    a, b = TrainerIncarnation(0, 0), TrainerIncarnation(1, 0)
    machine.handle(Join(1, a), 0.0)
    assert machine.handle(Meet(2, a, 0, "a"), 0.0) == []
    machine.handle(Join(3, b), 0.0)
    assert machine.handle(Meet(4, b, 0, "b"), 0.0) == [Met(2, 0, ("a", "b")), Met(4, 0, ("a", "b"))]


def test_a_new_incarnation_replaces_the_one_that_waited() -> None:
    machine, (a, b) = started(2)
    machine.handle(Meet(10, a, 0, "old"), 0.0)
    again = TrainerIncarnation(0, 1)
    joined = machine.handle(Join(11, again), 0.0)
    assert [type(one) for one in joined] == [Reply, Refuse]
    assert machine.handle(Meet(12, again, -1), 0.0) == [Reply(12, 0)]
    machine.handle(Meet(13, again, 0, "new"), 0.0)
    assert machine.handle(Meet(14, b, 0, "b"), 0.0) == [Met(13, 0, ("new", "b")), Met(14, 0, ("new", "b"))]


def test_a_meeting_from_ahead_is_refused() -> None:
    machine, (a, b) = started(2)
    machine.handle(Meet(10, a, 0, "a"), 0.0)
    machine.handle(Meet(11, b, 0, "b"), 0.0)
    (answer,) = machine.handle(Meet(12, a, 2, "a"), 0.0)
    assert isinstance(answer, Refuse) and not answer.rejoin
    machine.handle(Meet(13, b, 1, "b"), 0.0)
    assert machine.handle(Meet(14, a, 1, "a"), 0.0) == [Met(13, 0, ("a", "b")), Met(14, 0, ("a", "b"))]


def test_after_a_restart_numbers_continue_and_lost_answers_fail() -> None:
    machine, (a, b, c) = started(3)
    assert machine.handle(Meet(10, a, 5, "a"), 0.0) == []
    assert machine.handle(Meet(11, b, 4, "b"), 0.0) == [], "the answer to its meeting 4 was lost"
    refused = machine.handle(Meet(12, c, 5, "c"), 0.0)
    assert refused == [Refuse(11, "what came of meeting 4 was lost when the server was started again")]
    met = ("a", "c")
    assert machine.handle(Leave(13, b), 0.0) == [Reply(13, 0), Met(10, 0, met), Met(12, 0, met)]


def test_round_and_meeting_waits_do_not_block_each_other() -> None:
    machine, (a, b, _) = started(3, sync=True)
    machine.handle(Barrier(10, b, 0), 0.0)
    late = TrainerIncarnation(2, 1)
    assert machine.handle(Join(11, late), 0.0) == [Reply(11, 1)], "it counts from the next round"
    assert machine.handle(Pull(12, late, 1), 0.0) == []
    assert machine.handle(Leave(13, b), 0.0)[-1] == Reply(13, 0)
    assert machine.handle(Meet(14, a, 0), 0.0) == [Close(0, {}, ())]
    assert machine.handle(Applied(0), 0.0) == [Reply(12, 1)]
    assert machine.handle(Meet(15, late, 0), 0.0) == [Met(14, 1, (None, None)), Met(15, 1, (None, None))]


class Plans:
    """Trainers in sync mode. Of a plan each entry is a step (true) or a meeting (false); then its trainer leaves.

    One that waits in a meeting may give up, and then says so and learns the open round, or goes on at once.
    """

    def __init__(self, plans: list[list[bool]]) -> None:
        self.machine, senders = started(len(plans), sync=True)
        self.todo = {sender: list(plan) for sender, plan in zip(senders, plans, strict=True)}
        self.rounds, self.numbers = dict.fromkeys(senders, 0), dict.fromkeys(senders, 0)
        self.meeting: dict[int, TrainerIncarnation] = {}  # of those that wait, by ticket
        self.given_up: set[int] = set()  # tickets whose answer nobody waits for
        self.learning: dict[int, TrainerIncarnation] = {}  # asks which meeting is next
        self.left_out: set[int] = set()
        self.came = dict.fromkeys(senders, 0)  # the open round, when it came to its last meeting
        self.waiting: dict[int, TrainerIncarnation] = {}
        self.closing: list[int] = []
        self.ticket = 0
        self.applied: list[int] = []

    def idle(self) -> list[TrainerIncarnation]:
        return [sender for sender in self.todo if sender not in self.waiting.values()]

    def go_on(self, sender: TrainerIncarnation) -> None:
        self.ticket += 2
        ticket, plan = self.ticket, self.todo[sender]
        self.waiting[ticket] = sender
        if not plan:
            del self.todo[sender]
            self.handle(Leave(ticket, sender))
        elif plan.pop(0):
            self.waiting[ticket - 1] = sender
            if self.rounds[sender] < self.machine.open_round() or self.closing:
                self.left_out.add(ticket)
            number = self.rounds[sender]
            self.handle(Push(ticket - 1, sender, number, "w", ticket))
            if number >= self.came[sender]:  # else it may be a repetition
                assert sender.trainer not in self.machine.meetings.waiting
            self.handle(Barrier(ticket, sender, number))
        else:
            self.learning[ticket - 1] = sender
            self.handle(Meet(ticket - 1, sender, -1))
            self.meeting[ticket], self.came[sender] = sender, self.machine.open_round()
            self.handle(Meet(ticket, sender, self.numbers[sender]))

    def give_up(self, ticket: int, *, says_so: bool) -> None:
        sender = self.meeting.pop(ticket)
        del self.waiting[ticket]
        self.given_up.add(ticket)
        if says_so:
            self.ticket += 2
            self.learning[self.ticket - 1] = sender
            self.handle(Meet(self.ticket - 1, sender, GIVE_UP))
            assert ticket not in self.given_up, "its wait is over"
            self.waiting[self.ticket] = sender
            self.handle(Pull(self.ticket, sender, 0))

    def handle(self, event: Event) -> None:
        for one in self.machine.handle(event, 0.0):
            if isinstance(one, Close):
                self.closing.append(one.round)
                self.applied += [payload for payloads in one.contributions.values() for payload in payloads]
            elif isinstance(one, Reply | Met | Refuse) and one.ticket in self.given_up:
                self.given_up.remove(one.ticket)
            elif isinstance(one, Reply) and one.ticket in self.learning:
                self.numbers[self.learning.pop(one.ticket)] = one.round
            elif isinstance(one, Reply | Met):
                sender = self.waiting.pop(one.ticket)
                self.meeting.pop(one.ticket, None)
                self.rounds[sender] = max(self.rounds[sender], one.round)
            else:
                assert not isinstance(one, Refuse), one.reason


@settings(max_examples=200, deadline=None)
@given(data=st.data(), plans=st.lists(st.lists(st.booleans(), max_size=5), min_size=1, max_size=3))
def test_steps_and_meetings_in_any_order_never_hang_or_skip(data: st.DataObject, plans: list[list[bool]]) -> None:
    says_so = data.draw(st.booleans(), label="those that give up say so")
    world, num_steps = Plans(plans), sum(step for plan in plans for step in plan)
    while world.todo or world.waiting:
        if world.meeting and data.draw(st.integers(0, 3)) == 0:
            world.give_up(data.draw(st.sampled_from(sorted(world.meeting))), says_so=says_so)
            continue
        idle = world.idle()
        assert idle or world.closing, f"all wait: {world.waiting}"
        if world.closing and (not idle or data.draw(st.booleans())):
            world.handle(Applied(world.closing.pop()))
        else:
            world.go_on(data.draw(st.sampled_from(idle)))
    assert not world.given_up, "every ticket is answered"
    assert len(set(world.applied)) == len(world.applied), "nothing is applied twice"
    assert len(world.applied) + len(world.left_out) == num_steps
    assert not (says_so and world.left_out), "who learns the open round is in it"


def test_a_trainer_that_pushes_has_given_up_its_meeting() -> None:
    machine, (a, b) = started(2, sync=True)
    machine.handle(Barrier(10, b, 0), 0.0)
    assert machine.handle(Meet(11, a, 0), 0.0) == [Close(0, {}, (1,))]
    machine.handle(Applied(0), 0.0)
    reason = "trainer 0 has given up waiting in meeting 0"
    assert machine.handle(Push(12, a, 0, "w", 100), 0.0) == [Refuse(11, reason), Reply(12, 1), Release(100)]
    assert machine.handle(Barrier(13, b, 1), 0.0) == [], "rounds wait for it again"
    assert machine.waits_for() == [0]
    assert machine.handle(Barrier(14, a, 0), 0.0) == [Reply(14, 1)], "and it learns which one is open"
    assert machine.handle(Step(15, a, 1, {"w": 101}), 0.0) == [Close(1, {"w": (101,)}, (0, 1))]


def test_a_delayed_push_of_a_round_before_does_not_end_a_wait() -> None:
    machine, (a, b) = started(2, sync=True)
    for ticket, sender in enumerate((a, b), 10):
        machine.handle(Barrier(ticket, sender, 0), 0.0)
    machine.handle(Applied(0), 0.0)
    machine.handle(Meet(12, a, 0, "a"), 0.0)
    assert machine.handle(Push(13, a, 0, "w", 100), 0.0) == [Reply(13, 1), Release(100)]
    assert machine.handle(Meet(14, b, 0, "b"), 0.0) == [Met(12, 1, ("a", "b")), Met(14, 1, ("a", "b"))]


def test_who_gives_up_is_waited_for_and_may_come_again() -> None:
    machine, (a, b) = started(2)
    machine.handle(Meet(10, a, 3, "old"), 0.0)
    gone = Refuse(10, "trainer 0 has given up waiting in meeting 3")
    assert machine.handle(Meet(11, a, GIVE_UP), 0.0) == [gone, Reply(11, 3)]
    assert machine.handle(Meet(12, a, GIVE_UP), 0.0) == [Reply(12, 0)]
    assert machine.handle(Meet(13, b, 3, "b"), 0.0) == []
    assert machine.handle(Meet(14, a, 3, "a"), 0.0) == [Met(13, 0, ("a", "b")), Met(14, 0, ("a", "b"))]


def test_a_sync_round_goes_on_without_who_is_at_a_meeting() -> None:
    machine, (a, b) = started(2, sync=True)
    assert machine.handle(Push(10, b, 0, "w", 100), 0.0) == [Reply(10, 0)]
    assert machine.handle(Barrier(11, b, 0), 0.0) == []
    assert machine.handle(Meet(12, a, 0), 0.0) == [Close(0, {"w": (100,)}, (1,))], "else both would wait for ever"
    assert machine.handle(FailedRound(0, "full"), 0.0) == [Refuse(11, "full")]
    assert machine.handle(Meet(13, b, 0), 0.0) == [Met(12, 0, (None, None)), Met(13, 0, (None, None))]
