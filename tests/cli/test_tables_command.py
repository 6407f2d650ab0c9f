"""`penstock tables`: one row for each table."""

from __future__ import annotations

from penstock.command.tables import HEAD, row_of
from penstock.protocol.rest import HotId, SparseTable


def table(pulled: int = 800, absent: int = 200) -> SparseTable:
    hot = [HotId(id=str(i), share=0.5 / (i + 1), pserver=0) for i in range(5)]
    return SparseTable(
        name="emb", width=8, capacity=1000, rows=400, held_bytes=25_600, pulled=pulled, absent=absent, pushed=600,
        skew_rows=1.5, skew_pushes=1.25, hot=hot, parts=[],
    )  # fmt: skip


def test_a_table_is_one_row_with_its_hottest_ids() -> None:
    row = row_of(table())
    assert len(row) == len(HEAD)
    assert row[:6] == ["emb", "400", "1000", "25600", "800", "75.0%"]
    assert row[6:] == ["600", "1.50", "1.25", "0:50.0% 1:25.0% 2:16.7%"]


def test_a_table_that_was_never_read_has_no_found_share() -> None:
    assert row_of(table(pulled=0, absent=0))[5] == "-"
