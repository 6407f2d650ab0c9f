"""EXCHANGE frames: when they are made, what they hold, and how those of several processes become one matrix."""

from __future__ import annotations

import gc
import weakref

import pytest

from penstock.errors import PeerError
from penstock.protocol.exchange import MAX_ROWS, REST, ProcessRows, Sums, body_of, matrix, process_of, rows_of
from penstock.protocol.frames import decode
from penstock.protocol.tables import TableSums
from penstock.ps.counters import Counters
from penstock.telemetry.exchanges import PERIOD_S, ExchangeWatch
from penstock.telemetry.outbox import Parcel

A, B = "127.0.0.1:6174", "127.0.0.1:6175"


def rows_from(role: str, index: int, counters: Counters, endpoints: tuple[str, ...] = (), step: int = 0) -> ProcessRows:
    peers, rows = rows_of(body_of(counters.rows(), endpoints))
    return ProcessRows(role, index, step, rows, peers)


def due(watch: ExchangeWatch, interval_s: float = PERIOD_S, step: int = 7) -> Parcel | None:
    return watch.due(interval_s, step=step, now_ns=1, cpu_ns=5)


def test_a_frame_comes_once_a_period_and_only_on_a_change() -> None:
    watch, counters = ExchangeWatch(), Counters()
    watch.add(counters, [A, B])
    assert due(watch) is None
    counters.add(A, "w.block0", calls=1, sent_bytes=64)
    assert due(watch) is not None
    counters.add(A, "w.block0", calls=1)
    assert due(watch, PERIOD_S / 2) is None
    assert due(watch, PERIOD_S / 2) is not None
    assert due(watch) is None


def test_a_frame_holds_sums_since_the_start_in_server_order() -> None:
    watch, counters = ExchangeWatch(), Counters()
    watch.add(counters, [B, A])
    watch.add(counters, [B, A])
    counters.add(A, "w.block0", calls=2, sent_bytes=64, wait_ns=5)
    item = due(watch)
    assert item is not None
    frame = decode(bytes(item.frame))
    assert frame.step == 7
    rows = [[1, 0, 2, 64, 0, 5, 0, 0, 0]]
    assert frame.body == {"peers": [B, A], "blocks": ["w.block0"], "rows": rows, "cpu_ns": 5}


def test_a_frame_of_a_server_says_its_mode_and_processor_time() -> None:
    watch, counters = ExchangeWatch(), Counters()
    watch.add(counters, [], mode="async")
    counters.add("trainer 0", "w", calls=1)
    item = due(watch)
    assert item is not None
    assert process_of(decode(bytes(item.frame)).body) == ("async", 5)
    assert process_of({}) == ("", 0)  # an older process
    for wrong in ({"mode": 3}, {"cpu_ns": -1}, {"cpu_ns": "9"}):
        with pytest.raises(PeerError, match="cpu_ns"):
            process_of(wrong)


def test_two_sources_of_one_process_are_added_up() -> None:
    watch, first, second = ExchangeWatch(), Counters(), Counters()
    for source in (first, second):
        watch.add(source, [])
        source.add(A, "w", calls=1)
    item = due(watch)
    assert item is not None
    assert decode(bytes(item.frame)).body["rows"] == [[0, 0, 2, 0, 0, 0, 0, 0, 0]]


def _part(rows: int) -> TableSums:
    return TableSums("users", 8, 100, rows, 64, pulled=5, absent=1, pushed=4, sampled=4, missed=0, hot=((7, 3),))


def test_a_source_that_ended_counts_on_and_is_let_go() -> None:
    watch, first, second = ExchangeWatch(), Counters(), Counters()
    watch.add(first, [A], lambda: [_part(3)])
    first.add(A, "w", calls=2)
    watch.remove(first)
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None
    watch.add(second, [A])
    second.add(A, "w", calls=1)
    item = due(watch)
    assert item is not None
    body = decode(bytes(item.frame)).body
    assert body["rows"] == [[0, 0, 3, 0, 0, 0, 0, 0, 0]]
    assert [(one["name"], one["rows"]) for one in body["tables"]] == [("users", 3)]


def test_a_server_that_follows_has_the_tables_of_the_one_before() -> None:
    watch, first, second = ExchangeWatch(), Counters(), Counters()
    watch.add(first, [], lambda: [_part(3)])
    first.add("trainer 0", "users", calls=1)
    watch.remove(first)
    watch.remove(first)  # a second time: nothing
    watch.add(second, [], lambda: [_part(9)])
    second.add("trainer 0", "users", calls=1)
    item = due(watch)
    assert item is not None
    assert [one["rows"] for one in decode(bytes(item.frame)).body["tables"]] == [9]


def test_many_rows_are_bounded_and_no_byte_is_lost() -> None:
    rows = {(peer, f"b{i}"): Sums(calls=1, sent_bytes=i) for peer in (A, B) for i in range(MAX_ROWS)}
    rows[A, ""] = Sums(calls=9)
    _, kept = rows_of(body_of(rows, [A, B]))
    assert len(kept) <= MAX_ROWS
    assert sum(row.sums.sent_bytes for row in kept) == sum(row.sent_bytes for row in rows.values())
    assert [row.sums.calls for row in kept if row.block == ""] == [9]
    assert {row.peer for row in kept if row.block == REST} == {A, B}
    assert {row.block for row in kept} >= {f"b{MAX_ROWS - 1}"}


def test_matrix_takes_waits_from_trainers_and_joins_from_servers() -> None:
    trainer, restarted, server = Counters(), Counters(), Counters()
    trainer.add(B, "w", calls=3, wait_ns=30, merges=2, staleness=1)
    restarted.add(B, "w", calls=1, wait_ns=4)
    server.add("trainer 1", "w", calls=99, staleness=5, merges=6)
    server.add("not a trainer", "w", calls=1)
    cells = matrix(
        [
            rows_from("trainer", 1, trainer, (A, B)),
            rows_from("trainer", 1, restarted, (A, B)),
            rows_from("pserver", 1, server),
        ]
    )
    assert [(c.trainer, c.pserver, c.block) for c in cells] == [(1, 1, "w")]
    [cell] = cells
    assert (cell.calls, cell.wait_ns, cell.merges, cell.staleness, cell.joined) == (4, 34, 2, 5, 6)


def test_known_endpoints_say_which_server_is_which() -> None:
    counters = Counters()
    counters.add(A, "w", calls=1)
    counters.add("", "w", merges=3)  # before it is sent: nobody's cell
    [cell] = matrix([rows_from("trainer", 0, counters, (A,))], [B, A])
    assert cell.pserver == 1


@pytest.mark.parametrize(
    "body",
    [
        None,
        {"peers": [], "blocks": []},
        {"peers": [1], "blocks": [], "rows": []},
        {"peers": ["a"], "blocks": ["b"], "rows": [[0, 0, 1]]},
        {"peers": ["a"], "blocks": ["b"], "rows": [[1, 0, 0, 0, 0, 0, 0, 0, 0]]},
        {"peers": ["a"], "blocks": ["b"], "rows": [[0, 0, -1, 0, 0, 0, 0, 0, 0]]},
        {"peers": ["a"], "blocks": ["b"], "rows": [[0, 0, 0.5, 0, 0, 0, 0, 0, 0]]},
    ],
)
def test_body_that_is_none_is_refused(body: object) -> None:
    with pytest.raises(PeerError, match="EXCHANGE"):
        rows_of(body)


def test_trainer_number_of_too_many_digits_is_nobody() -> None:
    server = Counters()
    server.add("trainer " + "9" * 5000, "w", calls=1)
    assert matrix([rows_from("pserver", 0, server)]) == []
