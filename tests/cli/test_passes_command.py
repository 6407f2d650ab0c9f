"""`penstock passes`: one row for each pass that changed the graph."""

from __future__ import annotations

from penstock.command.graphpasses import HEAD, row_of
from penstock.protocol.graphstages import PassFacts


def test_a_pass_is_one_row_with_its_most_frequent_types() -> None:
    one = PassFacts(
        "fuse_lookups", "lookups side by side", 175, 135,
        removed={"aten.squeeze.dim": 20, "penstock.lookup_table.default": 19, "aten.t.default": 1},
        added={}, changed={"aten.cat.default -> penstock.lookup_concat.default": 2},
    )  # fmt: skip
    row = row_of(one)
    assert len(row) == len(HEAD)
    assert row[:6] == ["lookups side by side", "175", "135", "40", "0", "2"]
    assert row[6] == (
        "-aten.squeeze.dim:20 -penstock.lookup_table.default:19 "
        "~aten.cat.default -> penstock.lookup_concat.default:2"
    )  # fmt: skip
