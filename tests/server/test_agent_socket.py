"""The life of a job through an agent's socket: a fake agent does what the test says, the server is real."""

from __future__ import annotations

from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import FakeClock, Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.protocol.frames import Kind

pytestmark = pytest.mark.asyncio


async def refused(server: Server, reason: str) -> float:
    value: float = server.runtime.meters.refused.labels(reason)._value.get()
    return value


@pytest.mark.smoke
async def test_job_runs_from_queued_to_succeeded(server: Server) -> None:
    job = await server.submit(trainers={"count": 2}, env={"CPU_NUM": "2"}, entrypoint=["python", "train.py"])
    assert job["state"] == "QUEUED"
    waiting = await until_answer(lambda: server.job(job["id"]), lambda j: "none is READY" in j["why"])
    assert waiting["replicas"] == []
    async with server.agent(await server.join()) as agent:
        first, second = await agent.desired(2)
        assert (first["entrypoint"], first["env"]) == (["python", "train.py"], {"CPU_NUM": "2"})
        assert (first["role"], first["index"], second["index"], first["epoch"]) == ("trainer", 0, 1, 1)
        assert first["stream"] != second["stream"]
        assert (await server.job(job["id"]))["state"] == "STARTING"
        for replica in (first, second):
            await agent.start(replica)
        running_job = await server.job_in(job["id"], "RUNNING")
        assert "runs 2 trainers on node 'n1'" in running_job["why"]
        assert running_job["replicas"][0]["pid"] == 99
        for replica in (first, second):
            await agent.report(replica, "EXITED", exit_code=0)
        done = await server.job_in(job["id"], "SUCCEEDED")
        assert (done["reason"], done["attempt"]) == ("completed", 1)
        await agent.desired(0)
    events = (await server.http.get(f"/api/v1/jobs/{job['id']}/events")).json()["items"]
    path = [e["to"] for e in events if e["kind"] == "job"]
    assert path == ["CREATED", "QUEUED", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    assert [e["from"] for e in events if e["kind"] == "job"] == [None, *path[:-1]]


async def test_crash_names_replica_code_and_log_and_stops_the_others(server: Server) -> None:
    job = await server.submit(trainers={"count": 2})
    async with server.agent(await server.join()) as agent:
        first, second = await agent.desired(2)
        await agent.start(first)
        await agent.start(second)
        await agent.log(second, 0, b"step 1\nValueError: boom\n")
        await agent.report(second, "EXITED", exit_code=1)
        await agent.desired(0)
        stopping = await server.job_in(job["id"], "STOPPING")
        assert stopping["reason"] == "replica_failed"
        await agent.report(first, "KILLED", signal=15)
        failed = await server.job_in(job["id"], "FAILED")
    assert "trainer 1 on node 'n1' exited with code 1" in failed["why"]
    assert "ValueError: boom" in failed["why"]


async def test_signal_is_named(server: Server) -> None:
    job = await server.submit()
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await agent.report(replica, "EXITED", signal=11)
        failed = await server.job_in(job["id"], "FAILED")
    assert "signal 11 (SIGSEGV)" in failed["why"]


async def test_entrypoint_that_does_not_exist_fails_the_start(server: Server) -> None:
    job = await server.submit(entrypoint=["nosuch"], restart={"max_restarts": 3, "on": ["infra"]})
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.report(replica, "PREPARING")
        await agent.report(replica, "EXITED", exit_code=127, detail="no program 'nosuch' on PATH; correct entrypoint")
        failed = await server.job_in(job["id"], "FAILED")
    assert failed["reason"] == "start_failed"
    assert failed["why"] == "trainer 0 on node 'n1' could not start: no program 'nosuch' on PATH; correct entrypoint"


async def test_cancel_ends_when_the_replicas_are_gone(server: Server) -> None:
    job = await server.submit()
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        await server.job_in(job["id"], "RUNNING")
        answer = await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
        assert (answer.status_code, answer.json()["state"]) == (202, "STOPPING")
        await agent.desired(0)
        again = await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
        assert again.json()["state"] == "STOPPING"
        await agent.report(replica, "KILLED", signal=15)
        done = await server.job_in(job["id"], "CANCELLED")
        assert done["why"] == "cancelled by 'admin'"
    assert (await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")).json()["version"] == done["version"]


async def test_queued_job_is_cancelled_at_once(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    answer = await sqlite_server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
    assert answer.json()["state"] == "CANCELLED"


async def test_pservers_are_placed_with_trainers_and_stopped_last(server: Server) -> None:
    job = await server.submit(mode="pserver", trainers={"count": 1}, pservers={"count": 1})
    async with server.agent(await server.join()) as agent:
        trainer, pserver = await agent.desired(2)
        assert (trainer["role"], pserver["role"]) == ("trainer", "pserver")
        await agent.start(trainer)
        await agent.start(pserver)
        await agent.report(trainer, "EXITED", exit_code=0)
        await agent.desired(0)
        await agent.report(pserver, "KILLED", signal=15)
        await server.job_in(job["id"], "SUCCEEDED")


async def test_job_that_fits_no_node_waits_and_says_what_it_lacks(sqlite_server: Server) -> None:
    async with sqlite_server.agent(await sqlite_server.join(cpus=4)):
        big = await sqlite_server.submit(name="big", trainers={"cpus": 64})
        waiting = await until_answer(lambda: sqlite_server.job(big["id"]), lambda j: "asks for 64 CPUs" in j["why"])
        assert waiting["state"] == "QUEUED"
        assert "the largest, 'n1', has 4 CPUs" in waiting["why"]


async def test_server_restart_loses_nothing_and_the_agent_carries_on(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, database_url)
    async with running(settings) as server:
        job = await server.submit()
        node = await server.join()
        async with server.agent(node) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            assert await agent.log(replica, 0, b"before\n") == 7
            await server.job_in(job["id"], "RUNNING")
    async with running(settings) as server:
        here = {"replica_id": replica["replica_id"], "epoch": 1, "state": "RUNNING", "pid": 99}
        async with server.agent(node, [here]) as agent:
            welcome = await agent.get_welcome()
            assert welcome is not None
            assert welcome["log_offsets"] == {replica["replica_id"]: 7}
            assert await agent.desired(1) == [replica]
            await agent.report(replica, "EXITED", exit_code=0)
            await server.job_in(job["id"], "SUCCEEDED")


async def test_a_missed_lease_makes_replicas_unknown_until_reconnect(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        job = await server.submit()
        node = await server.join()
        async with server.agent(node) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
        clock.advance(16)
        away = await until_answer(lambda: server.job(job["id"]), lambda j: "is unreachable" in j["why"])
        assert away["replicas"][0]["state"] == "UNKNOWN"
        assert (await nodes(server))[0]["state"] == "UNREACHABLE"
        here = {"replica_id": replica["replica_id"], "epoch": 1, "state": "RUNNING", "pid": 99}
        async with server.agent(node, [here]) as agent:
            back = await until_answer(lambda: server.job(job["id"]), lambda j: j["replicas"][0]["state"] == "RUNNING")
            assert back["why"] == "runs 1 trainer on node 'n1'"
            assert (await nodes(server))[0]["state"] == "READY"
            await agent.desired(1)


async def test_node_silent_beyond_grace_is_down_and_its_job_fails(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        job = await server.submit(restart={"max_restarts": 0})
        node = await server.join()
        async with server.agent(node) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
        clock.advance(15 + 60 + 1)
        failed = await server.job_in(job["id"], "FAILED")
        assert failed["reason"] == "node_lost"
        assert "trainer 0 on node 'n1' was lost" in failed["why"]
        assert (await nodes(server))[0]["state"] == "DOWN"
        async with server.agent(node, [{"replica_id": replica["replica_id"], "epoch": 1, "state": "RUNNING"}]) as agent:
            assert await agent.desired(0) == []  # so that the agent ends what it still has
            assert (await nodes(server))[0]["state"] == "READY"


async def test_a_lost_node_with_restarts_left_gives_a_fencing_attempt(
    database_url: str, tmp_path: Path, clock: FakeClock
) -> None:
    async with running(settings_for(tmp_path, database_url), clock) as server:
        job = await server.submit(restart={"max_restarts": 1, "on": ["infra"]})
        old_node = await server.join("old")
        async with server.agent(old_node) as agent:
            [old] = await agent.desired(1)
            await agent.start(old)
        clock.advance(15 + 60 + 1)
        recovering = await server.job_in(job["id"], "RECOVERING")
        assert "restart 1 of 1" in recovering["reason_detail"]
        async with server.agent(await server.join("new")) as agent:
            [new] = await agent.desired(1)
            assert (new["epoch"], new["replica_id"] != old["replica_id"]) == (2, True)
            await agent.start(new)
            again = await server.job_in(job["id"], "RUNNING")
            assert (again["epoch"], again["attempt"], again["reason"]) == (2, 2, "")
            async with server.agent(old_node) as stale:
                await stale.frame(old, Kind.PROGRESS, body={"done": 1, "total": 2, "unit": "step"})
                await until_answer(lambda: refused(server, "stale_epoch"), lambda n: n == 1)
                await stale.report(new, "EXITED", exit_code=1)
                await until_answer(lambda: refused(server, "foreign_replica"), lambda n: n == 1)
                await stale.frame(old, Kind.SCALARS, body={"step": 1, "values": {"auc": 0.5}})
                await until_answer(lambda: server.job(job["id"]), lambda found: found["lost"] == {"SCALARS": 1})
            await agent.report({**new, "epoch": 1}, "EXITED", exit_code=1)
            await until_answer(lambda: refused(server, "stale_epoch"), lambda n: n == 3)
            job_now = await server.job(job["id"])
            assert (job_now["state"], job_now["progress"]) == ("RUNNING", None)


async def test_a_replica_lost_with_its_agent_is_never_started_twice(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        job = await server.submit(restart={"max_restarts": 0})
        node = await server.join()
        async with server.agent(node) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
        async with server.agent(node) as agent:
            await until_answer(agent_messages(agent), lambda kinds: "desired" in kinds)
            assert await agent.get_desired() == []
            clock.advance(6)
            failed = await server.job_in(job["id"], "FAILED")
            assert "its agent came back without it" in failed["why"]


async def test_a_replica_ended_during_a_disconnect_keeps_its_exit_code(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path)) as server:
        job = await server.submit()
        node = await server.join()
        async with server.agent(node) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
        async with server.agent(node) as agent:
            await agent.report(replica, "EXITED", exit_code=0)
            await server.job_in(job["id"], "SUCCEEDED")


async def test_stopping_job_whose_agent_never_answers_ends(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server:
        job = await server.submit()
        async with server.agent(await server.join()) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await server.job_in(job["id"], "RUNNING")
            await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
            for _ in range(5):
                leases = await agent.count_leases()
                await agent.send(type="beat")
                await until_answer(agent.count_leases, leases.__lt__)
                clock.advance(9)
            done = await server.job_in(job["id"], "CANCELLED")
            assert done["replicas"][0]["state"] == "LOST"


async def test_logs_are_stored_once_and_whole(server: Server) -> None:
    job = await server.submit()
    async with server.agent(await server.join()) as agent:
        [replica] = await agent.desired(1)
        await agent.start(replica)
        assert await agent.log(replica, 0, b"one\n") == 4
        assert await agent.log(replica, 0, b"one\n") == 4  # repeated
        assert await agent.log(replica, 9, b"three\n") == 4  # ahead: the bytes between are asked for
        assert await agent.log(replica, 2, "e\nzzzö\n".encode()) == 10
        answer = (await server.http.get(f"/api/v1/jobs/{job['id']}/logs")).json()
        assert (answer["text"], answer["next_offset"], answer["eof"]) == ("one\nzzzö\n", 10, False)
        part = (await server.http.get(f"/api/v1/jobs/{job['id']}/logs?offset=4&limit=4")).json()
        assert (part["text"], part["next_offset"]) == ("zzz", 7)  # the letter is not cut in two
        await agent.report(replica, "EXITED", exit_code=0)
        await server.job_in(job["id"], "SUCCEEDED")
    assert (await server.http.get(f"/api/v1/jobs/{job['id']}/logs?offset=4")).json()["eof"] is True


async def test_foreign_replica_can_neither_be_reported_nor_logged(sqlite_server: Server) -> None:
    server = sqlite_server
    job = await server.submit()
    mine, other = await server.join("mine"), await server.join("other")
    async with server.agent(mine) as agent:
        [replica] = await agent.desired(1)
        async with server.agent(other) as thief:
            await thief.report(replica, "EXITED", exit_code=0)
            await until_answer(lambda: refused(server, "foreign_replica"), lambda n: n == 1)
            await thief.frame(replica, Kind.PROGRESS, body={"done": 1, "total": 1})
            await until_answer(lambda: refused(server, "foreign_stream"), lambda n: n == 1)
            await thief.ws.send(b"no frame at all")
            await until_answer(lambda: refused(server, "bad_frame"), lambda n: n == 1)
    assert (await server.job(job["id"]))["state"] == "STARTING"


async def test_heartbeat_extends_the_lease(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server, server.agent(await server.join()) as agent:
        for beats in range(1, 4):
            clock.advance(10)
            await agent.send(type="beat", cpu_percent=1.0, memory_used_bytes=1)

            await until_answer(agent.count_leases, partial(eq, beats))
        assert (await nodes(server))[0]["state"] == "READY"


async def test_a_nodes_clock_is_shown_as_its_agent_found_it(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path), clock) as server, server.agent(await server.join()) as agent:
        assert (await nodes(server))[0]["clock"] is None
        await agent.send(type="beat", clock={"offset_ns": 3_200_000, "error_ns": 400_000})
        await until_answer(agent.count_leases, partial(eq, 1))
        assert (await nodes(server))[0]["clock"] == {"offset_ms": 3.2, "error_ms": 0.4}
        [lease] = [message for message in agent.messages if message["type"] == "lease"]
        assert lease["received_ns"] == lease["answered_ns"] == int(clock.now().timestamp()) * 1_000_000_000


async def test_a_cordoned_node_stays_cordoned_over_a_reconnect(sqlite_server: Server) -> None:
    server = sqlite_server
    node = await server.join()
    async with server.agent(node):
        assert (await server.http.post(f"/api/v1/nodes/{node[0]}:cordon")).json()["state"] == "CORDONED"
        job = await server.submit()
        await until_answer(lambda: server.job(job["id"]), lambda j: "none is READY" in j["why"])
        assert (await server.http.post(f"/api/v1/nodes/{node[0]}:uncordon")).json()["state"] == "READY"
        await server.job_in(job["id"], "STARTING")
        assert (await nodes(server))[0]["cpus_used"] == 1


async def test_malformed_message_closes_the_socket_and_names_the_field(sqlite_server: Server) -> None:
    async with sqlite_server.agent(await sqlite_server.join()) as agent:
        await agent.send(type="replica", replica_id="x", epoch=1, state="DANCING")
        await agent.ws.wait_closed()
        assert agent.ws.close_code == 4400
        assert "state" in (agent.ws.close_reason or "")


async def nodes(server: Server) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await server.http.get("/api/v1/nodes")).json()["items"]
    return items


def agent_messages(agent: Any) -> Any:
    async def kinds() -> set[str]:
        return {m["type"] for m in agent.messages}

    return kinds
