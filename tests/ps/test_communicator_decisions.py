"""What communicators decide without threads: merging, when to send, when to pull, lock-step, GEO's arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import PeerError
from penstock.native.channels import incoming, outgoing
from penstock.ps.communicators.base import LocalGradient, merge
from penstock.ps.communicators.queues import LockStep, PullTrigger, SendQueues

VARIABLES = ["a", "b"]


def dense(*values: float) -> LocalGradient:
    """Return a gradient of two blocks."""
    return LocalGradient((torch.tensor(values, dtype=torch.float64), torch.tensor([1.0])))


# -- merging -------------------------------------------------------------------------------------


def test_dense_gradients_are_summed_or_averaged() -> None:
    summed = merge([dense(1, 2), dense(3, 4), dense(5, 6)], average=False)
    averaged = merge([dense(1, 2), dense(3, 4), dense(5, 6)], average=True)
    assert summed.values[0].tolist() == [9, 12]
    assert summed.values[1].tolist() == [3]
    assert averaged.values[0].tolist() == [3, 4]


@pytest.mark.parametrize("average", [False, True])
def test_rows_are_merged_by_id_whatever_int64_it_is(average: bool) -> None:
    first = LocalGradient((torch.tensor([[1.0], [2.0], [4.0]]),), torch.tensor([2**62, -5, 2**62]))
    second = LocalGradient((torch.tensor([[8.0], [16.0]]),), torch.tensor([-5, 0]))
    merged = merge([first, second], average=average)
    assert merged.rows is not None
    found = dict(zip(merged.rows.tolist(), merged.values[0].flatten().tolist(), strict=True))
    expected = {2**62: 5.0, -5: 10.0, 0: 16.0}
    assert found == {id: value / (2 if average else 1) for id, value in expected.items()}


def test_gradients_of_different_shapes_are_not_merged() -> None:
    with pytest.raises(PeerError, match="do not fit together"):
        merge([dense(1, 2), dense(1, 2, 3)], average=False)


# -- when to send --------------------------------------------------------------------------------


class QueuesModel(RuleBasedStateMachine):
    """Random offers, takes and passing of time against SendQueues, judged by what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: SendQueues[int] = SendQueues(capacity=3, max_merge=2, merge_wait_s=1.0)
        self.now = 0.0
        self.number = 0
        self.waiting: dict[str, list[int]] = {v: [] for v in VARIABLES}
        self.came_at: dict[str, float] = dict.fromkeys(VARIABLES, 0.0)
        self.busy: set[str] = set()

    @rule(variable=st.sampled_from(VARIABLES))
    def offer(self, variable: str) -> None:
        has_room = len(self.waiting[variable]) < 3
        assert self.queues.offer(variable, self.number, self.now) == has_room
        if has_room:
            self.waiting[variable].append(self.number)
            self.came_at[variable] = self.now
        self.number += 1

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        due = {v for v in VARIABLES if self.is_due(v)}
        taken = self.queues.take(self.now)
        if taken is None:
            assert not due
            return
        variable, gradients = taken
        assert variable in due
        assert gradients == self.waiting[variable][:2]  # in order, at most max_merge
        del self.waiting[variable][: len(gradients)]
        self.busy.add(variable)

    def is_due(self, variable: str) -> bool:
        waits = self.waiting[variable]
        is_late = self.now >= self.came_at[variable] + 1.0
        return variable not in self.busy and bool(waits) and (len(waits) >= 2 or is_late)

    @precondition(lambda self: self.busy)
    @rule()
    def done(self) -> None:
        self.queues.done(self.busy.pop())

    @invariant()
    def says_when_something_is_due(self) -> None:
        assert (self.queues.due_at() <= self.now) == any(self.is_due(v) for v in VARIABLES)

    @invariant()
    def knows_depths(self) -> None:
        assert sum(self.queues.depths().values()) == sum(map(len, self.waiting.values()))

    def teardown(self) -> None:
        """Flushed, everything comes out, each once."""
        self.queues.flush()
        for variable in self.busy:
            self.queues.done(variable)
        while (taken := self.queues.take(self.now)) is not None:
            del self.waiting[taken[0]][: len(taken[1])]
            self.queues.done(taken[0])
        assert self.queues.is_empty
        assert not any(self.waiting.values())


TestQueues = QueuesModel.TestCase
TestQueues.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_queue_smaller_than_a_merge_is_sent_when_it_is_full() -> None:
    queues: SendQueues[int] = SendQueues(capacity=1, max_merge=20, merge_wait_s=100.0)
    assert queues.offer("w", 1, now=0.0)
    assert not queues.offer("w", 2, now=0.0)
    assert queues.take(0.0) == ("w", [1])


def test_patience_begins_anew_with_each_gradient() -> None:
    queues: SendQueues[int] = SendQueues(capacity=9, max_merge=9, merge_wait_s=0.05)
    queues.offer("w", 1, now=0.0)
    queues.offer("w", 2, now=0.04)
    assert queues.take(0.06) is None
    assert queues.due_at() == pytest.approx(0.09)
    assert queues.take(0.09) == ("w", [1, 2])
    assert queues.due_at() == math.inf


