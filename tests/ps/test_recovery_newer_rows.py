"""Which rows of a record a snapshot's parts hold already."""

from __future__ import annotations

import time

import torch

from penstock.ps.persistence import _Newer
from penstock.ps.storage import Gradient


def test_rows_that_a_newer_part_holds_are_left_out() -> None:
    source = torch.Generator().manual_seed(1)
    newer = _Newer()
    parts = {5: torch.randint(-50, 50, (20,), generator=source), 9: torch.tensor([2**63 - 1, -(2**63)])}
    for at, ids in parts.items():
        newer.add("t", at, ids)
    newer.add("t", 9, torch.tensor([], dtype=torch.int64))
    rows = torch.cat([torch.randint(-60, 60, (40,), generator=source), parts[9]])
    for sequence in (4, 5, 8, 9):
        held = {i for at, ids in parts.items() if sequence < at for i in ids.tolist()}
        got = newer.without("t", Gradient(rows.float(), rows), sequence)
        expected = [i for i in rows.tolist() if i not in held]
        assert got.rows is not None
        assert got.rows.tolist() == expected
        assert got.values.tolist() == torch.tensor(expected).float().tolist()
    assert newer.without("u", Gradient(rows.float(), rows), 0).rows is rows


def test_a_record_costs_what_it_has_not_what_the_parts_have() -> None:
    newer = _Newer()
    newer.add("t", 10, torch.randperm(2_000_000))
    record = Gradient(torch.ones(10, 1), torch.arange(10))
    began = time.process_time()
    for _ in range(100):
        newer.without("t", record, 0)
    assert time.process_time() - began < 1.0, "a scan of all ids for each record takes several times that"
