"""Group commit: reports of many agents are one transaction, answered after its commit, and each by its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select
from tests.server.harness import Server
from tests.support.databases import migrate
from tests.support.waiting import until_async

from penstock.errors import PeerError
from penstock_server.db import Database, DatabaseAway, Effects, Tx
from penstock_server.services.groupcommit import GroupCommit, Outcome
from penstock_server.tables import CounterRow

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def database(database_url: str) -> Any:
    await migrate(database_url)
    made = Database(database_url)
    yield made
    await made.close()


class Writer:
    """Adds counters by name; refuses or breaks on some names. `sizes`: of the transactions that were committed."""

    def __init__(self, database: Database, *, most: int = 16) -> None:
        self.group = GroupCommit(database, self.apply, most=most, gather_s=0.0)
        self.sizes: list[int] = []

    async def apply(self, tx: Tx, names: Sequence[str]) -> list[Outcome]:
        if "breaks" in names:
            tx.session.add(CounterRow(name="half", value=1))
            await tx.session.flush()
            raise ValueError("breaks")
        tx.session.add_all([CounterRow(name=name, value=1) for name in names if name != "refused"])
        self.sizes.append(len(names))
        return [PeerError("refused") if name == "refused" else None for name in names]


async def names_in(database: Database) -> set[str]:
    async with database.read() as session:
        return set((await session.execute(select(CounterRow.name))).scalars()) - {"stream", "server_term"}


async def test_what_waits_for_the_lock_is_one_transaction(database: Database) -> None:
    writer = Writer(database)
    async with database.write():  # another transaction: the line grows meanwhile
        tasks = [asyncio.create_task(writer.group.put(f"n{number}")) for number in range(10)]
        await until_async(lambda: database.lock.num_waiting == 1)
        assert not any(task.done() for task in tasks)
    await asyncio.gather(*tasks)
    assert writer.sizes == [10]
    assert len(await names_in(database)) == 10


async def test_answer_comes_after_the_commit(database: Database) -> None:
    writer = Writer(database)
    await writer.group.put("one")
    assert await names_in(database) == {"one"}


async def test_writer_that_is_cancelled_answers_all(database: Database) -> None:
    writer, begun = Writer(database), asyncio.Event()

    async def alone(tx: Tx, names: Sequence[str]) -> Sequence[Outcome]:
        if len(names) == 1:
            begun.set()
            await asyncio.sleep(60)
        return await writer.apply(tx, names)

    group = GroupCommit(database, alone, most=16, gather_s=0.0)
    async with database.write():
        tasks = [asyncio.create_task(group.put(name)) for name in ("breaks", "a", "b")]
        await until_async(lambda: database.lock.num_waiting == 1)
    await begun.wait()
    assert group._writer is not None
    group._writer.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, DatabaseAway) for one in found), found
    await group.settled()


async def test_a_long_line_is_several_transactions(database: Database) -> None:
    writer = Writer(database, most=4)
    await asyncio.gather(*(writer.group.put(f"n{number}") for number in range(10)))
    assert writer.sizes == [4, 4, 2]


async def test_one_that_is_refused_or_breaks_stops_no_other_write(database: Database) -> None:
    writer = Writer(database)
    found = await asyncio.gather(
        *(writer.group.put(name) for name in ("one", "breaks", "refused", "two")), return_exceptions=True
    )
    assert [type(one) for one in found] == [type(None), ValueError, PeerError, type(None)]
    assert await names_in(database) == {"one", "two"}
    await writer.group.put("three")  # it goes on
    assert "three" in await names_in(database)


async def test_task_that_is_cancelled_takes_no_other_along(database: Database) -> None:
    writer = Writer(database)
    async with database.write():
        first, second = (asyncio.create_task(writer.group.put(name)) for name in ("first", "second"))
        await until_async(lambda: database.lock.num_waiting == 1)
        first.cancel()
    await second
    assert first.cancelled()
    assert "second" in await names_in(database)


async def test_database_that_is_away_is_told_to_all_that_wait(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(database)
    with monkeypatch.context() as broken:
        broken.setattr(database, "_connect", _away)
        found = await asyncio.gather(*(writer.group.put(name) for name in ("a", "b")), return_exceptions=True)
    assert [type(one) for one in found] == [DatabaseAway, DatabaseAway]
    await writer.group.put("later")
    assert await names_in(database) == {"later"}


async def _away(session: object) -> None:
    raise DatabaseAway("away")


async def test_submission_goes_before_reports_that_wait(database: Database) -> None:
    writer, order = Writer(database, most=1), list[str]()

    async def urgent() -> None:
        async with database.write(urgent=True):
            order.append("submission")

    async def report(name: str) -> None:
        await writer.group.put(name)
        order.append(name)

    async with database.write():
        reports = [asyncio.create_task(report(f"n{number}")) for number in range(3)]
        await until_async(lambda: database.lock.num_waiting == 1)
        submission = asyncio.create_task(urgent())
        await until_async(lambda: database.lock.num_waiting == 2)
    await asyncio.gather(submission, *reports)
    assert order[0] == "submission"


async def test_reports_of_several_agents_are_one_transaction(server: Server) -> None:
    nodes = [await server.join(f"n{number}", cpus=1) for number in range(3)]
    jobs = [(await server.submit(trainers={"count": 1, "cpus": 1}))["id"] for _ in nodes]
    commits: list[int] = []
    on_commit = server.runtime.database.on_commit

    def count(effects: Effects) -> None:
        commits.append(sum(one.kind == "replica" and one.to_state == "RUNNING" for one in effects.events))
        on_commit(effects)

    async with server.agent(nodes[0]) as a, server.agent(nodes[1]) as b, server.agent(nodes[2]) as c:
        orders = [(await agent.desired(1))[0] for agent in (a, b, c)]
        server.runtime.database.on_commit = count
        async with server.runtime.database.write():
            for agent, order in zip((a, b, c), orders, strict=True):
                await agent.report(order, "RUNNING")
            await until_async(lambda: len(server.runtime.reports._group._waiting) == 3)
        for job_id in jobs:
            await server.job_in(job_id, "RUNNING")
        assert max(commits) == 3
        await a.report({**orders[0], "epoch": orders[0]["epoch"] + 7}, "EXITED", exit_code=0)  # refused, alone
        await b.report(orders[1], "EXITED", exit_code=0)
        await server.job_in(orders[1]["job_id"], "SUCCEEDED")
        assert (await server.job(orders[0]["job_id"]))["state"] == "RUNNING"
