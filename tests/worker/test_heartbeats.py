"""What a heartbeat says of the machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.protocol.agent import Heartbeat
from penstock_worker.messages import heartbeat


def test_a_heartbeat_has_the_space_of_the_state_folder(tmp_path: Path) -> None:
    sent = Heartbeat.model_validate(json.loads(heartbeat("", None, None, tmp_path)))
    assert sent.disk is not None
    assert sent.disk.total_bytes == shutil.disk_usage(tmp_path).total
    assert 0 <= sent.disk.free_bytes <= sent.disk.total_bytes


@pytest.mark.parametrize("folder", ["gone", "file/below"])
def test_a_disk_that_cannot_be_read_is_left_out(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    assert "disk" not in json.loads(heartbeat("", None, None, tmp_path / folder))
