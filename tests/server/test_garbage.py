"""The server's garbage: what was there at its start is never looked at, what comes later is collected now and then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from tests.support.waiting import until_async

from penstock_server.garbage import rarely_collected

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    """As in a process that froze nothing; afterwards again what the tests' process has frozen (tests/conftest.py)."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Cycle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


async def test_only_what_came_since_the_start_is_looked_at() -> None:
    before = gc.get_threshold()
    known = Cycle()
    async with rarely_collected():
        assert not any(one is known for one in gc.get_objects())
        assert gc.get_freeze_count() > 10_000
    assert any(one is known for one in gc.get_objects())
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


async def test_what_a_process_froze_before_stays_frozen() -> None:
    gc.freeze()
    at_start = gc.get_freeze_count()
    async with rarely_collected():
        pass
    assert gc.get_freeze_count() > 0.9 * at_start > 10_000  # some of them have gone meanwhile, as objects do


async def test_what_a_look_has_found_is_frozen_until_a_full_one() -> None:
    async with rarely_collected(every_s=0.05, full_every=40):
        held = [Cycle()]
        gone = weakref.ref(held[0])
        await until_async(lambda: not any(one is held[0] for one in gc.get_objects()), "it is frozen")
        held.clear()
        await until_async(lambda: gone() is None, "a full look")


async def test_old_cycle_is_collected_by_the_clock() -> None:
    async with rarely_collected(every_s=0.05):
        cycle = Cycle()
        gc.collect(1)
        gc.collect(1)  # it is of the oldest generation now
        gone = weakref.ref(cycle)
        del cycle
        gc.collect(1)
        assert gone() is not None, "the younger generations do not have it"
        await until_async(lambda: gone() is None, "the cycle is collected")
