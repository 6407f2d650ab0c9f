"""Counts of telemetry are stored with the job and outlive reconnects, restarts of the server, and retention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.harness import FakeClock, FakeTrainer, Server, running, settings_for

from penstock.protocol.completeness import Report
from penstock.protocol.frames import Column, Kind
from penstock_server.streams.recorder import Recorder

pytestmark = pytest.mark.asyncio
EVENTS = "OP_EVENTS"
COLUMNS = (Column.START_NS, Column.DURATION_NS, Column.OP, Column.THREAD)


async def events(trainer: FakeTrainer, rows: int) -> None:
    await trainer.frame(Kind.OP_EVENTS, columns={name: np.zeros(rows) for name in COLUMNS})


async def report(trainer: FakeTrainer, number: int, **rows: int) -> None:
    counts = {name: {EVENTS: count} for name, count in rows.items()}
    given: Any = {key: value for key, value in counts.items() if key != "lost"}
    dropped = {"outbox_full": counts["lost"]} if "lost" in counts else {}
    await trainer.frame(Kind.GAP, body=Report("p", number, dropped=dropped, final=number == 9, **given).body())


async def hello(trainer: FakeTrainer) -> None:
    await trainer.frame(Kind.HELLO, body={"role": "trainer", "index": 0, "host": "h", "pid": 7, "process": "p"})


async def settled(server: Server, trainer: FakeTrainer) -> dict[str, Any]:
    """Return the answer once everything that was sent before is stored."""
    await trainer.ws.send('{"type": "beat"}')
    await trainer.ws.recv()
    return await found(server, trainer)


async def found(server: Server, trainer: FakeTrainer) -> dict[str, Any]:
    answer = await server.http.get(f"/api/v1/jobs/{trainer.registered['job_id']}/completeness")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def gone(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {one["reason"]: one["rows"] for one in rows}


async def test_counts_add_up_over_a_restart_of_the_server(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, database_url, metrics_flush_s=600, lease_ttl_s=600)
    async with running(settings) as server, server.attached() as trainer:
        await hello(trainer)
        await events(trainer, 30)
        await report(trainer, 1, produced=100, sampled_out=60, lost=5, held=3, sent=32)
        first = await settled(server, trainer)
        [rows] = first["rows"]
        assert (first["holds"], rows["produced"], rows["shown"], rows["pending"]) == (True, 100, 30, 3)
        assert gone(rows["dropped"]) == {"outbox_full": 5, "connection": 2}
    async with running(settings) as server:
        assert await found(server, trainer) == first, "stored with the job"
        async with server.attached() as again:
            assert again.registered["stream"] == trainer.registered["stream"]
            again.seq = trainer.seq
            await report(again, 1, produced=100, sampled_out=60, lost=5, held=3, sent=32)
            await events(again, 3)
            assert (await settled(server, again))["rows"][0]["shown"] == 33
            await report(again, 9, produced=120, sampled_out=80, lost=5, sent=35)
            await again.frame(Kind.GOODBYE, body={})
            await server.job_in(trainer.registered["job_id"], "SUCCEEDED")
            last = await found(server, again)
            [rows] = last["rows"]
            assert (last["holds"], last["notes"], rows["produced"], rows["shown"]) == (True, [], 120, 33)
            assert gone(rows["dropped"]) == {"outbox_full": 5, "connection": 2}
            assert last["processes"][0]["unknown_since"] is None


async def test_a_report_is_neither_recorded_nor_sent_to_browsers(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as browser:
        job_id = trainer.registered["job_id"]
        await browser.subscribe(1, topic="job", job_id=job_id)
        await report(trainer, 1, produced=4, sent=4)
        await events(trainer, 4)
        await browser.received(1)
        assert len(browser.frames) == 1
        assert (await sqlite_server.http.get(f"/api/v1/jobs/{job_id}/frames?kinds=7")).content == b""


async def test_a_gap_that_an_agent_repeats_counts_once(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        for seq in (3, 3, 4):
            trainer.seq = seq
            await trainer.frame(Kind.GAP, body={EVENTS: 7, "agent": "a1", "total": {EVENTS: 7 * (seq - 2)}})
        [rows] = (await settled(sqlite_server, trainer))["rows"]
        assert gone(rows["dropped"]) == {"agent_buffer_full": 14}
        assert (await sqlite_server.job(trainer.registered["job_id"]))["lost"] == {EVENTS: 14}


async def test_a_killed_process_is_unknown_since_its_last_counts(tmp_path: Path, clock: FakeClock) -> None:
    async with running(settings_for(tmp_path, lease_ttl_s=15, grace_s=30), clock) as server:
        async with server.attached() as trainer:
            await hello(trainer)
            await report(trainer, 1, produced=10, held=4, sent=6)
            await events(trainer, 6)
            assert (await settled(server, trainer))["notes"] == []
        at = clock.now()
        clock.advance(100)
        await server.runtime.attach.step()
        await server.job_in(trainer.registered["job_id"], "FAILED")
        last = await found(server, trainer)
    [process] = last["processes"]
    assert process["unknown_since"] == at.isoformat(timespec="microseconds").replace("+00:00", "Z")
    assert last["notes"] == ["trainer 0 of attempt 1: unknown since 00:00:00 UTC, as its counts ended then"]


async def test_what_is_shown_and_was_never_counted_is_marked(sqlite_server: Server) -> None:
    async with sqlite_server.attached() as trainer:
        await hello(trainer)
        await events(trainer, 8)
        await report(trainer, 9, produced=5, sent=5)
        answer = await settled(sqlite_server, trainer)
        assert not answer["holds"] and answer["rows"][0]["unexplained"] == -3
        assert answer["notes"] == ["trainer 0 of attempt 1: 3 rows of OP_EVENTS are shown and were never counted"]
        assert "≠" in answer["sentence"]


async def test_retention_moves_what_was_shown(database_url: str, tmp_path: Path, clock: FakeClock) -> None:
    settings = settings_for(tmp_path, database_url, retain_telemetry_days=1.0, grace_s=1e9, lease_ttl_s=1e9)
    async with running(settings, clock) as server, server.attached() as trainer:
        await hello(trainer)
        await events(trainer, 8)
        await report(trainer, 9, produced=10, sampled_out=2, sent=8)
        await trainer.frame(Kind.GOODBYE, body={})
        job = await server.job_in(trainer.registered["job_id"], "SUCCEEDED")
        clock.advance(3 * 86_400.0)
        for _ in range(2):  # as after a crash between the count and the deletion
            await server.runtime.sweeper.step()
            last = await found(server, trainer)
            [rows] = last["rows"]
            assert (last["holds"], rows["produced"], rows["shown"], gone(rows["expired"])) == (
                *(True, 10, 0, {"retention": 8}),
            )
            (settings.state_dir / "jobs" / job["id"] / "segments").mkdir(parents=True)


async def test_frames_that_the_disk_does_not_take_are_counted(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sqlite_server.attached() as trainer:
        await hello(trainer)

        async def refuse(*_: object) -> bool:
            return False

        with monkeypatch.context() as patched:
            patched.setattr(Recorder, "append", refuse)
            await events(trainer, 4)
            await settled(sqlite_server, trainer)
        await report(trainer, 1, produced=4, sent=4)
        answer = await settled(sqlite_server, trainer)
        assert answer["holds"] and gone(answer["rows"][0]["dropped"]) == {"not_recorded": 4}
