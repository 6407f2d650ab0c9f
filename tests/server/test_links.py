"""What passes between trainers and parameter servers, from frames to the link that the diagnosis names."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tests.server.harness import Server
from tests.server.test_diagnosis import steps, why
from tests.support.waiting import until_answer

from penstock.protocol.frames import FIRST_BLOCK, ROUNDS_LANE, Column, Frame, Kind, Work
from penstock_server.schemas import api
from penstock_server.services.links import Worked, links_of, worked

MS = 1_000_000
SECOND = 1_000_000_000
Event = tuple[int, int, Work, int]  # begin and length in ms, work, lane


def columns_of(events: list[Event]) -> dict[Column, Any]:
    begin, spent, work, lane = zip(*events, strict=True)
    return {
        Column.START_NS: np.array(begin) * MS, Column.DURATION_NS: np.array(spent) * MS,
        Column.WORK: np.array(work), Column.THREAD: np.array(lane),
    }  # fmt: skip


def frame(events: list[Event], at_ms: int = 0) -> Frame:
    return Frame(Kind.INPUT_EVENTS, 1, 1, 0, at_ms * MS, 0, columns=columns_of(events))


def exchange(step: int, sent: int, received: int) -> api.Exchange:
    """A state in which trainer 0 is at `step` and has exchanged so many bytes, in two blocks."""
    cells = [
        api.ExchangeCell(trainer=0, pserver=0, block=block, calls=1, sent_bytes=sent // 2, received_bytes=received // 2,
                         wait_ns=1, retries=0, staleness=0, merges=0, joined=0)
        for block in ("w", "v")
    ]  # fmt: skip
    return api.Exchange(job_id="j", attempt=1, pservers=["a:1"], steps={0: step}, cells=cells)


def test_work_of_a_server_is_summed_by_trainer_and_own() -> None:
    found = worked(
        [
            frame([(0, 10, Work.RECEIVE, 0), (10, 5, Work.ROUND, 0), (10, 3, Work.UPDATE, ROUNDS_LANE)]),
            frame([(0, 20, Work.RECEIVE, 1), (21, 4, Work.ANSWER, 0), (26, 2, Work.LOOK_UP, FIRST_BLOCK)], at_ms=20),
        ],
        SECOND,
    )
    assert (dict(found.receive_ns), dict(found.answer_ns)) == ({0: 10 * MS, 1: 20 * MS}, {0: 4 * MS})
    assert (dict(found.round_ns), found.own_ns, found.span_ns) == ({0: 5 * MS}, 5 * MS, 48 * MS)


def test_work_before_the_window_does_not_count() -> None:
    found = worked([frame([(0, 900, Work.RECEIVE, 0)]), frame([(0, 100, Work.RECEIVE, 0)], at_ms=3000)], SECOND)
    assert (dict(found.receive_ns), found.span_ns) == ({0: 100 * MS}, 100 * MS)


def test_a_link_has_bytes_and_times_of_a_step() -> None:
    did = Worked(SECOND, {0: 800 * MS}, {0: 50 * MS}, {0: 70 * MS}, 100 * MS)
    [link] = links_of(
        exchange(60, 60_000, 120_000), exchange(50, 20_000, 40_000), {0: did}, {0: 0.1 * SECOND}, {0: "n"}
    )
    assert (link.sent_bytes, link.received_bytes) == (4000, 8000)
    assert (link.receive_ns, link.answer_ns) == (80 * MS, 5 * MS)
    assert link.round_ns == pytest.approx(7 * MS)
    assert link.work_ns == 10 * MS
    assert (link.trainer, link.pserver, link.node) == (0, 0, "n")
    assert link.bytes_per_s == pytest.approx(50_000)


def test_links_need_steps_and_a_record_of_the_server() -> None:
    now, did = exchange(60, 60_000, 0), Worked(SECOND, {0: 800 * MS})
    assert links_of(now, now, {0: did}, {0: SECOND}, {}) == ()
    assert links_of(now, None, {}, {0: SECOND}, {}) == ()
    assert links_of(now, None, {0: Worked()}, {0: SECOND}, {}) == ()
    assert links_of(now, None, {0: did}, {}, {}) == ()
    assert len(links_of(now, None, {0: did}, {0: SECOND}, {})) == 1


@pytest.mark.asyncio
async def test_a_slow_link_is_named_by_what_its_server_recorded(sqlite_server: Server) -> None:
    """40 steps of 200 ms, of each of which 1.1 MB take 100 ms to arrive."""
    body = {
        "peers": ["127.0.0.1:6174"], "blocks": ["w"],
        "rows": [[0, 0, 40, 40 * 1_100_000, 40 * 1_100_000, 40 * 110 * MS, 0, 0, 0]],
    }  # fmt: skip
    events = [
        event
        for at in range(0, 2000, 200)
        for event in [(at, 100, Work.RECEIVE, 0), (at + 100, 4, Work.ROUND, 0), (at + 101, 1, Work.UPDATE, ROUNDS_LANE),
                      (at + 104, 1, Work.ANSWER, 0), (at + 199, 1, Work.LOOK_UP, FIRST_BLOCK)]
    ]  # fmt: skip
    async with sqlite_server.attached() as trainer, sqlite_server.attached(role="pserver", pid=8) as pserver:
        job_id = trainer.registered["job_id"]
        assert pserver.registered["job_id"] == job_id
        await steps(trainer, step_ms=199, every_ms=200)
        await trainer.frame(Kind.EXCHANGE, body=body, step=40)
        await pserver.frame(Kind.INPUT_EVENTS, columns=columns_of(events), t0_ns=time.time_ns() - 2 * SECOND)
        found = await until_answer(
            lambda: why(sqlite_server, job_id), lambda found: any(one["cause"] == "link" for one in found)
        )
    assert found[0]["sentence"] == (
        "the link from trainer 0 to pserver-0 carries 11 MB/s; exchanges wait 53 % of the step for it"
    )
    assert found[0]["query"] == {"metric": "wait"}
