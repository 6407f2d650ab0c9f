"""Replicas that are asked to save and to end: by a notice beside their socket, and by their guard at its end."""

from __future__ import annotations

import math
import os
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
from penstock.protocol.agent import Desired, Preemption
from penstock.protocol.states import NOT_SAVED, PREEMPTED, SAVED_AT, saved_step
from penstock_worker import guard, lease, notices
from penstock_worker.guard import Ask, Phase, State, end_of_notice, step
from penstock_worker.reconcile import Life, Preempt, Stop, reconcile
from penstock_worker.replica import Replica, how_it_ended

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
SPOILS = (
    WAITS
    + """
notice.write_bytes(b"[" * 100_000)
time.sleep(600)
"""
)
LATER = 10.0
NOTICE = preemption.Notice(LATER, WHY)
WHATEVER = st.one_of(
    st.binary(max_size=40),
    st.integers(1, 10_000).map(lambda depth: b"[" * depth),
    st.integers(1, 5_000).map(lambda digits: b'{"until": ' + b"9" * digits + b', "why": ""}'),
    st.integers(1, 5_000).map(lambda digits: b'{"saved": ' + b"9" * digits + b"}"),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "true", "null", "[]"]).map(
        lambda text: f'{{"until": {text}, "why": "", "saved": {text}}}'.encode()
    ),
    st.text(max_size=30_000).map(lambda why: preemption.encode(5.0, why)),
)


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


@given(st.lists(WHATEVER, max_size=4))
def test_any_bytes_are_a_notice_and_answer_or_none(lines: list[bytes]) -> None:
    content = b"\n".join(lines)
    found, step = preemption.decode(content), preemption.decode_answer(content)
    assert found is None or (math.isfinite(found.until) and len(found.why) <= preemption.MAX_WHY_CHARS)
    assert step is None or (type(step) is int and saved_step(f"{SAVED_AT}{step}") == step)


@given(st.text(max_size=3_000))
def test_an_answer_is_read_after_any_notice(why: str) -> None:
    asked = preemption.encode(5.0, why)
    found = preemption.decode(asked)
    assert found is not None
    assert found.until == 5.0
    assert preemption.decode_answer(asked + preemption.encode_answer(7) * 20) == 7


def test_the_last_answer_of_a_notice_counts() -> None:
    asked = preemption.encode(5.0, WHY)
    assert preemption.decode(asked) == preemption.Notice(5.0, WHY)
    assert preemption.decode_answer(asked) is None
    answered = asked + b'{"saved": true}\n{"saved": -1}\n' + preemption.encode_answer(3) + preemption.encode_answer(8)
    assert preemption.decode_answer(answered + b'{"saved": 1e3}\n') == 8


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder", "sparse"])
def test_no_file_of_a_job_harms_who_reads_its_answer(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "t.preempt", tmp_path / "other"
    other.write_bytes(preemption.encode_answer(7))
    match kind:
        case "link":
            path.symlink_to(other)
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
    assert notices.answer(path) is None


def test_guard_retains_the_end_of_a_notice_that_vanishes(tmp_path: Path) -> None:
    path = tmp_path / notices.FILE
    assert end_of_notice(str(path), math.inf) == math.inf
    notices.write(tmp_path, preemption.encode(LATER, WHY))
    assert end_of_notice(str(path), math.inf) == LATER
    for content in (b"", b'{"until": NaN, "why": ""}', preemption.encode(LATER * 2, WHY)):
        path.write_bytes(content)
        assert end_of_notice(str(path), LATER) == LATER
    assert end_of_notice("", math.inf) == math.inf, "an order of before notices"


def _ending(state: str, exit_code: int | None) -> dict[str, Any]:
    return {"state": state, "exit_code": exit_code, "signal": None, "detail": ""}


@pytest.mark.parametrize(
    ("ended", "notice", "saved", "expected"),
    [
        (("EXITED", 75), NOTICE, 7, ("KILLED", f"{SAVED_AT}7")),
        (("EXITED", 75), None, 7, ("EXITED", "")),
        (("EXITED", 1), None, 7, ("EXITED", "")),
        (("EXITED", None), None, 7, ("EXITED", "")),
        (("KILLED", None), None, 7, ("KILLED", "")),
        (("EXITED", 0), NOTICE, 7, ("EXITED", "")),
        (("EXITED", 1), NOTICE, None, ("EXITED", "")),
        (("KILLED", None), NOTICE, None, ("KILLED", f"{PREEMPTED}{WHY}{NOT_SAVED}")),
    ],
)
def test_an_answer_counts_only_after_a_notice(
    ended: tuple[str, int | None], notice: Any, saved: int | None, expected: tuple[str, str]
) -> None:
    found = how_it_ended(_ending(*ended), "", notice, saved)
    assert (found["state"], found["detail"]) == expected


@pytest.mark.parametrize("detail", ["", SAVED_AT, f"{SAVED_AT}x", f"{SAVED_AT}²", f"{SAVED_AT}{10**20}", "7"])
def test_other_details_name_no_saved_step(detail: str) -> None:
    assert saved_step(detail) is None
    assert saved_step(f"{SAVED_AT}412") == 412


def test_guards_of_before_notices_are_asked_to_stop(tmp_path: Path, order: Order) -> None:
    others: list[dict[str, str]] = [{}, {"notice": ""}, {"notice": "/elsewhere/t.preempt"}]
    for fields in [*others, {"notice": str(tmp_path / notices.FILE)}]:
        desired = Desired.model_validate(order("r1", "true"))
        replica = Replica(desired, tmp_path, changed=lambda: None, wake=lambda: None)
        replica.report = replica.report.model_copy(update={"state": "RUNNING"})
        lease.write_json(tmp_path / guard.ORDER, fields)
        replica.preempt(Preemption(why=WHY, grace_s=30))
        assert replica.stopping is (fields in others)
        assert (replica.notice is None) is (notices.read(tmp_path / notices.FILE) is None) is (fields in others)


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
    await server.want(order("r1", "python", "-c", SPOILS))
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
