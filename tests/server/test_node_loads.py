"""Processor and memory of nodes over the last hour: means of minutes, from heartbeats."""

from __future__ import annotations

from functools import partial
from operator import eq
from pathlib import Path

import pytest
from tests.server.harness import FakeClock, running, settings_for
from tests.support.waiting import until_answer

from penstock_server.streams.nodeload import BIN_S, MOST_BINS, MOST_NODES, NodeLoads


def test_heartbeats_of_a_minute_are_one_mean() -> None:
    loads = NodeLoads()
    for at_s, cpu, memory in ((60.0, 10.0, 100), (61.0, 20.0, 300), (119.9, 60.0, 500), (120.0, 90.0, 7)):
        loads.note("n", at_s, cpu_percent=cpu, memory_used_bytes=memory)
    bins = [(one.at_s, one.cpu_percent, one.memory_used_bytes) for one in loads.of("n", 130.0)]
    assert bins == [(60, 30.0, 300.0), (120, 90.0, 7.0)]
    assert loads.of("another", 130.0) == []


def test_a_clock_that_was_set_back_makes_no_second_minute() -> None:
    loads = NodeLoads()
    for at_s in (600.0, 300.0):
        loads.note("n", at_s, cpu_percent=10.0, memory_used_bytes=1)
    assert [one.at_s for one in loads.of("n", 600.0)] == [600]


def test_what_no_machine_has_is_cut_to_the_bounds() -> None:
    loads = NodeLoads()
    for number, cpu in enumerate((float("nan"), -3.0, 1e9)):
        loads.note("n", number * BIN_S, cpu_percent=cpu, memory_used_bytes=-5)
    assert [(one.cpu_percent, one.memory_used_bytes) for one in loads.of("n", 0.0)] == [(0.0, 0), (0.0, 0), (100.0, 0)]


def test_an_hour_of_so_many_nodes_is_kept_and_no_more() -> None:
    loads = NodeLoads()
    for minute in range(MOST_BINS + 5):
        loads.note("n", minute * BIN_S, cpu_percent=1.0, memory_used_bytes=1)
    last_s = (MOST_BINS + 4) * BIN_S
    assert len(loads.of("n", last_s)) == MOST_BINS
    assert len(loads.of("n", last_s + 10 * BIN_S)) == MOST_BINS - 10
    for number in range(MOST_NODES):
        loads.note(f"other {number}", last_s, cpu_percent=1.0, memory_used_bytes=1)
    assert loads.of("n", last_s) == []


@pytest.mark.asyncio
async def test_a_node_shows_its_load_by_the_minute(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running(settings_for(tmp_path), clock) as server:
        silent = await server.join("silent")
        async with server.agent(await server.join()) as agent, server.agent(silent):
            for number, cpu in enumerate((40.0, 60.0, 75.0), 1):
                await agent.send(type="beat", cpu_percent=cpu, memory_used_bytes=number << 30)
                await until_answer(agent.count_leases, partial(eq, number))
                clock.advance(30)
            [load] = (await server.http.get("/api/v1/node-loads")).json()["items"]
    assert load.pop("node_id") != silent[0]
    assert load == {
        "at": ["2026-01-01T00:00:00.000000Z", "2026-01-01T00:01:00.000000Z"],
        "cpu_percent": [50.0, 75.0],
        "memory_used_bytes": [3 << 29, 3 << 30],
    }
