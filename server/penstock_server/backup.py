"""Backups of a state folder, made while its server runs, and their restoration into an empty one.

A backup is a tar.gz with the database as of one moment, the key of the tokens, the administrator's token, snapshots,
logs and, unless left out, telemetry; it opens the server to who has it, and only its owner may read it. Files are read
after the database: they only grow, so that none is missing that the database names.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sqlite3
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from penstock.errors import PeerError, PenstockError, UserError
from penstock.process.private import make_private
from penstock.unpacking import extract
from penstock.version import __version__

DATABASE, MANIFEST = "penstock.db", "manifest.json"
SECRETS = ("pepper.key", "admin.token")
EPOCHS, STREAMS = 1_000, 1_000_000
"""How far a restored server counts on: what ran after the backup may have got the numbers in between."""
EXIT_OK, EXIT_FAILED = 0, 2


def main(argv: Sequence[str]) -> int:
    """Run `backup` or `restore`; return the exit status."""
    parser = argparse.ArgumentParser(prog="penstock")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, help_text in (("backup", "write a backup of a server, which may run"), ("restore", "make it a server's")):
        action = actions.add_parser(name, help=help_text)
        action.add_argument("file", type=Path)
        action.add_argument("--state-dir", type=Path, default=Path.home() / ".penstock" / "server")
        if name == "backup":
            action.add_argument("--without-telemetry", action="store_true", help="leave recorded frames out")
    given = parser.parse_args(argv)
    try:
        if given.action == "backup":
            backup(given.state_dir, given.file, with_telemetry=not given.without_telemetry)
        else:
            restore(given.file, given.state_dir)
    except (PenstockError, OSError) as error:
        sys.stderr.write(f"penstock {given.action}: {error}\n")
        return EXIT_FAILED
    return EXIT_OK


def backup(state_dir: Path, target: Path, *, with_telemetry: bool = True) -> None:
    """Write a backup to `target`, in one step (0600). Raises UserError if there is no SQLite database in the folder."""
    if not (state_dir / DATABASE).is_file():
        raise UserError(
            f"{state_dir} holds no {DATABASE}. Of a server on PostgreSQL, back up the database with pg_dump, and copy "
            "the folder beside it."
        )
    part = target.with_name(f".{target.name}.part")
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        copy = Path(folder) / DATABASE
        with (
            closing(sqlite3.connect(f"file:{state_dir / DATABASE}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as whole,
        ):
            source.backup(whole, pages=1000, sleep=0.01)  # in parts, between which the server writes
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
                _add_text(tar, MANIFEST, json.dumps({"version": __version__, "created_at": time.time()}))
                tar.add(copy, DATABASE)
                for path in _files(state_dir, with_telemetry=with_telemetry):
                    _add_grown(tar, path, path.relative_to(state_dir))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def restore(source: Path, state_dir: Path) -> None:
    """Fill an empty or new folder from a backup. Raises UserError, and then leaves the folder as it was."""
    if state_dir.exists() and any(state_dir.iterdir()):
        raise UserError(f"{state_dir} is not empty; name a new folder with --state-dir, or move this one away")
    if not state_dir.parent.exists():
        make_private(state_dir.parent, frozenset())
    with tempfile.TemporaryDirectory(dir=state_dir.parent, prefix=f".{state_dir.name}.") as folder:
        made = Path(folder) / "state"
        made.mkdir(mode=0o700)
        try:
            with tarfile.open(source, "r:gz") as tar:
                for member in tar:
                    extract(tar, member, made)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise UserError(f"{source} is no backup, or is damaged: {error}") from error
        if not (made / MANIFEST).is_file() or not (made / DATABASE).is_file():
            raise UserError(f"{source} is no backup of a server: it holds no {MANIFEST} or {DATABASE}")
        (made / MANIFEST).unlink()
        _count_on(made / DATABASE)
        for path in made.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        if state_dir.exists():
            state_dir.rmdir()
        made.replace(state_dir)


def _count_on(database: Path) -> None:
    """Skip the epochs and streams that may have been given after the backup: an old process must not pass for a new."""
    with closing(sqlite3.connect(database)) as connection:
        try:
            (found,) = connection.execute("PRAGMA integrity_check").fetchone()
            if found == "ok":
                connection.execute("UPDATE jobs SET epoch = epoch + ?", (EPOCHS,))
                connection.execute("UPDATE counters SET value = value + ? WHERE name = 'stream'", (STREAMS,))
                connection.commit()
        except sqlite3.DatabaseError as error:
            found = str(error)
        if found != "ok":
            raise PeerError(f"the backup's database is damaged: {found}")


def _files(state_dir: Path, *, with_telemetry: bool) -> Iterator[Path]:
    yield from (path for name in SECRETS if (path := state_dir / name).is_file())
    yield from sorted((state_dir / "snapshots").glob("*.tar.gz"))
    yield from sorted(state_dir.glob("jobs/*/logs/*.log"))
    yield from sorted(state_dir.glob("jobs/*/logs/*.times"))
    if with_telemetry:
        yield from sorted(state_dir.glob("jobs/*/segments/*.seg"))


def _add_grown(tar: tarfile.TarFile, path: Path, name: Path) -> None:
    """Add a file that may grow meanwhile, or be deleted by its quota."""
    try:
        with path.open("rb") as file:
            member = tarfile.TarInfo(name.as_posix())
            member.size, member.mode, member.mtime = os.fstat(file.fileno()).st_size, 0o600, int(time.time())
            tar.addfile(member, file)
    except FileNotFoundError:
        return


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(text.encode()), 0o600
    tar.addfile(member, io.BytesIO(text.encode()))
