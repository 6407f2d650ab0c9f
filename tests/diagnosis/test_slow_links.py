"""Sums of jobs whose steps wait for bytes on the way: the link is named, unlike slow servers and trainers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnosis.test_injected_causes import MS, ops, trainer

from penstock.diagnosis import Finding, Link, Sums, TableLoad, Trainer, Wait, diagnose

MB = 1e6


def link(of: int, server: int, mb: float = 1.0, mb_per_s: float = 110.0, *, work_ns: float = 0.0) -> Link:
    """A link on which a trainer sends `mb` a step at `mb_per_s`, and gets as many bytes at once."""
    return Link(of, server, mb * MB, mb / mb_per_s * 1e9, mb * MB, 0.01 * MS, 3.0 * MS, work_ns)


def found(trainers: list[Trainer], waits_ms: dict[tuple[int, int], float], *links: Link) -> list[Finding]:
    waits = tuple(Wait(of, server, "", ms * MS) for (of, server), ms in waits_ms.items())
    return diagnose(Sums(tuple(trainers), waits, links=links))


def test_a_slow_link_is_named_with_its_rate() -> None:
    all_links = (link(0, 0), replace(link(0, 1, mb_per_s=11.0), node="node-a"))
    first, *rest = found([trainer(step_ms=240)], {(0, 0): 9.1, (0, 1): 95.0}, *all_links)
    assert first.sentence == (
        "the link from trainer 0 on node-a to pserver-1 carries 11 MB/s; exchanges wait 38 % of the step for it;"
        " the other carries 110 MB/s"
    )
    assert (first.cause, first.place, first.tab) == ("link", "trainer 0 to pserver-1", "sync")
    assert all(one.share < 0.06 for one in rest if one.cause in ("server", "servers", "table", "way"))


@pytest.mark.parametrize("slow", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_all_trainers_wait_for_the_slow_link_of_one(slow: tuple[int, int]) -> None:
    """In a synchronous step: the other trainer's wait is for the round at the same server."""
    pairs = [(of, server) for of in range(2) for server in range(2)]
    waits = {(of, server): 92.0 if server == slow[1] else 9.1 for of, server in pairs}
    links = [link(*pair, mb_per_s=11.0 if pair == slow else 110.0) for pair in pairs]
    first = found([trainer(i, step_ms=140) for i in range(2)], waits, *links)[0]
    assert (first.cause, first.place) == ("link", f"trainer {slow[0]} to pserver-{slow[1]}")


def test_links_of_one_trainer_are_named_together() -> None:
    links = [link(of, server, mb_per_s=11.0 if of == 1 else 110.0) for of in range(2) for server in range(2)]
    waits = {(of, server): 91.0 for of in range(2) for server in range(2)}
    first = found([trainer(i, step_ms=230) for i in range(2)], waits, *links)[0]
    assert first.sentence.startswith("the links from trainer 1 to 2 servers carry 11 MB/s each; exchanges wait 79 %")
    assert first.place == "trainer 1"


def test_links_of_one_server_are_named_together() -> None:
    links = [link(of, server, mb_per_s=11.0 if server == 1 else 110.0) for of in range(2) for server in range(2)]
    waits = {(of, server): 91.0 if server == 1 else 9.0 for of in range(2) for server in range(2)}
    first = found([trainer(i, step_ms=140) for i in range(2)], waits, *links)[0]
    assert first.sentence.startswith("the links from 2 trainers to pserver-1 carry 11 MB/s each")


def test_the_only_link_is_named_without_others() -> None:
    first = found([trainer(step_ms=140)], {(0, 0): 95.0}, link(0, 0, mb_per_s=11.0))[0]
    assert first.sentence == (
        "the link from trainer 0 to pserver-0 carries 11 MB/s; exchanges wait 65 % of the step for it"
    )


def test_the_only_link_beside_a_server_that_works_is_not_named() -> None:
    busy = link(0, 0, mb_per_s=25.0, work_ns=30.0 * MS)
    assert found([trainer(step_ms=140)], {(0, 0): 95.0}, busy)[0].cause != "link"


def test_a_link_that_answers_slowly_is_named() -> None:
    down = Link(0, 1, 0.1 * MB, 1.0 * MS, 1.0 * MB, 90.0 * MS)
    first = found([trainer(step_ms=140)], {(0, 0): 9.1, (0, 1): 95.0}, link(0, 0), down)[0]
    assert (first.cause, first.place) == ("link", "trainer 0 to pserver-1")
    assert " carries 11 MB/s" in first.sentence


def test_an_answer_that_the_kernel_buffers_is_the_links_too() -> None:
    """45 ms there and, unseen, as long back; the server needs 3 ms in between."""
    half = link(0, 1, mb=0.5, mb_per_s=11.0)
    first, *rest = found([trainer(step_ms=140)], {(0, 0): 9.1, (0, 1): 95.0}, link(0, 0), half)
    assert (first.cause, round(first.ms)) == ("link", 92)
    assert all(one.share < 0.1 for one in rest if one.cause in ("server", "servers"))


def test_a_slow_server_is_no_slow_link() -> None:
    """Its requests arrive as those of others; what lasts is between them and the answers."""
    links = [link(0, 0), link(0, 1)]
    assert found([trainer(step_ms=140)], {(0, 0): 9.1, (0, 1): 95.0}, *links)[0].cause == "server"


def test_a_server_that_receives_and_works_slowly_is_no_link() -> None:
    """On a starved machine receiving takes long, too, but no longer than its own work."""
    starved = link(0, 1, mb_per_s=20.0, work_ns=60.0 * MS)
    assert found([trainer(step_ms=140)], {(0, 0): 9.1, (0, 1): 95.0}, link(0, 0), starved)[0].cause == "server"


def test_a_slow_trainer_is_no_slow_link() -> None:
    late, early = trainer(0, step_ms=140, ops=ops(scale=3.0)), trainer(1, step_ms=140)
    waits = {(0, 0): 9.5, (1, 0): 90.0}
    first = found([late, early], waits, link(0, 0), link(1, 0))[0]
    assert (first.cause, first.place) == ("trainer", "trainer 0")


def test_a_hot_table_is_no_slow_link() -> None:
    sums = Sums(
        (trainer(step_ms=140),), (Wait(0, 0, "", 9.1 * MS), Wait(0, 1, "", 95.0 * MS)),
        tables=(TableLoad("table", {0: 100, 1: 9900}),), links=(link(0, 0), link(0, 1, mb=3.0)),
    )  # fmt: skip
    assert diagnose(sums)[0].cause == "hot_table"


def test_a_few_bytes_are_delay_and_no_rate() -> None:
    few = link(0, 0, mb=0.01, mb_per_s=0.11)
    assert found([trainer(step_ms=140)], {(0, 0): 95.0}, few)[0].cause != "link"


def test_a_fast_link_that_nobody_waits_for_is_healthy() -> None:
    assert found([trainer()], {(0, 0): 0.8}, link(0, 0, mb_per_s=2000.0))[0].cause == "healthy"
