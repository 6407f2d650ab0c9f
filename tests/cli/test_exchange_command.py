"""`penstock exchange`: blocks summed for each trainer and pserver."""

from __future__ import annotations

from penstock.command.jobs import HEAD, rows_of
from penstock.protocol.exchange import Cell


def cell(trainer: int, pserver: int, block: str, number: int) -> Cell:
    return Cell(
        trainer=trainer, pserver=pserver, block=block, calls=number, sent_bytes=10 * number,
        received_bytes=100 * number, wait_ns=1_000_000_000 * number, staleness=number,
    )  # fmt: skip


def test_blocks_of_a_pair_are_one_row() -> None:
    rows = rows_of([cell(1, 0, "w", 1), cell(0, 1, "w", 2), cell(0, 1, "", 3)])
    assert rows == [["0", "1", "50", "500", "5.000", "0", "5", "5"], ["1", "0", "10", "100", "1.000", "0", "1", "1"]]
    assert all(len(row) == len(HEAD) for row in rows)
