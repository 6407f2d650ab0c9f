"""A node whose disk is full: how a replica ended is known all the same, so that nothing runs twice."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_worker import lease
from penstock_worker.logtail import LogTail

FULL = f"""
import json, os, subprocess, sys
from pathlib import Path
from penstock_worker import guard, lease
folder = Path(sys.argv[1])
for path in (folder / guard.STARTED, folder / guard.EXIT):
    lease.reserve(path)
fill = "f = open('fill', 'wb')\\ntry:\\n while True: f.write(bytes(9999))\\nexcept OSError: raise SystemExit(7)"
order = {{"argv": [sys.executable, "-c", fill], "env": dict(os.environ), "cwd": str(folder), "stop_grace_s": 1.0,
         "lease": "", "lease_end": 0.0}}
lease.write_json(folder / guard.ORDER, order)
subprocess.run([sys.executable, "-P", "-m", "penstock_worker.guard", str(folder)], check=True, timeout=60)
try:
    lease.write_json(folder / "more.json", {{"fill": "x" * 65536}})
except OSError as error:
    assert error.errno == {errno.ENOSPC}
else:
    raise AssertionError("the disk is not full")
print((folder / guard.EXIT).read_text())
"""
_SPACES = (["unshare", "-m"], ["unshare", "-rm"])  # as root; as a user who may make namespaces


def test_the_end_on_a_disk_that_the_job_filled_is_written(tmp_path: Path) -> None:
    small = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@"'
    failed = []
    for space in _SPACES:
        argv = [*space, "sh", "-c", small, str(tmp_path), sys.executable, "-c", FULL, str(tmp_path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
        if done.returncode == 0:
            break
        failed.append(done.stderr)
    else:
        pytest.fail(
            "a small file system takes root, or user namespaces (sysctl kernel.unprivileged_userns_clone=1): "
            + " / ".join(failed)
        )
    found = json.loads(done.stdout)
    assert (found["state"], found["exit_code"], found["detail"]) == ("EXITED", 7, "")


def test_what_was_reserved_is_used_once_and_readable(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    lease.reserve(path)
    lease.write_reserved(path, {"state": "EXITED"})
    assert json.loads(path.read_text()) == {"state": "EXITED"}
    lease.write_reserved(path, {"state": "KILLED"})  # nothing is reserved any more
    assert json.loads(path.read_text()) == {"state": "KILLED"}
    assert [one.name for one in tmp_path.iterdir()] == ["exit.json"]


def test_what_is_larger_than_its_reserve_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    lease.reserve(path)
    lease.write_reserved(path, {"detail": "x" * lease.RESERVED_BYTES})
    assert len(json.loads(path.read_text())["detail"]) == lease.RESERVED_BYTES


def test_a_log_that_the_server_cannot_store_is_sent_again(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    log = LogTail(tmp_path / "log")
    assert log.next_chunk() == (0, b"one\ntwo\n")
    log.ack(4)  # its disk held the first line
    log.ack(4)
    assert (log.next_chunk(), log.drained, log.settled) == (None, False, False)
    log.retry()
    assert log.next_chunk() == (4, b"two\n")
    log.ack(8)
    assert (log.drained, log.settled) == (True, True)


def test_a_flood_of_lines_leaves_the_disk_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_worker.logtail.KEPT_BYTES", 100)
    log = LogTail(tmp_path / "log")
    with (tmp_path / "log").open("ab", buffering=0) as file:
        file.write(b"x" * 90)
        assert log.next_chunk() is not None
        log.ack(90, full=True)
        assert (log.next_chunk(), log.drained, log.settled) == (None, True, True)
        file.write(b"x" * 90)
        assert log.next_chunk() is None
        assert (tmp_path / "log").stat().st_size == 0
        file.write(b"again")
    assert (tmp_path / "log").read_bytes() == b"again"
