"""Snapshots on a node: only the right bytes, and nothing outside of the replica's folder."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tracemalloc
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


@pytest.fixture(params=["today", "before 3.11.4"])
def _filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pythons before 3.11.4 have no filters of tarfile."""
    if request.param != "today":
        monkeypatch.delattr(tarfile, "data_filter")


@pytest.mark.usefixtures("_filters")
def test_a_snapshot_is_unpacked_into_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "work"
    target.mkdir()
    file, script = member("train.py", size=3), member("/data/run.sh", size=1)
    file.uid = file.gid = script.uid = 12345
    file.mode, script.mode = 0o4467, 0o777
    links = [
        member("data/link", kind=tarfile.SYMTYPE, link="../train.py"),
        member("same", kind=tarfile.LNKTYPE, link="train.py"),
    ]
    snapshots.unpack(archive(tmp_path / "s.tar.gz", file, member("data", kind=tarfile.DIRTYPE), script, *links), target)
    for name in ("train.py", "data/link", "same"):
        assert (target / name).read_bytes() == b"xxx"
    found = (target / "train.py").stat()
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o644, os.getuid(), os.getgid())
    assert (target / "data/run.sh").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside", size=1),
        member("link", kind=tarfile.SYMTYPE, link="../../etc"),
        member("absolute", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        member("device", kind=tarfile.CHRTYPE),
        member("hard", kind=tarfile.LNKTYPE, link="../outside"),
    ],
    ids=lambda made: made.name,
)
@pytest.mark.usefixtures("_filters")
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


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_bomb_in_a_header_is_refused_before_it_is_read(tmp_path: Path, kind: bytes) -> None:
    size = 64 << 20
    with gzip.open(tmp_path / "s.tar.gz", "wb", compresslevel=1) as file:
        file.write(member("header", kind=kind, size=size).tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(SpecError, match="describes a file with"):
            snapshots.unpack(tmp_path / "s.tar.gz", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_headers_without_end_are_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "s.tar.gz", "wb") as file:
        for _ in range(3000):  # each is read within the reading of the one before it
            file.write(member("header", kind=tarfile.XGLTYPE, size=512).tobuf(tarfile.USTAR_FORMAT))
            file.write(b"12 path=name\n".ljust(512, b"\0"))
    with pytest.raises(SpecError, match="cannot be unpacked"):
        snapshots.unpack(tmp_path / "s.tar.gz", tmp_path)


def test_long_names_are_unpacked(tmp_path: Path) -> None:
    name = "/".join(["d" * 120] * 4) + "/ünïcode.txt"
    target = tmp_path / "work"
    target.mkdir()
    snapshots.unpack(archive(tmp_path / "s.tar.gz", member(name, size=3)), target)
    assert (target / name).read_bytes() == b"xxx"


@pytest.mark.usefixtures("_filters")
def test_a_member_behind_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "work"
    target.mkdir()
    (target / "away").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="cannot be unpacked"):
        snapshots.unpack(archive(tmp_path / "s.tar.gz", member("away/outside", size=1)), target)
    assert not (tmp_path / "outside").exists()
