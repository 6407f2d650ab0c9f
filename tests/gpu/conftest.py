"""Tests that need a GPU are left out, and counted, where there are too few: `@pytest.mark.gpu`, `gpu(cards=2)`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

_left_out: list[pytest.Item] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs more cards than are visible."""
    present = torch.cuda.device_count()
    wanted = [(item, item.get_closest_marker("gpu")) for item in items]
    _left_out[:] = [item for item, mark in wanted if mark is not None and mark.kwargs.get("cards", 1) > present]
    if _left_out:
        config.hook.pytest_deselected(items=_left_out)
        items[:] = [item for item in items if item not in _left_out]


def pytest_report_collectionfinish() -> str:
    """Say how many were left out, and why."""
    return f"gpu: {torch.cuda.device_count()} cards are visible; {len(_left_out)} tests that need more are deselected"


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    """Let convolutions use float32 on a card too, not the shorter TF32: tests compare with CPU."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
