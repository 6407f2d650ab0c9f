"""Fencing of a folder of checkpoints: the newest attempt alone may commit into it.

An attempt that begins to use the folder *claims* it: it gets the next number, and every attempt before it is refused
from then on. Processes of one job and epoch (a trainer that is started again in its place) have one number, and differ
in the token of each claim: the last one counts. Within one job an epoch below that of the last claim is refused
at once. A claim and a commit exclude each other by a lock that the kernel releases when a process dies: a commit that
has begun is finished before the next claim.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from penstock.errors import PeerError
from penstock.identity import Incarnation
from penstock.io.saves.files import flush
from penstock.io.saves.manifest import expect, sealed, unsealed

_FILE, _LOCK = "attempt.json", "attempt.lock"
_FORMAT, _VERSION = "penstock-attempt", 1


class StaleAttempt(PeerError):
    """A newer attempt has begun to use the checkpoints; this one has to end. Fields: attempt, newest."""

    code = "stale_attempt"


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt. `job` '', `epoch` -1: of no control plane. `token`: of this claim alone, in hexadecimal."""

    number: int
    job: str
    epoch: int
    host: str
    pid: int
    token: str

    def __str__(self) -> str:
        of = f" (job {self.job}, epoch {self.epoch})" if self.job else ""
        return f"attempt {self.number}{of} of process {self.pid} on {self.host}"


class Fence:
    """The claim of this process on a folder. Raises OSError, and UserError for a damaged file."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        """Claim the folder, which is made if need be, as the job of `environ`. Raises StaleAttempt, SpecError."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        own = Incarnation.from_environ(environ)
        job, epoch = ("", -1) if not own.job or own.epoch is None else (own.job, own.epoch)
        with self._locked():
            newest = self._newest()
            if newest is not None and job and newest.job == job and newest.epoch > epoch:
                raise _stale(f"job {job}, epoch {epoch},", folder, newest)
            number = 1 if newest is None else newest.number + 1
            if newest is not None and job and (newest.job, newest.epoch) == (job, epoch):
                number = newest.number
            self.claim = Claim(number, job, epoch, socket.gethostname(), os.getpid(), secrets.token_hex(8))
            self._write()

    def check(self) -> None:
        """Raise StaleAttempt if the folder was claimed after this process did."""
        with self._locked():
            self._check()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Commit within: no other attempt can claim the folder meanwhile. Raises StaleAttempt."""
        with self._locked():
            self._check()
            yield

    def _check(self) -> None:
        newest = self._newest()
        if newest is None or newest.token != self.claim.token:
            raise _stale(str(self.claim), self.folder, newest)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with FileLock(self.folder / _LOCK):
            yield

    def _newest(self) -> Claim | None:
        path = self.folder / _FILE
        if not path.exists():
            return None
        content = {"token": "", **unsealed(path.read_bytes(), _FORMAT, _VERSION, str(path))}  # there were none at first
        kinds = (("number", int), ("job", str), ("epoch", int), ("host", str), ("pid", int), ("token", str))
        return Claim(*(expect(content, name, kind, str(path)) for name, kind in kinds))

    def _write(self) -> None:
        temporary = self.folder / f".{_FILE}.tmp"  # one: the lock is held
        temporary.write_text(sealed(asdict(self.claim), _FORMAT, _VERSION))
        flush(temporary)
        temporary.replace(self.folder / _FILE)
        flush(self.folder)


def _stale(attempt: str, folder: Path, newest: Claim | None) -> StaleAttempt:
    return StaleAttempt(
        f"{attempt} may not write checkpoints into {folder} any more: {newest or 'its claim was removed, and another'} "
        "has taken over. Only the newest attempt commits, so that two never mix; end this process, or give it a "
        "folder of its own",
        newest=None if newest is None else newest.number,
    )
