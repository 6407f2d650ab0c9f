"""Replicas that are asked to save and to end: by a notice beside their socket, and by their guard at its end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.worker.test_agent_with_fake_server import Order, Until
from tests.worker.test_guard_decisions import facts
from tests.worker.test_reconcile_properties import DESIRED, OBSERVED

from penstock.protocol import preemption
from penstock.protocol.agent import Preemption
from penstock.protocol.states import NOT_SAVED, PREEMPTED, SAVED_AT, saved_step
from penstock_worker.guard import Ask, Phase, State, step
from penstock_worker.reconcile import Life, Preempt, Stop, reconcile

WHY = "node 'n1' is drained"
NOTICED = st.dictionaries(st.sampled_from("abcde"), st.just(Preemption(why=WHY, grace_s=1)))
WAITS = """
import os, pathlib, sys, time
notice = pathlib.Path(os.environ["PENSTOCK_TELEMETRY_SOCKET"]).with_suffix(".preempt")
print("up", flush=True)
while not notice.exists():
    time.sleep(0.01)
print("asked", flush=True)
"""
SAVES = (
    WAITS
    + """
with notice.open("ab") as file:
    file.write(b'{"saved": 7}\\n')
sys.exit(75)
"""
)
DOES_NOT = WAITS + "time.sleep(600)"


@given(DESIRED, OBSERVED, NOTICED)
def test_only_what_is_unwanted_gets_a_notice_and_once(wanted: Any, observed: Any, preempted: Any) -> None:
    given_to = {one.replica_id for one in reconcile(wanted, observed, preempted) if isinstance(one, Preempt)}
    stopped = {one.replica_id for one in reconcile(wanted, observed, preempted) if isinstance(one, Stop)}
    unwanted = {id for id, seen in observed.items() if id not in wanted or wanted[id].epoch > seen.epoch}
    assert given_to == {id for id in unwanted if observed[id].life is Life.ALIVE and id in preempted}
    lives = (Life.ALIVE, Life.NOTICED)
    assert stopped == {id for id in unwanted if observed[id].life in lives and id not in preempted}


def test_guard_stops_a_replica_at_the_end_of_its_notice() -> None:
    assert step(State(), facts(now=9.9, notice_end=10.0), stop_grace_s=5.0) == (State(), None)
    state, number = step(State(), facts(now=10.0, notice_end=10.0), stop_grace_s=5.0)
    assert (state, number) == (State(Phase.ENDING, 15.0, "preempted"), signal.SIGTERM)
    assert step(state, facts(now=15.0, notice_end=10.0), stop_grace_s=5.0)[1] is signal.SIGKILL
    early = step(State(), facts(now=1.0, ask=Ask.STOP, notice_end=10.0), stop_grace_s=5.0)
    assert early == (State(Phase.ENDING, 6.0, "stopped"), signal.SIGTERM), "a notice delays no stop"


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_a_notice_or_none(first: bytes, other: bytes) -> None:
    found = preemption.decode(first + b"\n" + other)
    assert found is None or found.saved is None or found.saved >= 0
    assert preemption.decode(preemption.encode(5.0, WHY) + other) is not None


def test_the_last_answer_of_a_notice_counts() -> None:
    asked = preemption.encode(5.0, WHY)
    assert preemption.decode(asked) == preemption.Notice(5.0, WHY)
    answered = asked + b'{"saved": true}\n{"saved": -1}\n' + preemption.encode_answer(3) + preemption.encode_answer(8)
    assert preemption.decode(answered) == preemption.Notice(5.0, WHY, 8)


@pytest.mark.parametrize("detail", ["", SAVED_AT, f"{SAVED_AT}x", f"{SAVED_AT}²", f"{SAVED_AT}{10**20}", "7"])
def test_other_details_name_no_saved_step(detail: str) -> None:
    assert saved_step(detail) is None
    assert saved_step(f"{SAVED_AT}412") == 412


@pytest.mark.asyncio
async def test_a_replica_that_saves_is_reported_with_its_step(
    server: Any, agent: Any, order: Order, until: Until
) -> None:
    agent.start(server.port)
    await server.want(order("r1", "python", "-c", SAVES))
    await until(lambda: server.logs.get("r1") == b"up\n")
    for _ in range(2):  # a second notice changes nothing
        await server.want(preempted={"r1": {"why": WHY, "grace_s": 600}})
    await until(lambda: "KILLED" in server.states("r1"))
    last = server.last("r1")
    assert (last["detail"], last["exit_code"], last["signal"]) == (f"{SAVED_AT}7", 75, None)
    await server.want()
    await until(lambda: not (agent.state_dir / "replicas" / "r1").exists())


@pytest.mark.asyncio
async def test_what_does_not_save_is_stopped_without_an_agent(
    server: Any, agent: Any, order: Order, until: Until
) -> None:
    agent.start(server.port)
    await server.want(order("r1", "python", "-c", DOES_NOT))
    await until(lambda: server.logs.get("r1") == b"up\n")
    await server.want(preempted={"r1": {"why": WHY, "grace_s": 1}})
    log = agent.state_dir / "replicas" / "r1" / "log"
    await until(lambda: b"asked" in log.read_bytes())
    agent.kill()
    await until(lambda: _ended(agent.state_dir))
    agent.start(server.port)
    await until(lambda: "KILLED" in server.states("r1"))
    last = server.last("r1")
    assert (last["detail"], last["signal"]) == (f"{PREEMPTED}{WHY}{NOT_SAVED}", signal.SIGTERM)


@pytest.mark.asyncio
async def test_a_withdrawn_notice_is_a_stop(server: Any, agent: Any, order: Order, until: Until) -> None:
    agent.start(server.port)
    await server.want(order("r1", "python", "-c", DOES_NOT))
    await until(lambda: server.logs.get("r1") == b"up\n")
    await server.want(preempted={"r1": {"why": WHY, "grace_s": 600}})
    await until(lambda: server.logs.get("r1") == b"up\nasked\n")
    await server.want()
    await until(lambda: "KILLED" in server.states("r1"))


@pytest.mark.asyncio
async def test_a_terminated_pilot_gives_jobs_time_to_save(server: Any, agent: Any, order: Order, until: Until) -> None:
    process = agent.start(server.port, "--ttl", "3600")
    await server.want(order("r1", "python", "-c", SAVES, checkpoint={}))
    await until(lambda: server.logs.get("r1") == b"up\n")
    process.send_signal(signal.SIGTERM)
    await until(lambda: "ends_in_s" in server.heartbeats[-1])
    assert 0 < server.heartbeats[-1]["ends_in_s"] <= 12
    await server.want(preempted={"r1": {"why": WHY, "grace_s": 30}})
    await until(lambda: "KILLED" in server.states("r1"))
    assert server.last("r1")["detail"] == f"{SAVED_AT}7"


def _ended(state_dir: Path) -> bool:
    path = state_dir / "replicas" / "r1" / "exit.json"
    return path.exists() and path.stat().st_size > 0
