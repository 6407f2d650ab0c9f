"""The decisions about jobs, as pure functions: named cases, and random orders of events with invariants after each."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.protocol.states import TERMINAL_JOB, TERMINAL_REPLICA, JobState, ReplicaState, StopReason, terminal_of
from penstock_server.services.leases import Leases, Standing
from penstock_server.services.lifecycle import (
    NOT_WANTED,
    JobFacts,
    Replace,
    ReplicaFacts,
    Step,
    decide,
    may_linger,
    watching,
)
from penstock_server.services.transitions import allowed

J, R = JobState, ReplicaState
START = datetime(2026, 1, 1, tzinfo=UTC)


def replica(index: int = 0, state: ReplicaState = R.RUNNING, role: str = "trainer", **fields: Any) -> ReplicaFacts:
    started = fields.pop("started", state is not R.ASSIGNED)
    return ReplicaFacts(f"{role}{index}", role, index, state, "node 'n'", started=started, **fields)


def job(*replicas: ReplicaFacts, state: JobState = J.RUNNING, **fields: Any) -> JobFacts:
    has_started = any(one.started for one in replicas)
    base = JobFacts(state, False, "", "", 0, 0, frozenset({"infra"}), replicas, has_started=has_started)
    return replace(base, **fields)


def exited(index: int = 0, code: int = 0, at: int = 0, **fields: Any) -> ReplicaFacts:
    return replica(index, R.EXITED, exit_code=code, ended_at=START + timedelta(seconds=at), **fields)


def step_of(facts: JobFacts) -> Step:
    step = decide(facts)
    assert isinstance(step, Step)
    return step


def replace_of(facts: JobFacts) -> Replace:
    step = decide(facts)
    assert isinstance(step, Replace)
    return step


def with_pservers(*replicas: ReplicaFacts, **fields: Any) -> JobFacts:
    return job(*replicas, **{"has_pservers": True, "max_restarts": 2, **fields})


def test_starts_only_when_every_replica_is_up() -> None:
    assert decide(job(replica(0), replica(1, R.PREPARING), state=J.STARTING)) is None
    assert step_of(job(replica(0), replica(1), state=J.STARTING)).to is J.RUNNING


def test_a_node_that_cannot_prepare_a_pserver_costs_an_attempt() -> None:
    taken = exited(0, 125, detail="could not be prepared: port 20001 is taken", role="pserver", started=False)
    step = step_of(with_pservers(replica(0), taken, state=J.STARTING))
    assert (step.to, step.reason) == (J.RECOVERING, StopReason.START_FAILED)
    assert "pserver 0 on node 'n' could not start: could not be prepared: port 20001 is taken" in step.why
    assert step_of(with_pservers(replica(0), taken, max_restarts=0)).to is J.STOPPING


def test_a_non_executable_entrypoint_is_not_retried_in_place() -> None:
    closed = exited(0, 126, detail="may not be executed", role="pserver", started=False)
    facts = with_pservers(replica(0), closed, restart_on=frozenset({"infra"}))
    assert (step_of(facts).to, step_of(facts).reason) == (J.STOPPING, StopReason.START_FAILED)


def test_running_job_names_those_who_take_the_place_of_others() -> None:
    replicas = (replica(0), replica(1, R.PREPARING), replica(0, R.ASSIGNED, "pserver"))
    assert watching(replicas, 60.0).endswith("; trainer 1, pserver 0 are started again")
    assert "again" not in watching((replica(0), replica(1)), 60.0)


def test_the_first_failure_is_the_cause_the_others_follow() -> None:
    step = step_of(job(exited(0, 1, at=5), exited(1, 3, at=2)))
    assert (step.to, step.reason, step.culprit) == (J.STOPPING, StopReason.REPLICA_FAILED, "trainer1")
    assert "trainer 1 on node 'n' exited with code 3" in step.why


def test_crash_outranks_a_lost_node() -> None:
    step = step_of(job(replica(0, R.LOST, detail="gone"), exited(1, 1, at=9)))
    assert step.reason == StopReason.REPLICA_FAILED


def test_pserver_that_exits_with_0_is_no_failure_and_no_end() -> None:
    assert decide(job(replica(0), exited(0, role="pserver"))) is None


def test_lost_node_is_retried_until_the_budget_is_used() -> None:
    lost = job(replica(0, R.LOST), max_restarts=2)
    assert step_of(lost).to is J.RECOVERING
    assert step_of(replace(lost, restarts=2)).to is J.STOPPING


def test_lost_replacements_that_wait_take_a_restart() -> None:
    """What stood in their places before had started, so it is not as if nothing had."""
    lost = with_pservers(replica(0, R.LOST, started=False), replica(0, R.LOST, role="pserver", started=False))
    assert not step_of(lost).is_restart
    assert step_of(replace(lost, has_started=True)).is_restart


def test_crash_is_retried_only_when_asked_for() -> None:
    crash = job(exited(0, 1), max_restarts=2)
    assert step_of(crash).to is J.STOPPING
    assert step_of(replace(crash, restart_on=frozenset({"user"}))).to is J.RECOVERING


def test_stopping_waits_for_the_last_replica() -> None:
    stopping = job(exited(0), replica(0, role="pserver"), state=J.STOPPING, reason="completed")
    assert decide(stopping) is None
    over = replace(stopping, replicas=(exited(0), replica(0, R.KILLED, role="pserver", signal=15)))
    assert step_of(over).to is J.SUCCEEDED


ENDS: list[dict[str, Any]] = [
    {"state": R.KILLED},
    {"state": R.EXITED, "signal": 9},
    {"state": R.EXITED, "signal": 15},
    {"state": R.EXITED, "exit_code": 143},
]


@pytest.mark.parametrize("role", ["trainer", "pserver"])
@pytest.mark.parametrize("end", ENDS)
def test_killed_process_of_a_pserver_job_is_started_again_alone(role: str, end: dict[str, Any]) -> None:
    other = "pserver" if role == "trainer" else "trainer"
    facts = with_pservers(replica(0, role=other), replica(1, role=role, **end))
    found = replace_of(facts)
    assert (found.replica.role, found.replica.index) == (role, 1)
    assert "restart 1 of 2" in found.why
    over = step_of(replace(facts, restarts=2))
    assert (over.to, over.reason) == (J.STOPPING, StopReason.REPLICA_FAILED)
    assert f"{role} 1 on node 'n'" in over.why


def test_a_crash_in_a_pserver_job_ends_it_unless_retried() -> None:
    crash = with_pservers(replica(0), exited(0, 3, role="pserver"))
    assert "pserver 0 on node 'n' exited with code 3" in step_of(crash).why
    assert replace_of(replace(crash, restart_on=frozenset({"user"}))).replica.role == "pserver"
    segfault = with_pservers(replica(0), replica(0, R.EXITED, role="pserver", signal=11))
    assert step_of(segfault).to is J.STOPPING


def test_a_lost_node_of_a_pserver_job_restarts_all_of_it() -> None:
    assert step_of(with_pservers(replica(0), replica(0, R.LOST, role="pserver"))).to is J.RECOVERING


def test_a_killed_trainer_without_pservers_is_not_replaced() -> None:
    assert step_of(job(replica(0, R.KILLED), replica(1), max_restarts=1)).to is J.RECOVERING


def test_only_pservers_of_a_completed_job_may_linger() -> None:
    assert may_linger(J.STOPPING, StopReason.COMPLETED, "pserver")
    assert not may_linger(J.STOPPING, StopReason.COMPLETED, "trainer")
    assert not may_linger(J.STOPPING, StopReason.CANCELLED, "pserver")
    assert not may_linger(J.RUNNING, StopReason.COMPLETED, "pserver")


DONE: dict[str, Any] = {"state": J.STOPPING, "reason": "completed", "detail": "every trainer is done"}


@pytest.mark.parametrize("end", [{"exit_code": 1}, {"signal": 11}, {"exit_code": 3, "detail": "the disk is full"}])
def test_a_pserver_crash_after_its_trainers_end_fails_the_job(end: dict[str, Any]) -> None:
    killed = replica(0, R.EXITED, role="pserver", signal=9, ended_at=START)
    crash = replica(1, R.EXITED, role="pserver", ended_at=START + timedelta(seconds=1), **end)
    step = step_of(with_pservers(exited(0), killed, crash, **DONE))
    assert (step.to, step.reason, step.culprit) == (J.FAILED, StopReason.REPLICA_FAILED, "pserver1")
    assert step.why.startswith("every trainer is done, but then pserver 1 on node 'n' ")


@pytest.mark.parametrize("end", [*ENDS, {"state": R.LOST, "detail": "gone"}])
def test_a_pserver_lost_after_its_trainers_end_is_reported(end: dict[str, Any]) -> None:
    step = step_of(with_pservers(exited(0), exited(0, role="pserver"), replica(1, role="pserver", **end), **DONE))
    assert (step.to, step.reason) == (J.SUCCEEDED, StopReason.COMPLETED)
    assert step.why.startswith("every trainer is done; after that pserver 1 on node 'n' ")


@pytest.mark.parametrize("detail", sorted(NOT_WANTED))
def test_a_pserver_stopped_after_its_trainers_is_not_reported(detail: str) -> None:
    stopped = replica(0, R.KILLED, role="pserver", exit_code=1, detail=detail)
    step = step_of(with_pservers(exited(0), stopped, **DONE))
    assert (step.to, step.why) == (J.SUCCEEDED, "every trainer is done")


def test_a_pserver_port_not_retaken_fails_no_finished_job() -> None:
    taken = exited(0, 125, detail="port 20001 is taken", role="pserver", started=False)
    step = step_of(with_pservers(exited(0), taken, **DONE))
    assert (step.to, step.why) == (
        J.SUCCEEDED, "every trainer is done; after that pserver 0 on node 'n' could not start: port 20001 is taken"
    )  # fmt: skip


def test_exit_code_127_of_a_running_program_is_a_plain_crash() -> None:
    assert step_of(job(exited(0, 127, detail="x", started=True))).reason == StopReason.REPLICA_FAILED
    assert step_of(job(exited(0, 127, detail="x", started=False))).reason == StopReason.START_FAILED


@pytest.mark.parametrize("reason", list(StopReason))
def test_every_stop_reason_ends_in_its_terminal_state(reason: StopReason) -> None:
    assert step_of(job(exited(0), state=J.STOPPING, reason=reason.value)).to is terminal_of(reason)


class JobMachine(RuleBasedStateMachine):
    """A job and its replicas under random reports, losses, cancels and placements."""

    def __init__(self) -> None:
        super().__init__()
        self.facts = job(state=J.QUEUED, max_restarts=2)
        self.epoch = 0
        self.placed_again = 0  # without a restart: nothing of the attempt had started
        self.clock = 0
        self.history: list[JobState] = [J.QUEUED]
        self.cancelled = False

    def settle(self) -> None:
        while (step := decide(self.facts)) is not None:
            if isinstance(step, Replace):
                self.put_in_place_of(step.replica)
                continue
            if step.to is J.RECOVERING and not step.is_restart:
                assert not self.facts.has_started
                self.placed_again += 1
            self.go(step.to, step.reason, self.facts.restarts + step.is_restart)

    def put_in_place_of(self, former: ReplicaFacts) -> None:
        assert former.state in (R.EXITED, R.KILLED)
        made = replica(former.index, R.ASSIGNED, role=former.role)
        replicas = tuple(made if r is former else r for r in self.facts.replicas)
        self.facts = replace(self.facts, replicas=replicas, restarts=self.facts.restarts + 1)

    def go(self, to: JobState, reason: str, restarts: int) -> None:
        assert allowed(self.facts.state, to), (self.facts.state, to)
        reason = reason or self.facts.reason
        self.facts = replace(self.facts, state=to, reason=reason, restarts=restarts)
        self.history.append(to)

    def live(self) -> list[int]:
        return [i for i, r in enumerate(self.facts.replicas) if r.state not in TERMINAL_REPLICA]

    @precondition(lambda self: self.facts.state in (J.QUEUED, J.RECOVERING) and not self.live())
    @rule(trainers=st.integers(1, 3), pservers=st.integers(0, 2))
    def place(self, trainers: int, pservers: int) -> None:
        self.epoch += 1
        made = [replica(i, R.ASSIGNED) for i in range(trainers)]
        made += [replica(i, R.ASSIGNED, role="pserver") for i in range(pservers)]
        self.facts = replace(self.facts, replicas=tuple(made), reason="", has_pservers=pservers > 0, has_started=False)
        self.go(J.STARTING, "", self.facts.restarts)
        self.settle()

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data(), after=st.sampled_from(list(R)), code=st.sampled_from([0, 0, 0, 1, 127, 137]))
    def report(self, data: st.DataObject, after: ReplicaState, code: int) -> None:
        i = data.draw(st.sampled_from(self.live()))
        before = self.facts.replicas[i]
        if not allowed(before.state, after):
            return
        self.clock += 1
        changed = replace(
            before,
            state=after,
            started=before.started or after is R.RUNNING,
            exit_code=code if after is R.EXITED and code < 128 else None,
            signal=code - 128 if after is R.EXITED and code > 128 else None,
            detail="no such program" if code == 127 else "",
            ended_at=START + timedelta(seconds=self.clock) if after in TERMINAL_REPLICA else None,
        )
        replicas = (*self.facts.replicas[:i], changed, *self.facts.replicas[i + 1 :])
        has_started = self.facts.has_started or after is R.RUNNING
        self.facts = replace(self.facts, replicas=replicas, has_started=has_started)
        self.settle()

    @precondition(lambda self: self.facts.state not in TERMINAL_JOB | {J.STOPPING})
    @rule()
    def cancel(self) -> None:
        self.cancelled = True
        self.go(J.STOPPING, StopReason.CANCELLED, self.facts.restarts)
        self.settle()

    @rule()
    def look_again(self) -> None:
        """Settling a job to which nothing has happened changes nothing."""
        before = self.facts
        self.settle()
        assert self.facts == before

    @invariant()
    def validate(self) -> None:
        """Terminal is final and has a reason; nothing runs then; the budget holds; nothing is left undecided."""
        facts = self.facts
        assert decide(facts) is None
        assert facts.restarts <= facts.max_restarts
        assert self.epoch <= facts.restarts + self.placed_again + 1
        if facts.state in TERMINAL_JOB:
            assert not self.live()
            assert facts.state is terminal_of(StopReason(facts.reason))
            assert self.history.count(facts.state) == 1
        if facts.state is J.SUCCEEDED:
            trainers = [r for r in facts.replicas if r.role == "trainer"]
            assert all(r.state is R.EXITED and r.exit_code == 0 for r in trainers)
            assert not any(r.exit_code == 1 for r in facts.replicas if r.role == "pserver")
        if facts.state is J.RUNNING:
            assert self.live()
            assert not any(r.state in (R.LOST, R.KILLED) for r in facts.replicas)
        if self.cancelled:
            assert facts.state in (J.STOPPING, J.CANCELLED)


def test_any_order_of_events_keeps_the_invariants() -> None:
    run_state_machine_as_test(JobMachine, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))


@pytest.mark.soak
def test_a_thousand_orders_of_events_keep_the_invariants() -> None:
    run_state_machine_as_test(JobMachine, settings=settings(max_examples=1000, stateful_step_count=30, deadline=None))


@given(st.lists(st.tuples(st.sampled_from(["beat", "wait"]), st.floats(0, 100)), max_size=30))
def test_lease_follows_the_last_heartbeat(steps: list[tuple[str, float]]) -> None:
    leases, now, last = Leases(15.0, 60.0), 1000.0, 1000.0
    leases.cut("a", now)
    for what, seconds in steps:
        now += seconds
        if what == "beat":
            leases.renew("a", now)
            last = now
        silent = now - last
        wanted = Standing.ALIVE if silent < 15 else Standing.MISSED if silent < 75 else Standing.GONE
        if min(abs(silent - 15), abs(silent - 75)) > 1e-6:  # at the very limit rounding decides
            assert leases.standing("a", now) is wanted


def test_heartbeat_never_shortens_a_lease() -> None:
    leases = Leases(15.0, 60.0)
    leases.ensure("a", 0.0)
    leases.renew("a", 1.0)
    assert leases.standing("a", 74.0) is Standing.ALIVE


def test_holder_known_from_before_a_restart_gets_a_fresh_grace() -> None:
    leases = Leases(15.0, 60.0)
    leases.ensure("a", 0.0)
    leases.ensure("a", 70.0)  # asked again: the first answer stands
    assert [leases.standing("a", t) for t in (74.0, 76.0, 136.0)] == [Standing.ALIVE, Standing.MISSED, Standing.GONE]
    leases.cut("a", 20.0)
    assert leases.standing("a", 36.0) is Standing.MISSED
