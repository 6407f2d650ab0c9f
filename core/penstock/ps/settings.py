"""What a parameter server and a trainer of a job are told. Pure: the environment comes in as a mapping.

PENSTOCK_JOB_ID          job; a server answers no other (local)
PENSTOCK_PS_TOKEN        secret of the job, needed to be heard by a server ('')
PENSTOCK_EPOCH           incarnation of this process; has to grow when it is started again (its start time in ns)
PENSTOCK_PS_LEASE_S      a trainer that is silent so long is lost (20)
PENSTOCK_PS_STATE_DIR    folder of a server's snapshots and log, one subfolder a server (none: a restart begins anew)
PENSTOCK_PS_SNAPSHOT_S   seconds between snapshots (60)
PENSTOCK_PS_SAVE_DIRS    more folders into which trainers may have a server save, separated like PATH (none)
PENSTOCK_CHECKPOINT_DIR  another one: of the job's checkpoints (none)
PENSTOCK_PS_START_S      how long to wait for each other at the start (600)
PENSTOCK_PS_DEADLINE_S   a server that is away so long in the middle of training is an error (30)
PENSTOCK_PS_TRANSPORT    auto: a trainer talks to a server of its host through shared memory; tcp: never (auto)
PENSTOCK_PS_TLS_CA       PEM file: trainers trust servers whose certificate it signed; with it they speak TLS only
PENSTOCK_PS_TLS_CERT     PEM files of the server's certificate and key; with them it speaks TLS only
PENSTOCK_PS_TLS_KEY
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.errors import SpecError
from penstock.protocol.checkpoints import DIRECTORY
from penstock.ps.origin import Copy

Mode = Literal["sync", "half_async", "async", "geo"]
T = TypeVar("T")
_TRANSPORTS = ("auto", "tcp")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. A trainer needs `ca`; a server `cert` and `key`."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One server of a job.

    `endpoint`: host:port to listen at. `fanin`: how many trainers have to join before the first round closes.
    `num_threads`: blocks that are updated at the same time. `save_dirs`: where `save` may write, beside `state_dir`.
    `num_servers`: of the job; needed to go on from the state that another number of servers left (0: not said).
    `restored`: the checkpoint that its values are from.
    """

    endpoint: str
    index: int
    fanin: int
    mode: Mode
    job: str = "local"
    token: str = field(default="", repr=False)
    epoch: int = 0
    lease_s: float = 20.0
    start_s: float = 600.0
    state_dir: Path | None = None
    snapshot_every_s: float = 60.0
    save_dirs: tuple[Path, ...] = ()
    num_threads: int = 2
    tls: TlsFiles | None = None
    num_servers: int = 0
    restored: Copy = field(default_factory=Copy)

    @property
    def name(self) -> str:
        """This server's part of a folder that all servers write to."""
        return f"{self.index}-of-{self.num_servers}" if self.num_servers else str(self.index)

    @property
    def folder(self) -> Path | None:
        """This server's own part of `state_dir`."""
        return None if self.state_dir is None else self.state_dir / self.name

    @staticmethod
    def from_environ(
        environ: Mapping[str, str], *, started_ns: int, endpoint: str, index: int, fanin: int, mode: Mode,
        num_threads: int = 2, num_servers: int = 0, restored: Copy | None = None,
    ) -> ServerSettings:  # fmt: skip
        """Read the environment; the rest stands in the program. Raises SpecError naming the variable."""
        if fanin < 1 or index < 0 or num_threads < 1:
            raise SpecError(
                f"a server has index >= 0, fanin >= 1, num_threads >= 1; not {index}, {fanin}, {num_threads}"
            )
        files = _tls_files(environ)
        if (files.cert is None) != (files.key is None):
            raise SpecError("PENSTOCK_PS_TLS_CERT and PENSTOCK_PS_TLS_KEY go together; one of them is not set")
        state = environ.get("PENSTOCK_PS_STATE_DIR", "")
        saves = environ.get("PENSTOCK_PS_SAVE_DIRS", "")
        return ServerSettings(
            endpoint=endpoint, index=index, fanin=fanin, mode=mode, num_threads=num_threads,
            num_servers=num_servers, restored=restored or Copy(),
            start_s=_seconds(environ, "PENSTOCK_PS_START_S", 600.0),
            state_dir=Path(state) if state else None,
            snapshot_every_s=_seconds(environ, "PENSTOCK_PS_SNAPSHOT_S", 60.0),
            save_dirs=tuple(Path(p) for p in (*saves.split(os.pathsep), environ.get(DIRECTORY, "")) if p),
            tls=files if files.cert is not None else None,
            **_of_job(environ, started_ns),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """One trainer of a job. Who it is, and where the servers are, stands in its program.

    `shared_memory`: whether servers of the same host are reached through it.
    """

    job: str = "local"
    token: str = field(default="", repr=False)
    epoch: int = 0
    lease_s: float = 20.0
    start_s: float = 600.0
    deadline_s: float = 30.0
    tls: TlsFiles | None = None
    shared_memory: bool = True

    @staticmethod
    def from_environ(environ: Mapping[str, str], *, started_ns: int) -> TrainerSettings:
        """Read the environment. Raises SpecError naming the variable."""
        files = _tls_files(environ)
        transport = _read(environ, "PENSTOCK_PS_TRANSPORT", "auto", str, "auto or tcp", _TRANSPORTS.__contains__)
        return TrainerSettings(
            start_s=_seconds(environ, "PENSTOCK_PS_START_S", 600.0),
            deadline_s=_seconds(environ, "PENSTOCK_PS_DEADLINE_S", 30.0),
            tls=files if files.ca is not None else None,
            shared_memory=transport == "auto",
            **_of_job(environ, started_ns),
        )


def _of_job(environ: Mapping[str, str], started_ns: int) -> dict[str, Any]:
    """Fields that servers and trainers share."""
    return {
        "job": environ.get("PENSTOCK_JOB_ID", "local"),
        "token": environ.get("PENSTOCK_PS_TOKEN", ""),
        "epoch": _read(environ, "PENSTOCK_EPOCH", started_ns, int, "a whole number from 0 to 2^63 - 1", _is_epoch),
        "lease_s": _seconds(environ, "PENSTOCK_PS_LEASE_S", 20.0),
    }


def _is_epoch(value: int) -> bool:
    return 0 <= value < 2**63


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    return _read(environ, name, default, float, "a number of seconds above 0", lambda s: 0 < s < float("inf"))


def _read(
    environ: Mapping[str, str], name: str, default: T, parse: Callable[[str], T], expected: str,
    fits: Callable[[T], bool],
) -> T:  # fmt: skip
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = parse(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise SpecError(f"{name} is {text!r}; expected {expected}", pointer=name, got=text, expected=expected)
    return value


def _tls_files(environ: Mapping[str, str]) -> TlsFiles:
    paths = (environ.get(f"PENSTOCK_PS_TLS_{part}", "") for part in ("CA", "CERT", "KEY"))
    return TlsFiles(*(Path(p) if p else None for p in paths))
