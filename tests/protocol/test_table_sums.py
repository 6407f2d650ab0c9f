"""Tables in EXCHANGE frames: what is sent is what is read, and the parts of servers add up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.errors import PeerError
from penstock.protocol.tables import MOST_TABLES, TableSums, joined, tables_body, tables_of

PART = TableSums(
    name="emb", width=8, capacity=1000, rows=100, held_bytes=6400, pulled=500, absent=100, pushed=300, sampled=300,
    missed=0, hot=((2**63 - 1, 60), (-3, 30)),
)  # fmt: skip


def test_a_body_gives_its_tables_back() -> None:
    sent = json.loads(json.dumps(tables_body([PART, replace(PART, name="other")])))
    assert tables_of(sent) == [PART, replace(PART, name="other")]
    assert sent["tables"][0]["hot"][0] == ["9223372036854775807", 60]


def test_a_process_without_tables_says_nothing_of_them() -> None:
    assert tables_body([]) == {}
    assert tables_of({"peers": []}) == []


def test_more_tables_than_fit_are_left_out() -> None:
    assert len(tables_body([PART] * (MOST_TABLES + 5))["tables"]) == MOST_TABLES


@pytest.mark.parametrize(
    "tables",
    [
        7,
        [7],
        [{}],
        [{**tables_body([PART])["tables"][0], "rows": -1}],
        [{**tables_body([PART])["tables"][0], "rows": True}],
        [{**tables_body([PART])["tables"][0], "hot": [["x", 1]]}],
        [{**tables_body([PART])["tables"][0], "hot": [[float("inf"), 1]]}],
        [{**tables_body([PART])["tables"][0], "hot": [["1", 10**400]]}],
        [{**tables_body([PART])["tables"][0], "pushed": 10**400}],
        [{**tables_body([PART])["tables"][0], "name": None}],
        [tables_body([PART])["tables"][0]] * (MOST_TABLES + 1),
    ],
)
def test_what_is_no_table_is_refused(tables: object) -> None:
    with pytest.raises(PeerError):
        tables_of({"tables": tables})


def test_parts_of_servers_add_up_and_skew_names_the_largest() -> None:
    large = replace(PART, rows=300, pushed=900, sampled=90, hot=((4, 30),))
    (table,) = joined([(1, large), (0, PART)])
    assert (table.rows, table.pushed, table.absent, list(table.parts)) == (400, 1200, 200, [0, 1])
    assert (table.skew_rows, table.skew_pushes) == (1.5, 1.5)
    # Of 1,200 pushes: a third of 900, a fifth and a tenth of 300.
    assert [(one.id, round(one.share, 6), one.pserver) for one in table.hot] == [
        (4, 0.25, 1),
        (2**63 - 1, 0.05, 0),
        (-3, 0.025, 0),
    ]


def test_a_restarted_server_counts_by_its_newest_report() -> None:
    (table,) = joined([(0, PART), (0, replace(PART, rows=7))])
    assert table.rows == 7


def test_an_empty_table_is_even() -> None:
    (table,) = joined([(i, replace(PART, rows=0, pushed=0, sampled=0, hot=())) for i in range(2)])
    assert (table.skew_rows, table.skew_pushes, table.hot) == (1.0, 1.0, ())
