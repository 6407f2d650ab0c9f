"""Snapshots (tar.gz, named by SHA-256) on this node: checked, cached, and unpacked into a replica's own folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PeerError, SpecError
from penstock.unpacking import extract

MAX_UNPACKED_BYTES = 1 << 30
MAX_MEMBERS = 100_000
MAX_STREAM_BYTES = 2 * MAX_UNPACKED_BYTES
MAX_HEADER_BYTES = 64 << 10
"""Of what describes one member: tarfile reads it whole, before anything of it is known. Contents come in less."""

_DAMAGED = (tarfile.TarError, EOFError, OSError, RecursionError, zlib.error, ValueError, LookupError, OverflowError)
"""What reading a damaged archive raises: tarfile converts numbers and names of headers without a check."""


class SnapshotCache:
    """`download(sha256, path)` fetches one; concurrent calls for the same snapshot fetch twice and agree."""

    def __init__(self, folder: Path, download: Callable[[str, Path], None]) -> None:
        self._folder = folder
        self._download = download

    def fetch(self, sha256: str) -> Path:
        """Return the archive, downloaded if need be. Blocks. Raises PeerError if its bytes have another hash."""
        path = self._folder / f"{sha256}.tar.gz"
        if path.exists() and file_sha256(path) == sha256:
            return path
        self._folder.mkdir(parents=True, exist_ok=True)
        self._download(sha256, path)
        got = file_sha256(path)
        if got != sha256:
            path.unlink()
            raise PeerError(f"the server sent a snapshot with SHA-256 {got}; expected {sha256}")
        return path


class _Bounded(io.RawIOBase):
    """A decompressed stream for tarfile. Raises SpecError for a read that no honest archive makes."""

    def __init__(self, content: gzip.GzipFile) -> None:
        super().__init__()
        self._content = content

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes; tarfile asks for what a header says."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise SpecError(
                f"the snapshot describes a file with {size} bytes; expected at most {MAX_HEADER_BYTES}. "
                "Was it made by 'penstock submit'?"
            )
        return self._content.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place of the stream, at the cost of decompressing what lies before it."""
        if offset > MAX_STREAM_BYTES:
            raise SpecError(f"the snapshot unpacks to more than {MAX_STREAM_BYTES >> 20} MiB")
        return self._content.seek(offset, whence)

    def tell(self) -> int:
        """Return the place in the stream."""
        return self._content.tell()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path, target: Path) -> None:
    """Unpack into `target`, which must exist. Members outside of it, devices and links that leave it are refused.

    Raises SpecError if the archive is damaged, unsafe or too large; `target` may then hold a part of it.
    """
    try:
        with gzip.open(archive) as content, tarfile.open(fileobj=_Bounded(content), mode="r:") as tar:
            size = count = 0
            for member in tar:
                size, count = size + member.size, count + 1
                if size > MAX_UNPACKED_BYTES or count > MAX_MEMBERS:
                    raise SpecError(
                        f"the snapshot unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB or {MAX_MEMBERS} files; "
                        "leave data out of the workdir (.penstockignore)"
                    )
                extract(tar, member, target)
                member.pax_headers = {}  # the archive keeps its members, and they these
    except SpecError:  # which is a ValueError
        raise
    except _DAMAGED as error:
        raise SpecError(f"the snapshot cannot be unpacked: {error}") from error
