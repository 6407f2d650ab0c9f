"""Snapshots on a node: only the right bytes, and nothing outside of the replica's folder."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from penstock.errors import PeerError, SpecError
from penstock_worker import snapshots


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size) if member.isreg() else None)
    return path


def member(name: str, *, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


def test_a_snapshot_is_unpacked_into_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "work"
    target.mkdir()
    snapshots.unpack(archive(tmp_path / "s.tar.gz", member("train.py", size=3)), target)
    assert (target / "train.py").read_bytes() == b"xxx"


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside", size=1),
        member("link", kind=tarfile.SYMTYPE, link="../../etc"),
        member("absolute", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("device", kind=tarfile.CHRTYPE),
    ],
    ids=lambda made: made.name,
)
def test_a_member_that_leaves_the_folder_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    target = tmp_path / "work"
    target.mkdir()
    with pytest.raises(SpecError, match="cannot be unpacked"):
        snapshots.unpack(archive(tmp_path / "s.tar.gz", bad), target)
    assert not (tmp_path / "outside").exists()


def test_a_bomb_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_UNPACKED_BYTES", 1000)
    target = tmp_path / "work"
    target.mkdir()
    with pytest.raises(SpecError, match="unpacks to more than"):
        snapshots.unpack(archive(tmp_path / "s.tar.gz", member("big", size=1001)), target)
    assert not (target / "big").exists()


def test_wrong_bytes_are_refused_and_not_kept(tmp_path: Path) -> None:
    def download(_: str, path: Path) -> None:
        path.write_bytes(b"other")

    cache = snapshots.SnapshotCache(tmp_path / "cache", download)
    with pytest.raises(PeerError, match="expected " + "0" * 64):
        cache.fetch("0" * 64)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cached_snapshot_is_fetched_once_unless_damaged(tmp_path: Path) -> None:
    calls: list[str] = []

    def download(sha256: str, path: Path) -> None:
        calls.append(sha256)
        path.write_bytes(b"abc")

    (tmp_path / "abc").write_bytes(b"abc")
    sha = snapshots.file_sha256(tmp_path / "abc")
    cache = snapshots.SnapshotCache(tmp_path / "cache", download)
    path = cache.fetch(sha)
    assert cache.fetch(sha) == path
    assert calls == [sha]
    path.write_bytes(b"broken")
    assert cache.fetch(sha).read_bytes() == b"abc"
