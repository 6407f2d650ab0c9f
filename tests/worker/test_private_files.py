"""Files that others may not read, replaced in one step."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from penstock.process.private import write_private
from penstock_server.statedir import write_address


def test_address_of_a_server_is_never_seen_half_written(tmp_path: Path) -> None:
    write_address(tmp_path, "http://127.0.0.1:1")
    over = threading.Event()

    def write() -> None:
        for _ in range(500):
            write_address(tmp_path, "http://127.0.0.1:1")
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set():
        assert json.loads((tmp_path / "server.json").read_text())["url"] == "http://127.0.0.1:1"
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["server.json"]


@pytest.mark.parametrize("durable", [False, True])
def test_private_file_is_replaced_with_its_mode(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    file.chmod(0o644)
    write_private(file, "new\n", durable=durable)
    assert file.read_bytes() == b"new\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "folder" / "within").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_private(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
