"""Python stacks on request: what the server asks an agent for, and what it answers where none can be taken."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.server.harness import FakeAgent, Server
from tests.support.waiting import until_answer

from penstock_server.services import stacks

pytestmark = pytest.mark.asyncio
FRAMES = [
    {"name": "wait", "file": "/usr/lib/python3.12/threading.py", "line": 355},
    {"name": "train", "file": "/home/me/train.py", "line": 41},
]
PROCESS = {"pid": 99, "command": "python train.py", "threads": [{"name": "MainThread", "frames": FRAMES}]}


async def ask(server: Server, job: dict[str, Any], token: str | None = None, skip: int = 0) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return await server.http.post(f"/api/v1/jobs/{job['id']}:stack", headers=headers, params={"skip": skip})


async def order(agent: FakeAgent, number: int = 1) -> dict[str, Any]:
    """Wait for the order of this number."""

    async def orders() -> list[dict[str, Any]]:
        return [message for message in agent.messages if message["type"] == "stack"]

    return (await until_answer(orders, lambda found: len(found) >= number))[number - 1]


async def started(server: Server, agent: FakeAgent, job: dict[str, Any]) -> dict[str, Any]:
    [replica] = await agent.desired(1)
    await agent.start(replica)
    await until_answer(lambda: server.job(job["id"]), lambda found: found["replicas"][0]["state"] == "RUNNING")
    return replica


async def test_one_answer_serves_all_and_each_request_is_audited(sqlite_server: Server) -> None:
    server = sqlite_server
    job, reader = await server.submit(), await server.token("read")
    async with server.agent(await server.join(), takes_stacks=True) as agent:
        replica = await started(server, agent, job)
        both = [asyncio.create_task(ask(server, job, reader)) for _ in range(2)]
        asked = await order(agent)
        assert asked["replica_id"] == replica["replica_id"]

        async def entries() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await server.http.get(f"/api/v1/audit?subject={job['id']}")).json()["items"]
            return [one for one in found if one["route"].endswith(":stack")]

        rows = await until_answer(entries, lambda found: len(found) == 2)
        assert {row["token_name"] for row in rows} == {"test"}
        await agent.send(type="stack", request_id=asked["request_id"], processes=[PROCESS])
        answers = [await task for task in both]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].json() == answers[1].json()
    found = answers[0].json()
    assert (found["role"], found["index"], found["replica_id"]) == ("trainer", 0, replica["replica_id"])
    [thread] = found["processes"][0]["threads"]
    assert [(one["name"], one["line"], one["own"]) for one in thread["frames"]] == [
        ("wait", 355, False), ("train", 41, True),
    ]  # fmt: skip
    assert len([message for message in agent.messages if message["type"] == "stack"]) == 1


@pytest.mark.parametrize(("rest_s", "status"), [(3600.0, 429), (0.0, 409)])
async def test_a_replica_is_left_alone_for_a_while(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch, rest_s: float, status: int
) -> None:
    monkeypatch.setattr(stacks, "REST_S", rest_s)
    server = sqlite_server
    job = await server.submit()
    async with server.agent(await server.join(), takes_stacks=True) as agent:
        await started(server, agent, job)
        for number, expected in ((1, 409), (2, status)):
            task = asyncio.create_task(ask(server, job))
            if expected == 409:
                asked = await order(agent, number)
                await agent.send(type="stack", request_id=asked["request_id"], error="no Python runs in this replica")
            answer = await task
            assert answer.status_code == expected, answer.text
            assert answer.json()["code"] == {409: "no_stacks", 429: "too_many_stacks"}[expected]


async def test_answers_of_other_nodes_and_late_ones_are_dropped(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 1.0)
    server = sqlite_server
    job = await server.submit()
    node = await server.join()
    async with server.agent(node, takes_stacks=True) as agent:
        await started(server, agent, job)
        async with server.agent(await server.join("n2"), takes_stacks=True) as other:
            task = asyncio.create_task(ask(server, job))
            asked = await order(agent)
            forged = {**PROCESS, "command": "forged"}
            await other.send(type="stack", request_id=asked["request_id"], processes=[forged])
            answer = await task
            assert (answer.status_code, answer.json()["code"]) == (409, "agent_silent")
            assert "penstock nodes" in answer.json()["hint"]
            await agent.send(type="stack", request_id=asked["request_id"], processes=[PROCESS])
            await agent.send(type="beat")
            assert await until_answer(agent.count_leases, bool)  # the connection was kept


async def test_a_connection_that_ends_is_an_answer_at_once(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_S", 3600.0)
    server, job = sqlite_server, await sqlite_server.submit()
    async with server.agent(await server.join(), takes_stacks=True) as agent:
        await started(server, agent, job)
        task = asyncio.create_task(ask(server, job))
        await order(agent)
    answer = await asyncio.wait_for(task, 60)
    assert (answer.status_code, answer.json()["code"]) == (409, "connection_lost")
    assert "penstock nodes" in answer.json()["hint"]


async def test_processes_behind_the_first_are_asked_for(sqlite_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "REST_S", 0.0)
    server, job = sqlite_server, await sqlite_server.submit()
    async with server.agent(await server.join(), takes_stacks=True) as agent:
        await started(server, agent, job)
        first = asyncio.create_task(ask(server, job))
        asked = await order(agent, 1)
        refused = await ask(server, job, skip=8)  # another part of the same replica is being taken
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_stacks")
        await agent.send(type="stack", request_id=asked["request_id"], processes=[PROCESS], num_left=1)
        found = (await first).json()
        assert (asked["skip"], found["skip"], found["num_left"]) == (0, 0, 1)
        for number, echoed in ((2, {"skip": 8}), (3, {})):  # the last one is of an agent that knows no `skip`
            task = asyncio.create_task(ask(server, job, skip=8))
            asked = await order(agent, number)
            assert asked["skip"] == 8
            await agent.send(type="stack", request_id=asked["request_id"], processes=[PROCESS], **echoed)
            answer = await task
            if echoed:
                assert (answer.json()["skip"], answer.json()["num_left"]) == (8, 0)
            else:
                assert (answer.status_code, answer.json()["code"]) == (409, "agent_too_old")


async def test_an_agent_of_the_version_before_is_not_asked(sqlite_server: Server) -> None:
    server = sqlite_server
    job = await server.submit()
    async with server.agent(await server.join()) as agent:
        await started(server, agent, job)
        answer = await ask(server, job)
        assert (answer.status_code, answer.json()["code"]) == (409, "agent_too_old")
        assert "update Penstock" in answer.json()["hint"]
        assert [message for message in agent.messages if message["type"] == "stack"] == []


async def test_an_answer_without_stacks_says_what_to_do(sqlite_server: Server) -> None:
    server = sqlite_server
    job = await server.submit()
    assert (await ask(server, job)).json()["code"] == "replica_not_found"
    async with server.agent(await server.join(), takes_stacks=True) as agent:
        [replica] = await agent.desired(1)
        await agent.report(replica, "PREPARING")
        await until_answer(lambda: server.job(job["id"]), lambda found: found["replicas"][0]["state"] == "PREPARING")
        assert (await ask(server, job)).json()["code"] == "replica_not_running"
        await started(server, agent, job)
    await until_answer(lambda: _connected(server), lambda links: not links)
    answer = await ask(server, job)
    assert answer.json()["code"] == "node_unreachable" and "penstock nodes" in answer.json()["hint"]
    async with server.attached("by-hand") as trainer:
        attached = await server.job(trainer.registered["job_id"])
        answer = await ask(server, attached)
        assert answer.json()["code"] == "replica_attached"
        assert f"py-spy dump --pid {attached['replicas'][0]['pid']}" in answer.json()["hint"]


async def _connected(server: Server) -> list[object]:
    return list(server.runtime.agents.all())


async def test_who_may_not_read_may_not_ask(sqlite_server: Server) -> None:
    job = await sqlite_server.submit()
    answer = await ask(sqlite_server, job, await sqlite_server.token("attach"))
    assert answer.status_code == 403


HANG = """
import threading, time
lock = threading.Lock()
lock.acquire()
def waits_for_lock(): lock.acquire()
threading.Thread(target=waits_for_lock, name="reader", daemon=True).start()
def sleeps(): time.sleep(600)
print("up", flush=True)
sleeps()
"""


@pytest.mark.usefixtures("node")
async def test_threads_of_a_job_that_hangs_are_found_by_a_real_agent(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "REST_S", 0.0)
    server = sqlite_server
    job = await server.submit(entrypoint=["python", "-c", HANG], mode="command")
    await server.job_in(job["id"], "RUNNING")

    async def inner() -> dict[str, str]:
        answer = await ask(server, job)
        if answer.status_code != 200:
            return {}
        threads = [thread for one in answer.json()["processes"] for thread in one["threads"]]
        own = {one["name"]: [frame for frame in one["frames"] if frame["file"] == "<string>"] for one in threads}
        return {name: frames[0]["name"] for name, frames in own.items() if frames}

    found = await until_answer(inner, lambda threads: threads.get("MainThread") == "sleeps" and len(threads) == 2)
    assert found == {"MainThread": "sleeps", "reader": "waits_for_lock"}
    assert (await server.job(job["id"]))["state"] == "RUNNING"
    await server.http.post(f"/api/v1/jobs/{job['id']}:cancel")
    await server.job_in(job["id"], "CANCELLED")


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/torch/train.py", True),
        ("/var/lib/penstock/agent/replicas/7f/work/train.py", True),
        (
            "/var/lib/penstock/agent/replicas/7f/work/.venv/lib/python3.12/site-packages/torch/nn/modules/module.py",
            False,
        ),
        ("/usr/lib/python3.12/threading.py", False),
        ("/src/core/penstock/exec/executor.py", False),
        ("<frozen runpy>", False),
    ],
)
async def test_whose_code_a_frame_is_of_is_told_by_its_file(file: str, own: bool) -> None:
    assert stacks.is_own(file) is own


async def test_not_everybody_waits_for_an_agent_that_is_silent(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "MOST_WAITING", 2)
    server, job = sqlite_server, await sqlite_server.submit()
    async with server.agent(await server.join(), takes_stacks=True) as agent:
        await started(server, agent, job)
        both = [asyncio.create_task(ask(server, job)) for _ in range(2)]
        asked = await order(agent)
        await until_answer(lambda: _waiting(server), lambda found: found == 2)
        refused = await ask(server, job)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_stacks")
        await agent.send(type="stack", request_id=asked["request_id"], processes=[PROCESS])
        assert [(await task).status_code for task in both] == [200, 200]
        assert await _waiting(server) == 0


async def _waiting(server: Server) -> int:
    return sum(server.runtime.stacks._waiting.values())
