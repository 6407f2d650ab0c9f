"""The guard's decisions, without processes."""

from __future__ import annotations

import signal

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_worker.guard import Ask, Facts, Phase, State, step

GRACE_S = 5.0


def facts(
    now: float = 0.0,
    *,
    main: bool = True,
    others: bool = False,
    ask: Ask = Ask.NOTHING,
    lease_end: float = 1e9,
    notice_end: float = 1e9,
) -> Facts:
    return Facts(now, main, others, ask, lease_end, notice_end)


def test_a_replica_runs_on_without_requests_while_leased() -> None:
    assert step(State(), facts(now=99.0, lease_end=100.0), stop_grace_s=GRACE_S) == (State(), None)


def test_a_stop_sends_term_and_after_the_grace_kill() -> None:
    state, number = step(State(), facts(now=10.0, ask=Ask.STOP), stop_grace_s=GRACE_S)
    assert (state, number) == (State(Phase.ENDING, 15.0, "stopped"), signal.SIGTERM)
    assert step(state, facts(now=14.9), stop_grace_s=GRACE_S) == (state, None)
    state, number = step(state, facts(now=15.0, main=False, others=True), stop_grace_s=GRACE_S)
    assert (state, number) == (State(Phase.KILLING, cause="stopped"), signal.SIGKILL)
    assert step(state, facts(now=15.1, others=True), stop_grace_s=GRACE_S) == (state, signal.SIGKILL)
    assert step(state, facts(now=15.2, main=False), stop_grace_s=GRACE_S)[0].phase is Phase.DONE


def test_a_lease_that_is_over_ends_the_replica_and_is_the_cause() -> None:
    state, number = step(State(), facts(now=100.0, lease_end=100.0), stop_grace_s=GRACE_S)
    assert (state.phase, state.cause, number) == (Phase.ENDING, "lease expired", signal.SIGTERM)


def test_orphans_of_an_ended_entrypoint_end_without_a_cause() -> None:
    state, number = step(State(), facts(now=1.0, main=False, others=True), stop_grace_s=GRACE_S)
    assert (state, number) == (State(Phase.ENDING, 2.0, ""), signal.SIGTERM)
    assert step(state, facts(now=1.5, main=False), stop_grace_s=GRACE_S)[0] == State(Phase.DONE)


def test_a_kill_waits_for_no_grace() -> None:
    state, number = step(State(), facts(ask=Ask.KILL), stop_grace_s=GRACE_S)
    assert (state.phase, number) == (Phase.KILLING, signal.SIGKILL)
    ending = State(Phase.ENDING, 100.0, "stopped")
    assert step(ending, facts(ask=Ask.KILL), stop_grace_s=GRACE_S)[1] is signal.SIGKILL


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Ask), st.booleans()), max_size=30), st.floats(0, 20))
def test_any_events_end_in_killing_a_grace_after_the_lease(events: list[tuple[Ask, bool]], grace_s: float) -> None:
    state = State()
    for at, (ask, others) in enumerate(events):
        before = state
        state, _ = step(state, facts(float(at), others=others, ask=ask, lease_end=50.0), stop_grace_s=grace_s)
        assert list(Phase).index(state.phase) >= list(Phase).index(before.phase), "a phase went backwards"
        assert before.cause in ("", state.cause), "the first cause was forgotten"
    state, _ = step(state, facts(60.0, lease_end=50.0), stop_grace_s=grace_s)
    state, number = step(state, facts(60.0 + grace_s, lease_end=50.0), stop_grace_s=grace_s)
    assert (state.phase, number) == (Phase.KILLING, signal.SIGKILL)