def test_a_pull_is_due_once_sends_exceed_their_minimum() -> None:
    trigger = PullTrigger(min_sends=2)
    trigger.sent("a", 2)
    trigger.sent("b", 1)
    assert not trigger.is_due
    trigger.sent("a", 1)
    assert trigger.is_due
    trigger.pulled()
    assert not trigger.is_due


# -- lock-step -----------------------------------------------------------------------------------


class LockStepModel(RuleBasedStateMachine):
    """Threads that give, wait as the communicator makes them, and leave at random: nobody waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: LockStep[tuple[int, int]] = LockStep(3)
        self.active = {0, 1, 2}
        self.given = dict.fromkeys(range(3), 0)
        self.sent: list[list[tuple[int, int]]] = []
        self.sending = False

    def may_go_on(self, who: int) -> bool:
        round = self.steps.round_to_wait_for("w", who)
        return round < 0 or self.steps.is_done("w", round)

    @rule(who=st.integers(0, 2))
    def give(self, who: int) -> None:
        if who in self.active and self.may_go_on(who):
            self.steps.give("w", who, (who, self.given[who]))
            self.given[who] += 1

    @rule(who=st.integers(0, 2))
    def leave(self, who: int) -> None:
        if self.may_go_on(who):
            self.active.discard(who)
            self.steps.leave(who)

    @rule()
    def take(self) -> None:
        taken = self.steps.take()
        if taken is not None:
            assert not self.sending  # one round of a variable at a time
            self.sending = True
            self.sent.append(taken[1])

    @precondition(lambda self: self.sending)
    @rule()
    def done(self) -> None:
        self.steps.done("w")
        self.sending = False

    @invariant()
    def a_round_has_each_thread_once(self) -> None:
        for gradients in self.sent:
            assert len({who for who, _ in gradients}) == len(gradients)

    @invariant()
    def threads_are_at_most_one_step_apart(self) -> None:
        steps = [self.given[who] for who in self.active]
        assert not steps or max(steps) - min(steps) <= 1

    def teardown(self) -> None:
        """Whoever still trains gives once more each; then all rounds close, and everything given is sent once."""
        for who in sorted(self.active):
            if self.may_go_on(who) and self.given[who] == min(self.given[w] for w in self.active):
                self.give(who)
        for who in sorted(self.active):
            self.steps.leave(who)
        if self.sending:
            self.done()
        while (taken := self.steps.take()) is not None:
            self.sent.append(taken[1])
            self.steps.done("w")
        assert self.steps.is_empty
        counts: defaultdict[tuple[int, int], int] = defaultdict(int)
        for gradients in self.sent:
            for gradient in gradients:
                counts[gradient] += 1
        assert counts == {(who, i): 1 for who, num in self.given.items() for i in range(num)}


TestLockStep = LockStepModel.TestCase
TestLockStep.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_who_leaves_completes_the_round_that_waited_for_it() -> None:
    steps: LockStep[str] = LockStep(2)
    steps.give("w", "slow", "gradient")
    assert steps.take() is None
    steps.leave("ended")
    assert steps.take() == ("w", ["gradient"])


def test_who_begins_again_after_leaving_is_not_counted_twice() -> None:
    steps: LockStep[str] = LockStep(2)
    steps.leave("x")
    steps.leave("y")
    steps.begin(2)
    steps.give("w", "x", "1")
    steps.give("w", "y", "2")
    assert steps.take() == ("w", ["1", "2"])


# -- GEO -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=1, max_size=20))
def test_one_trainer_alone_keeps_its_own_values_to_the_bit(updates: list[list[float]]) -> None:
    parameter = torch.tensor([1.0, -2.0, 3.0])
    server, old, local = parameter.clone(), parameter.clone(), parameter.clone()
    for update in updates:
        parameter -= torch.tensor(update)
        local -= torch.tensor(update)
        server += outgoing(parameter, old, None, 1)
        incoming(parameter, old, None, server)
        assert torch.equal(parameter, local)
        assert torch.equal(old, server)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.floats(-10, 10)), max_size=30),
    st.lists(st.integers(0, 1), max_size=10),
)
def test_servers_hold_the_share_that_each_trainer_has_told(
    updates: list[tuple[int, int, float]], exchanges: list[int]
) -> None:
    """Two trainers of one sparse table. `told` is what deltas add up to; the server has exactly that."""
    server = torch.zeros(4, 1, dtype=torch.float64)
    parameters = [server.clone() for _ in range(2)]
    old = [server.clone() for _ in range(2)]
    touched: list[set[int]] = [set(), set()]
    changed: list[set[int]] = [set(), set()]
    told = server.clone()
    for trainer, row, value in updates:
        parameters[trainer][row] += value
        touched[trainer].add(row)
    for trainer in [*exchanges, 0, 1, 0]:
        rows = torch.tensor(sorted(touched[trainer]), dtype=torch.int64)
        touched[trainer].clear()
        delta = outgoing(parameters[trainer], old[trainer], rows, 2)
        server.index_add_(0, rows, delta)
        told.index_add_(0, rows, delta)
        changed[1 - trainer].update(rows.tolist())
        news = torch.tensor(sorted(changed[trainer]), dtype=torch.int64)
        changed[trainer].clear()
        incoming(parameters[trainer], old[trainer], news, server[news])
    assert torch.equal(server, told)
    # Whoever has heard of everything sees the servers' values as what it has told and heard.
    assert torch.allclose(old[0], server, atol=1e-12)
