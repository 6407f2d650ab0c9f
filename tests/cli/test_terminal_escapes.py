"""What other people name their jobs does not steer the terminal of who lists them."""

from __future__ import annotations

import pytest

from penstock.command.output import emit_table, note, printable


def test_escapes_and_reordering_are_spelled_out() -> None:
    assert printable("\x1b[2J\x07a\u202eb\x9b1m\r") == r"\x1b[2J\x07a\u202eb\x9b1m\r"
    assert printable("größer → 3\tok\n") == "größer → 3\tok\n"


def test_a_table_keeps_its_columns_and_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    emit_table(["JOB", "WHY"], [["a\x1b]0;owned\x07", "waits"], ["b", "runs"]], empty="none")
    note("\x1b[31mred")
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert {line.rindex("  ") for line in shown.out.splitlines()} == {17}
