"""Identifiers grow within a process and over a restart, whatever the clock says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.server.harness import running, settings_for

from penstock_server import uuid7 as identifiers
from penstock_server.uuid7 import go_on_after, uuid7


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identifiers, "_last", 0)


def set_back(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock back, in a process that has made no identifier yet."""
    monkeypatch.setattr(identifiers, "_last", 0)
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() - int(seconds * 1e9))


def test_identifiers_grow_while_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = uuid7()
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() - 3600 * 10**9)
    made = [before, *(uuid7() for _ in range(5000))]
    assert made == sorted(set(made))


def test_identifiers_go_on_after_those_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = uuid7()
    set_back(monkeypatch, 3600.0)
    assert uuid7() < before
    go_on_after(before)
    made = [before, *(uuid7() for _ in range(5000))]
    assert made == sorted(set(made))
    go_on_after(made[0])
    assert uuid7() > made[-1]


@pytest.mark.asyncio
async def test_jobs_after_a_restart_sort_last_if_the_clock_went_back(
    migrated_url: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, migrated_url)
    async with running(settings) as server:
        before = await server.submit(name="before")
    set_back(monkeypatch, 3600.0)
    async with running(settings) as server:
        after = await server.submit(name="after")
        names = [one["name"] for one in (await server.http.get("/api/v1/jobs")).json()["items"]]
    assert after["id"] > before["id"]
    assert names == ["after", "before"]
