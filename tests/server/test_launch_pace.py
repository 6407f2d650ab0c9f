"""Pilots that end before they join are launched again after growing pauses, those that had joined without one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path

import pytest
from tests.server.harness import Server

from penstock.backoff import Backoff
from penstock.client import Client
from penstock.cluster.gangs import load
from penstock.cluster.keeper import Keeper, Settings
from penstock.cluster.pace import FIRST_S, LONGEST_S, Pace
from penstock.cluster.provisioner import Phase, Pilot, Request, Shape
from penstock.cluster.scaling import Limits


def steady() -> Pace:
    return Pace(Backoff(FIRST_S, LONGEST_S, chance=lambda: 0.0))


def test_pauses_double_up_to_a_limit() -> None:
    pace, now, pauses = steady(), 0.0, []
    for _ in range(8):
        assert not pace.must_wait(now)
        pace.failed("exit status 1", now)
        assert pace.must_wait(now)
        pauses.append(pace.pause_s)
        now += pace.pause_s
    assert pauses == [20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 900.0, 900.0]
    pace.joined()
    assert not pace.must_wait(now)
    pace.failed("", now)
    assert pace.pause_s == FIRST_S


class Doomed:
    """A scheduler whose pilots end as soon as they are launched."""

    engine = "Doomed"

    def __init__(self) -> None:
        self.launched: list[Request] = []

    def plan(self, request: Request) -> str:
        return request.name

    def launch(self, request: Request) -> str:
        self.launched.append(request)
        return f"{request.name}.{len(self.launched)}"

    def poll(self, handle: str) -> tuple[Pilot, ...]:
        name = handle.rpartition(".")[0]
        return tuple(Pilot(f"{name}-{i}", Phase.ENDED, "its agent failed: exit status 1") for i in range(1))

    def cancel(self, handle: str, names: Collection[str] = ()) -> None:
        raise AssertionError("nothing is left to cancel")


@pytest.mark.anyio
async def test_job_whose_pilots_fail_is_not_given_one_each_step(sqlite_server: Server, tmp_path: Path) -> None:
    await sqlite_server.submit(name="waits")
    now, engine = [0.0], Doomed()
    settings = Settings("c", sqlite_server.url, tmp_path, Limits(Shape(1, 8 << 30), most=4), 600.0)

    def keep() -> list[int]:
        counts = []
        with Client(sqlite_server.url, token=sqlite_server.admin) as client:
            keeper = Keeper(client, engine, settings, clock=lambda: now[0], pace=steady())
            for _ in range(40):  # 200 s
                answer = keeper.step()
                counts.append(len(engine.launched))
                now[0] += 5.0
            assert any("exit status 1" in line and "pause of" in line for line in answer.unmet)
        return counts

    counts = await asyncio.to_thread(keep)
    assert counts[0] == 1
    assert counts[-1] == 4  # at about 0, 25, 70 and 155 s


class Scripted(Doomed):
    """A scheduler whose pilots end as soon as they are launched, but for those of the gangs in `running`."""

    def __init__(self, *running: str) -> None:
        super().__init__()
        self.running = set(running)

    def poll(self, handle: str) -> tuple[Pilot, ...]:
        name = handle.rpartition(".")[0]
        return (Pilot(f"{name}-0", Phase.RUNNING, "on node1"),) if name in self.running else super().poll(handle)


@pytest.mark.anyio
async def test_pause_holds_while_another_pilot_is_healthy(sqlite_server: Server, tmp_path: Path) -> None:
    now, engine = [0.0], Scripted("c-0")
    settings = Settings("c", sqlite_server.url, tmp_path, Limits(Shape(1, 8 << 30), most=4), 600.0)
    long = await sqlite_server.submit(name="long")
    with Client(sqlite_server.url, token=sqlite_server.admin) as client:
        keeper = Keeper(client, engine, settings, clock=lambda: now[0], pace=steady())
        await asyncio.to_thread(keeper.step)
        async with sqlite_server.agent(await sqlite_server.join("c-0-0", cpus=1)) as agent:
            [replica] = await agent.desired(1)
            await agent.start(replica)
            await sqlite_server.job_in(long["id"], "RUNNING")
            await asyncio.to_thread(keeper.step)
            await sqlite_server.submit(name="waits")
            for _ in range(40):  # 200 s
                await asyncio.to_thread(keeper.step)
                now[0] += 5.0
    assert [request.name for request in engine.launched] == ["c-0", *["c-1"] * 4]


@pytest.mark.anyio
@pytest.mark.parametrize("is_seen", [False, True])
async def test_pilot_that_joined_and_ended_is_no_failure(
    sqlite_server: Server, tmp_path: Path, *, is_seen: bool
) -> None:
    """Whether a step came between its join and its end or not, and although another process launched it."""
    now, engine = [0.0], Scripted("c-0", "c-1")
    settings = Settings("c", sqlite_server.url, tmp_path, Limits(Shape(4, 8 << 30), most=4), 600.0)
    await sqlite_server.submit(name="waits", trainers={"count": 1, "cpus": 2})
    with Client(sqlite_server.url, token=sqlite_server.admin) as client:

        async def step() -> str:
            keeper = Keeper(client, engine, settings, clock=lambda: now[0], pace=steady())
            await asyncio.to_thread(keeper.step)
            return keeper.pace.why

        await step()
        async with sqlite_server.agent(await sqlite_server.join("c-0-0", cpus=1)):  # too small for the job
            assert not is_seen or await step() == ""
        await sqlite_server.runtime.leases.step()  # which stores when the node was seen last
        async with sqlite_server.runtime.database.write():
            pass  # nor does a step of the server's own write it later
        engine.running.remove("c-0")
        assert await step() == ""
        engine.running.clear()
        assert "exit status 1" in await step()  # that of the same name which came after it never joined


def test_gangs_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    gang = {"name": "c-0", "count": 1, "why": "", "handle": "1", "ended": [], "drained": []}
    (tmp_path / "gangs.json").write_text(json.dumps({"token": "t", "gangs": [gang]}))
    [read] = load(tmp_path / "gangs.json").gangs
    assert (read.handle, read.has_joined, read.was_cancelled) == ("1", False, False)
