"""An event loop that stalls is reported with the place where it stands, once."""

from __future__ import annotations

import asyncio
import time

import pytest
from structlog.testing import capture_logs
from tests.support.waiting import until_answer

from penstock_server.instruments import Instruments
from penstock_server.watchdog import Watchdog


def long_work() -> None:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass


@pytest.mark.asyncio
async def test_a_stall_is_reported_with_its_place_once() -> None:
    meters = Instruments()

    async def stalls() -> float:
        return meters.registry.get_sample_value("penstock_event_loop_stalls_total") or 0.0

    with capture_logs() as logs:
        async with Watchdog(meters.stalls, stall_s=0.2, tick_s=0.01).watching():
            for count in (1.0, 2.0):
                await asyncio.sleep(0.05)  # it turns
                long_work()
                await until_answer(stalls, count.__le__)
    reported = [entry for entry in logs if entry["event"] == "the event loop stalls"]
    assert reported
    assert "long_work" in reported[0]["stack"]
    places = [entry["stack"].splitlines()[-2] for entry in reported]
    assert len(places) == len(set(places))
