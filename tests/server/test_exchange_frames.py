"""EXCHANGE frames through a real server: to browsers as they came, to pages that open later, and joined by REST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Server, running, settings_for
from tests.support.waiting import until_answer

from penstock.protocol.frames import Kind, decode
from penstock.protocol.tables import TableSums, tables_body

pytestmark = pytest.mark.asyncio

Body = dict[str, Any]


def trainer_body(calls: int) -> Body:
    rows = [[0, 0, calls, 0, 0, 500, 0, 0, 0], [0, 1, calls, 100 * calls, 7, 9, 1, 0, 2]]
    return {"peers": ["127.0.0.1:6174"], "blocks": ["", "w.block0"], "rows": rows}


def server_body(staleness: int) -> Body:
    return {"peers": ["trainer 0"], "blocks": ["w.block0"], "rows": [[0, 0, 5, 0, 0, 0, 0, staleness, 4]]}


async def exchange_of(server: Server, job_id: str) -> dict[str, Any]:
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/exchange")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_matrix_joins_what_trainer_and_pserver_counted(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.attached(role="pserver", pid=8) as pserver:
        job_id = trainer.registered["job_id"]
        await trainer.frame(Kind.EXCHANGE, body=trainer_body(3), step=30)
        await trainer.frame(Kind.EXCHANGE, body=trainer_body(5), step=50)
        await pserver.frame(Kind.EXCHANGE, body=server_body(11))
        both = await until_answer(
            lambda: exchange_of(sqlite_server, job_id),
            lambda found: [c for c in found["cells"] if c["staleness"] and c["calls"]] != [],
        )
    barrier, block = both["cells"]
    assert (both["pservers"], both["steps"]) == (["127.0.0.1:6174"], {"0": 50})
    assert (barrier["block"], barrier["wait_ns"]) == ("", 500)
    assert block == {
        "trainer": 0, "pserver": 0, "block": "w.block0", "calls": 5, "sent_bytes": 500, "received_bytes": 7,
        "wait_ns": 9, "retries": 1, "staleness": 11, "merges": 2, "joined": 4,
    }  # fmt: skip


async def test_unnamed_servers_are_numbered_as_trainers_name_them(sqlite_server: Server) -> None:
    """Only pserver 1 has registered: its endpoint is not that of pserver 0."""
    two = {**trainer_body(2), "peers": ["127.0.0.1:6175", "127.0.0.1:6174"]}
    two["rows"] = [[at, 1, 1, 10 + at, 0, 0, 0, 0, 0] for at in (0, 1)]
    async with sqlite_server.attached() as trainer, sqlite_server.attached(role="pserver", index=1, pid=8):
        job_id = trainer.registered["job_id"]
        await trainer.frame(Kind.EXCHANGE, body=two)
        found = await until_answer(lambda: exchange_of(sqlite_server, job_id), lambda found: found["cells"] != [])
    assert {cell["pserver"]: cell["sent_bytes"] for cell in found["cells"]} == {0: 10, 1: 11}


async def test_frame_that_holds_nonsense_is_left_out(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.attached(index=1, pid=8) as other:
        job_id = trainer.registered["job_id"]
        await trainer.frame(Kind.EXCHANGE, body={"peers": 3, "rows": "?"})
        await other.frame(Kind.EXCHANGE, body=trainer_body(1))
        found = await until_answer(lambda: exchange_of(sqlite_server, job_id), lambda found: found["cells"] != [])
        assert {cell["trainer"] for cell in found["cells"]} == {1}


async def test_page_that_opens_late_gets_the_newest_however_old(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as browser:
        job_id = trainer.registered["job_id"]
        sent = await trainer.frame(Kind.EXCHANGE, body=trainer_body(1))
        for _ in range(3):  # more than the newest frames of a job that are kept
            await trainer.frame(Kind.GAP, body={"OP_EVENTS": 1, "x" * 500_000: 0})
        await until_answer(lambda: exchange_of(sqlite_server, job_id), lambda found: found["cells"] != [])
        await browser.subscribe(1, topic="job", job_id=job_id)
        assert (await browser.received(1))[0] == sent


async def test_finished_job_replays_the_newest_of_each_process(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path)) as server:
        async with server.attached() as trainer, server.attached(index=1, pid=8) as other:
            job_id = trainer.registered["job_id"]
            for one in (trainer, other):
                await one.frame(Kind.EXCHANGE, body=trainer_body(1))
                await one.frame(Kind.EXCHANGE, body=trainer_body(2), step=9)
                await one.frame(Kind.GOODBYE, body={})
            await server.job_in(job_id, "SUCCEEDED")
        async with server.browser() as browser:
            await browser.subscribe(1, topic="job", job_id=job_id)
            frames = [decode(data) for data in await browser.received(2)]
        assert [(frame.kind, frame.step) for frame in frames] == [(Kind.EXCHANGE, 9)] * 2
    async with running(settings_for(tmp_path)) as again:
        assert len((await exchange_of(again, job_id))["cells"]) == 4


async def test_page_that_wants_no_sync_gets_none(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as browser:
        job_id = trainer.registered["job_id"]
        await browser.subscribe(1, topic="job", job_id=job_id, parts=["ops"])
        await trainer.frame(Kind.EXCHANGE, body=trainer_body(1))
        gap = await trainer.frame(Kind.GAP, body={"OP_EVENTS": 1})
        assert (await browser.received(1))[0] == gap


def table_sums(rows: int, hot: tuple[tuple[int, int], ...] = ()) -> TableSums:
    counts = {"pulled": 40, "absent": 10, "pushed": 10 * rows, "sampled": 10 * rows, "missed": 0}
    return TableSums(name="emb", width=4, capacity=100, rows=rows, held_bytes=64 * rows, hot=hot, **counts)


async def tables_of(server: Server, job_id: str) -> list[dict[str, Any]]:
    answer = await server.http.get(f"/api/v1/jobs/{job_id}/tables")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["tables"]
    return found


async def test_parts_of_a_table_are_one_over_all_servers(sqlite_server: Server) -> None:
    async with (
        sqlite_server.attached() as trainer,
        sqlite_server.attached(role="pserver", pid=8) as first,
        sqlite_server.attached(role="pserver", index=1, pid=9) as second,
    ):
        job_id = trainer.registered["job_id"]
        # What a trainer says of tables is no server's part.
        await trainer.frame(Kind.EXCHANGE, body=trainer_body(1) | tables_body([table_sums(99)]))
        await first.frame(Kind.EXCHANGE, body=server_body(1) | tables_body([table_sums(2)]))
        await first.frame(Kind.EXCHANGE, body=server_body(1) | tables_body([table_sums(10, ((-(2**63), 50),))]))
        await second.frame(Kind.EXCHANGE, body=server_body(1) | tables_body([table_sums(30)]))
        (table,) = await until_answer(
            lambda: tables_of(sqlite_server, job_id), lambda found: [len(one["parts"]) for one in found] == [2]
        )
    assert table["parts"] == [
        {"pserver": i, "rows": rows, "held_bytes": 64 * rows, "pulled": 40, "absent": 10, "pushed": 10 * rows}
        for i, rows in enumerate((10, 30))
    ]
    assert (table["rows"], table["pulled"], table["absent"], table["skew_rows"]) == (40, 80, 20, 1.5)
    assert table["hot"] == [{"id": str(-(2**63)), "share": 0.125, "pserver": 0}]


async def test_tables_that_are_nonsense_are_left_out(sqlite_server: Server) -> None:
    async with (
        sqlite_server.attached(role="pserver") as bad,
        sqlite_server.attached(role="pserver", index=1, pid=9) as good,
    ):
        job_id = bad.registered["job_id"]
        await bad.frame(Kind.EXCHANGE, body={**server_body(1), "tables": [{"name": "emb", "rows": -1}]})
        await good.frame(Kind.EXCHANGE, body=server_body(1) | tables_body([table_sums(3)]))
        found = await until_answer(lambda: tables_of(sqlite_server, job_id), lambda found: found != [])
    assert [part["pserver"] for part in found[0]["parts"]] == [1]
