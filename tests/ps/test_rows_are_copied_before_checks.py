"""Rows that a trainer may still change after they were checked: a server keeps what it has checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.ps.requests import gradient_of, gradients_of, looked_up
from penstock.ps.storage import BlockSpec
from penstock.ps.wire import Message, to_wire

SPECS = {"w": BlockSpec(torch.float32, torch.Size((3, 2)), is_table=False)}
SENDER: dict[str, Any] = {"job": "j", "trainer": 0, "epoch": 0, "round": 0}


def pushed(rows: Tensor) -> Tensor | None:
    """Return the rows of a push."""
    tensors = [to_wire("rows", rows), to_wire("values", torch.ones(len(rows), 2))]
    return gradient_of(Message("push", {**SENDER, "block": "w"}, tensors), SPECS).rows


def stepped(rows: Tensor) -> Tensor | None:
    """Return the rows of a step."""
    tensors = [to_wire("rows:w", rows), to_wire("values:w", torch.ones(len(rows), 2))]
    return gradients_of(Message("step", {**SENDER, "blocks": json.dumps([])}, tensors), SPECS)["w"].rows


def asked(rows: Tensor) -> Tensor | None:
    """Return the ids of a lookup."""
    return looked_up(Message("lookup", {**SENDER, "table": "w"}, [to_wire("ids", rows)]), SPECS)[1]


@pytest.mark.parametrize("read", [pushed, stepped, asked])
def test_rows_that_change_after_they_were_checked_change_nothing(read: Callable[[Tensor], Tensor | None]) -> None:
    shared = torch.tensor([0, 2])
    kept = read(shared)
    shared.fill_(1 << 40)
    assert kept is not None
    assert kept.tolist() == [0, 2]
