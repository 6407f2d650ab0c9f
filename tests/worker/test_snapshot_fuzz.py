"""Snapshots that anybody may have made: nothing outside of the folder, no more memory than the limit, no other error.

Archives are written here byte by byte, so that they hold what no library would write: sizes that are negative or lie,
headers of PAX and GNU with any values, links, devices, damage at any bit.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
import tempfile
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import SpecError
from penstock_worker import snapshots

BLOCK = 512
LIMIT_BYTES = 256 << 10
MEMORY_BYTES = 4 << 20
"""Far above what the buffers take, and far below what an archive of a few KiB can describe."""
WORDS = ["", "1", "-1", "0", "17", "x", "nan", "1e400", "9" * 25, "-" + "9" * 25, "0,1,2,3", "4\n0\n512\n", "a\0b", "é"]
NAMES = [
    "a", "b", "a/b", "a/b/c", "dir/", "link", "link/in", "../out", "a/../../out", "/etc/out", "..", ".", "", "a\0b",
    "\udcff", "é" * 60, "x" * 150, "./a", "outside/secret",
]  # fmt: skip
LINKS = ["a", "b", "..", "../outside", "../outside/secret", "/etc/passwd", "link", "", ".", "a/b", "\0"]
KEYS = [
    "path", "linkpath", "size", "mtime", "uid", "gid", "uname", "mode", "hdrcharset", "comment", "GNU.sparse.map",
    "GNU.sparse.size", "GNU.sparse.name", "GNU.sparse.realsize", "GNU.sparse.major", "GNU.sparse.minor",
    "GNU.sparse.numblocks", "SCHILY.realsize",
]  # fmt: skip
KINDS = [b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"K", b"S", b"x", b"g", b"X", b"D", b"M", b"V"]
NUMBERS = [0, 1, 5, 511, 512, 513, 4096, 1 << 18, 1 << 33, 1 << 62, 1 << 90, -1, -512, -(1 << 40)]


@dataclass(frozen=True)
class Header:
    """One header block and what follows it. `size`: what it says; None: the truth."""

    name: str
    kind: bytes
    link: str
    mode: int
    mtime: int
    size: int | None
    content: bytes

    def encode(self) -> bytes:
        size = len(self.content) if self.size is None else self.size
        fields = [
            _text(self.name, 100), _number(self.mode, 8), _number(0, 8), _number(0, 8), _number(size, 12),
            _number(self.mtime, 12), b" " * 8, self.kind, _text(self.link, 100), b"ustar\x0000", b"\0" * 247,
        ]  # fmt: skip
        block = b"".join(fields).ljust(BLOCK, b"\0")
        checksum = b"%06o\0 " % sum(block)
        padded = self.content + b"\0" * (-len(self.content) % BLOCK)
        return block[:148] + checksum + block[156:] + padded


def _text(text: str, size: int) -> bytes:
    return text.encode("utf-8", "surrogateescape")[:size].ljust(size, b"\0")


def _number(value: int, size: int) -> bytes:
    """Return a field of a header: octal, or base 256 where that is too narrow or the number negative."""
    if 0 <= value < 8 ** (size - 1):
        return b"%0*o\0" % (size - 1, value)
    lead = b"\x80" if value >= 0 else b"\xff"
    rest: int = value % (1 << 8 * (size - 1))
    return lead + rest.to_bytes(size - 1, "big")


def _records(pairs: list[tuple[str, str]]) -> bytes:
    """Return the records of a PAX header."""
    records = b""
    for key, value in pairs:
        body = f" {key}={value}\n".encode("utf-8", "surrogateescape")
        length = len(body) + 1
        while len(b"%d" % length) + len(body) != length:
            length = len(b"%d" % length) + len(body)
        records += b"%d" % length + body
    return records


CONTENTS = st.one_of(
    st.binary(max_size=1200),
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([*WORDS, *NAMES, *LINKS])), max_size=4).map(_records),
    st.sampled_from([name.encode("utf-8", "surrogateescape") + b"\0" for name in NAMES]),
)
HEADERS = st.builds(
    Header,
    st.sampled_from(NAMES),
    st.sampled_from(KINDS) | st.binary(min_size=1, max_size=1),
    st.sampled_from(LINKS),
    st.sampled_from([0o644, 0o755, 0o6777, 0, 0o1777, -1, 1 << 40]),
    st.sampled_from(NUMBERS),
    st.none() | st.sampled_from(NUMBERS),
    CONTENTS,
)
HONEST = st.builds(
    Header, st.sampled_from(NAMES[:6]), st.just(b"0"), st.just(""), st.just(0o644), st.just(0), st.none(), CONTENTS
)
FLIPS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 7)), max_size=3)
ARCHIVES = st.lists(HONEST | HEADERS, min_size=1, max_size=6).map(
    lambda found: b"".join(one.encode() for one in found) + bytes(2 * BLOCK)
)


def damaged(content: bytes, flips: list[tuple[int, int]], kept: float) -> bytes:
    """Return bytes with some bits flipped, and the end cut off."""
    found = bytearray(content[: int(len(content) * kept)])
    for at, bit in flips if found else ():
        found[at % len(found)] ^= 1 << bit
    return bytes(found)


@settings(max_examples=250)
@given(tar=ARCHIVES, flips=FLIPS, packed_flips=FLIPS, kept=st.just(1.0) | st.floats(0, 1), is_old=st.booleans())
def test_no_archive_leaves_its_folder_or_the_limits(
    tar: bytes, flips: list[tuple[int, int]], packed_flips: list[tuple[int, int]], kept: float, is_old: bool
) -> None:
    packed = damaged(gzip.compress(damaged(tar, flips, 1.0), 1, mtime=0), packed_flips, kept)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        if is_old:
            patch.delattr(tarfile, "data_filter")  # Pythons before 3.11.4 have none
        patch.setattr(snapshots, "MAX_UNPACKED_BYTES", LIMIT_BYTES)
        patch.setattr(snapshots, "MAX_STREAM_BYTES", 2 * LIMIT_BYTES)
        archive, target, outside = folder / "s.tar.gz", folder / "work", folder / "outside"
        archive.write_bytes(packed)
        target.mkdir()
        outside.mkdir()
        (outside / "secret").write_text("secret")
        before = seen(folder, but=target)
        assert peak_of(archive, target) < MEMORY_BYTES
        assert seen(folder, but=target) == before
        assert_harmless(target)


def peak_of(archive: Path, target: Path) -> int:
    """Unpack, or have it refused; return how many bytes that took at once."""
    tracemalloc.start()
    try:
        snapshots.unpack(archive, target)
    except SpecError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def seen(folder: Path, *, but: Path) -> list[tuple[str, int, int]]:
    """Return names, modes and sizes of what is in a folder, without one of its folders."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path != but and but not in path.parents:
            entry = path.lstat()
            found.append((str(path), entry.st_mode, entry.st_size))
    return found


def assert_harmless(target: Path) -> None:
    """Only files, folders and links within the folder, of this user, without special bits."""
    root, size = target.resolve(), 0
    for path in target.rglob("*"):
        entry = path.lstat()
        assert stat.S_ISREG(entry.st_mode) or stat.S_ISDIR(entry.st_mode) or stat.S_ISLNK(entry.st_mode), path
        assert entry.st_uid == os.getuid()
        if path.is_symlink():
            reached = Path(os.path.realpath(path))
            assert reached == root or root in reached.parents, f"{path} leads to {reached}"
        else:
            assert not entry.st_mode & (stat.S_ISUID | stat.S_ISGID), path
        size += entry.st_size if stat.S_ISREG(entry.st_mode) and entry.st_nlink == 1 else 0
    assert size <= LIMIT_BYTES
