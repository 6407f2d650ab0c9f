"""`penstock completeness`: one row a kind, with the reasons; what does not add up stands out."""

from __future__ import annotations

from penstock.command.completeness import HEAD, row_of
from penstock.protocol.rest import CountedRows, RowsGone


def counted(unexplained: int = 0) -> CountedRows:
    return CountedRows(
        kind="OP_EVENTS", produced=100 + unexplained, shown=40, sampled_out=30, pending=1, unexplained=unexplained,
        dropped=[RowsGone(reason="agent_buffer_full", text="beyond the agent's buffer", rows=9)],
        expired=[RowsGone(reason="quota", text="beyond the recording's size", rows=20)],
    )  # fmt: skip


def test_a_kind_is_one_row_whose_numbers_add_up() -> None:
    row = row_of(counted())
    assert len(row) == len(HEAD)
    assert row == [
        *("OP_EVENTS", "100", "40", "30", "9", "20", "1", "-"),
        "9 beyond the agent's buffer, 20 beyond the recording's size",
    ]
    assert int(row[1]) == sum(map(int, row[2:7]))


def test_rows_that_are_missing_have_a_number_of_their_own() -> None:
    assert row_of(counted(unexplained=7))[7] == "7"
