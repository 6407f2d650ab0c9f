"""`penstock.capture(use_cuda=True)` where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import SpecError


def test_capture_asks_for_gpus_and_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    examples = (torch.zeros(4, 3), torch.zeros(4, 1))
    captured = penstock.capture(nn.Linear(3, 1), nn.MSELoss(), "SGD", examples, use_cuda=True)
    with pytest.raises(SpecError, match=r"use_cuda=True: .*pass use_cuda=False"):
        captured.step(*examples)
    captured.close()
    captured = penstock.capture(nn.Linear(3, 1), nn.MSELoss(), "SGD", examples)
    assert captured.step(*examples) >= 0.0
    captured.close()
